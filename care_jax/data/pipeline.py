"""Batches of tokenised prompts, prepared on the host while the device computes.

The examples of a step are a pure function of the step. Position p of the stream maps to one source
of the mixture and to a position k in that source's stream: its examples in shuffled order, with a
new shuffle every epoch. A run that resumes at a step therefore sees exactly what an uninterrupted
run would have seen, on any number of processes. An unusable row, or a prompt that fits no bucket,
is counted and replaced by the example at the same position of the source's next epoch. Positions
are filled independently, so each process prepares only its rows and its workers take them in any
order.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import grain
from absl import logging

from care_jax.batch import Example, Unusable
from care_jax.data.mixture import Mixture
from care_jax.prompts.builder import PromptBuilder, TokenizedPrompt

TOO_LONG = "prompt fits no bucket"
_MAX_TRIES = 64  # epochs that a position tries for a usable prompt before the run fails
_AHEAD = 2  # batches prefetched while the loop works on another
_Batch = tuple[list[Example], list[TokenizedPrompt]]


class Batches:
    """An endless stream of batches over a source.

    Args:
        batch_size: examples of one step; may exceed the length of the source.
        rows: indices of the batch rows to prepare; None for all.
        num_workers: threads that prepare a batch. Decoding images and splitting them into patches
            is nearly all of the work and runs in parallel in threads. Processes would have to
            transfer megabytes, which took longer than preparing them.
        left_out: counts unusable examples by reason; `iterate` counts up to two batches ahead.
        offset: position of the first batch in the stream of examples.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        builder: PromptBuilder,
        *,
        batch_size: int,
        seed: int,
        rows: Iterable[int] | None = None,
        num_workers: int = 1,
        left_out: Counter[str] | None = None,
        offset: int = 0,
    ):
        if not len(examples):
            raise ValueError("expected a source with examples, got an empty one; check its path")
        if batch_size < 1 or num_workers < 1:
            raise ValueError(
                f"batch_size and num_workers must be at least 1, got {batch_size}, {num_workers}"
            )
        self.left_out = Counter() if left_out is None else left_out
        self._lock = threading.Lock()
        sources, weights = [examples], [1.0]
        if isinstance(examples, Mixture):
            sources, weights = examples.sources, examples.weights
        streams = [
            _Stream(source, builder, seed + number, self._leave_out)
            for number, source in enumerate(sources)
        ]
        self._stream = grain.MapDataset.mix(list(map(grain.MapDataset.source, streams)), weights)
        self.lengths = [len(source) for source in sources]  # what the order depends on, with seed
        self._batch_size = batch_size
        self._rows = range(batch_size) if rows is None else [int(row) for row in rows]
        self._num_workers, self._offset = num_workers, offset

    def batch(self, step: int) -> _Batch:
        """The examples of a step and their prompts, a pure function of the step."""
        return self.at(self.positions(step))

    def positions(self, step: int) -> list[int]:
        """Positions of a step's examples in the stream."""
        return [self._offset + step * self._batch_size + row for row in self._rows]

    def at(self, positions: Iterable[int]) -> _Batch:
        """The examples at positions of the stream, and their prompts."""
        indices = [int(position) for position in positions]
        if self._num_workers == 1:
            pairs = list(map(self._stream.__getitem__, indices))
        else:
            with ThreadPoolExecutor(self._num_workers, "prompts") as workers:
                pairs = list(workers.map(self._stream.__getitem__, indices))
        return [example for example, _ in pairs], [prompt for _, prompt in pairs]

    def iterate(
        self, start_step: int, stop_step: int
    ) -> Iterator[tuple[int, list[Example], list[TokenizedPrompt]]]:
        """Yields (step, examples, prompts) from start_step up to but not including stop_step.

        A background thread keeps batches ready; its exceptions are re-raised here.
        """
        waiting: collections.deque[Future[_Batch]] = collections.deque()
        background = ThreadPoolExecutor(1, "prompts")
        try:
            for step in range(start_step, stop_step):
                for ahead in range(step + len(waiting), min(step + 1 + _AHEAD, stop_step)):
                    waiting.append(background.submit(self.batch, ahead))
                yield step, *waiting.popleft().result()
        finally:
            background.shutdown(cancel_futures=True)

    def _leave_out(self, reason: str, detail: str) -> None:
        with self._lock:
            self.left_out[reason] += 1
            count = self.left_out[reason]
        if count & (count - 1) == 0:  # at 1, 2, 4, 8, ...
            logging.warning("left out %d examples so far: %s%s", count, reason, detail)


def size_of(prompt: TokenizedPrompt) -> str:
    """The size of a prompt, which a bucket must have."""
    return f"{len(prompt.tokens)} tokens and {len(prompt.patches)} patches"


class _Stream(Sequence[tuple[Example, TokenizedPrompt]]):
    """A source repeated endlessly, with a usable prompt at every position."""

    def __init__(
        self,
        source: Sequence[Example],
        builder: PromptBuilder,
        seed: int,
        leave_out: Callable[[str, str], None],
    ):
        self._shuffled = grain.MapDataset.source(source).shuffle(seed).repeat()
        self._num_examples = len(source)
        self._builder = builder
        self._leave_out = leave_out

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[Example, TokenizedPrompt]:
        reasons: Counter[str] = Counter()
        details: dict[str, str] = {}
        for turn in range(_MAX_TRIES):
            try:
                example = self._shuffled[index + turn * self._num_examples]
                prompt = self._builder.tokenize(example)
                if self._builder.fits(prompt):
                    return example, prompt
                reason, detail = TOO_LONG, size_of(prompt)
            except Unusable as error:
                reason, detail = str(error), error.detail
            reasons[reason] += 1
            details.setdefault(reason, f" ({detail})" if detail else "")
            self._leave_out(reason, details[reason])
        ((reason, count),) = reasons.most_common(1)
        advice = "; check the source's rows and path"
        if reason == TOO_LONG:
            advice = f" of {self._builder.buckets}; enlarge data.buckets or lower data.max_pixels"
        raise ValueError(
            f"{_MAX_TRIES} successive examples are unusable, {count} of them: "
            f"{reason}{details[reason]}{advice}"
        )
