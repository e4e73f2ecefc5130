"""Batches of tokenised prompts, prepared while the device works.

Which examples a step sees is a pure function of the step: position p of the stream is example p
of the source, shuffled anew each time the source has been gone through. A run that resumes at a
step therefore sees exactly what an unbroken run would have seen. A prompt that fits no bucket
gives its place to the example that stands at the same place of the next pass, and is counted.
Each place is filled by itself, so a process of several prepares its own rows and no others.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import grain
from absl import logging

from care_jax.batch import Example
from care_jax.prompt import PromptBuilder, TokenizedPrompt

_MAX_TRIES = 64  # passes in which a place may meet a prompt too long before giving up


class Batches:
    """An endless stream of batches over a source.

    Args:
        examples: the source.
        builder: makes prompts of them.
        batch_size: examples of one step; may exceed the source.
        seed: of the shuffling.
        rows: of every batch, those that are wanted; all by default.

    Attributes:
        num_dropped: prompts met so far that fit no bucket.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        builder: PromptBuilder,
        *,
        batch_size: int,
        seed: int,
        rows: Sequence[int] | None = None,
    ):
        if not len(examples):
            raise ValueError("expected a source with at least one example, got an empty one")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.num_dropped = 0
        self._num_examples = len(examples)
        self._stream = grain.MapDataset.source(examples).shuffle(seed).repeat()
        self._builder = builder
        self._batch_size = batch_size
        self._rows = range(batch_size) if rows is None else [int(row) for row in rows]

    def batch(self, step: int) -> tuple[list[Example], list[TokenizedPrompt]]:
        """The examples of a step and their prompts, the same whenever they are asked for."""
        first = step * self._batch_size
        pairs = [self._at(first + row) for row in self._rows]
        examples, records = zip(*pairs, strict=True)
        return list(examples), list(records)

    def iterate(
        self, start_step: int, stop_step: int, *, ahead: int = 2
    ) -> Iterator[tuple[int, list[Example], list[TokenizedPrompt]]]:
        """Yields (step, examples, prompts) from start_step up to but not including stop_step.

        A background thread keeps `ahead` batches ready; what it raises is raised here.
        """
        ready: queue.Queue = queue.Queue(ahead)
        is_stopped = threading.Event()

        def put(item: object) -> None:
            while not is_stopped.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def prepare() -> None:
            try:
                for step in range(start_step, stop_step):
                    if is_stopped.is_set():
                        return
                    put((step, *self.batch(step)))
                put(None)
            except Exception as error:
                put(error)

        thread = threading.Thread(target=prepare, name="prompts", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            is_stopped.set()
            thread.join()

    def _at(self, position: int) -> tuple[Example, TokenizedPrompt]:
        for turn in range(_MAX_TRIES):
            example = self._stream[position + turn * self._num_examples]
            record = self._builder.tokenize(example)
            if self._builder.fits(record):
                return example, record
            self.num_dropped += 1
            logging.log_every_n(
                logging.WARNING,
                "dropped %s of %s: %d tokens, %d patches fit no bucket of %s (%d dropped so far)",
                100,
                example.id,
                example.source,
                len(record.tokens),
                len(record.patches),
                self._builder.buckets,
                self.num_dropped,
            )
        raise ValueError(
            f"{_MAX_TRIES} prompts in a row fit none of the buckets {self._builder.buckets}; "
            "enlarge data.buckets or lower data.max_pixels"
        )
