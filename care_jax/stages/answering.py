"""Decodes the answers of an evaluation, a few batches at a time.

Random numbers are a function of the run's seed, the question's index and the sample's, so two
evaluations of a run differ by the weights alone.

Letters: G samples of each question.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.batch import Example, Rollouts
from care_jax.benchmarks.samples import Answers
from care_jax.decoding.queue import DecodeQueue
from care_jax.decoding.rollout_buffer import Request
from care_jax.decoding.schedule import Sizes
from care_jax.devices import distributed, loaded_programs, sharding, streams
from care_jax.devices.device_clock import DeviceClock
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.report.console import progress
from care_jax.rewards.scores import row_texts
from care_jax.rl.rollout_programs import compile_decoder
from care_jax.run.attention_check import decoding_attention
from care_jax.run.run import Run, compile_to_decode_layout
from models import backbone

Decode = Callable[[Sequence[Request]], Iterator[tuple[list[int], Rollouts]]]

_NUM_BATCHES = 4  # batches of evaluate.batch_size that are decoded and written together


@dataclasses.dataclass(frozen=True)
class AnsweringPrograms:
    """The compiled functions of a run's evaluations, see `compile_answering`."""

    to_decode_layout: Callable  # params -> params in the decode layout
    checksum: Callable  # params -> [L] checksums of the L weights
    queue: DecodeQueue  # with the sizes and sampling settings of `config.evaluate`


def compile_answering(run: Run) -> AnsweringPrograms:
    """The jitted functions of evaluation, each compiled once per shape that occurs."""
    settings = run.config.evaluate

    def checksum(params):
        return jnp.stack(list(map(_checksum, jax.tree.leaves(params))))

    sizes = answering_sizes(run)
    decoding = compile_decoder(
        run,
        temperature=settings.temperature,
        top_p=settings.top_p,
        attention=decoding_attention(run, sizes),
    )
    return AnsweringPrograms(
        to_decode_layout=compile_to_decode_layout(run),
        checksum=jax.jit(checksum, out_shardings=sharding.replicated(run.mesh)),
        queue=DecodeQueue(decoding, run.policy.prompts, sizes, DeviceClock()),
    )


def _checksum(x: jax.Array) -> jax.Array:
    """The sum, modulo 2^32, of hashes of an array's bits and places: the same on every mesh.

    A sum of values in floating point does not notice an update at a learning rate of 1e-6.
    """
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jax.lax.broadcasted_iota(jnp.uint32, (x.size,), 0).reshape(x.shape)
    mixed = bits + place * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def answering_sizes(run: Run) -> Sizes:
    """Sizes of an evaluation's decode."""
    settings = run.config.evaluate
    return Sizes(
        num_slots=settings.batch_size,
        num_rows=min(settings.decode_rows, settings.num_samples),
        num_rollouts=settings.num_samples,
        max_tokens=settings.max_response_tokens,
        num_context_tokens=0,
        num_shards=sharding.num_shards(run.decode_batch_sharding),
        period=settings.batch_size,
    )


def make_decoder(run: Run, params: backbone.Params, programs: AnsweringPrograms) -> Decode:
    """A function from this process's requests to (indices of requests, their G rollouts) pairs.

    Pairs are yielded in order of completion. A request's index determines its random numbers. The
    first call converts the weights to the decode layout.
    """
    decode_params = functools.cache(lambda: programs.to_decode_layout(params))
    rng = streams.key_of(run.config.seed, streams.EVALUATION)
    return lambda requests: programs.queue.decode(decode_params(), rng, requests)


def decode_batches(
    run: Run, decode: Decode, questions: Sequence[Example], done: Collection[int], label: str
) -> Iterator[Answers]:
    """Decodes the examples whose index is not in `done`, `_NUM_BATCHES` batches at a time.

    `questions` and `done` are the same on all processes; `label` names the evaluation.

    Raises:
        distributed.Preempted: the run was preempted.
    """
    policy, size = run.policy, run.config.evaluate.batch_size
    starts = np.arange(0, _NUM_BATCHES * size, size)
    local_rows = (starts[:, None] + sharding.local_rows(size, run.decode_batch_sharding)).ravel()
    # A question's batch depends on its index alone, whichever questions are done.
    num_rows = _NUM_BATCHES * size
    todo = (place for place in range(len(questions)) if place not in done)
    firsts = sorted({place - place % num_rows for place in todo})
    groups = [
        [
            place
            for place in (first + local_rows).tolist()
            if place < len(questions) and place not in done
        ]
        for first in firsts
    ]
    groups = _prepared(run, questions, groups)
    for examples, prompts in progress(groups, f"evaluate {label}", 0, len(firsts)):
        loaded_programs.drop_if_many()
        kept = [place for place, prompt in prompts.items() if policy.prompts.fits(prompt)]
        try:
            parts = list(decode([Request(place, prompts[place]) for place in kept]))
        except distributed.Preempted:
            raise distributed.Preempted(f"in the evaluation {label}") from None
        indices = [index for part, _ in parts for index in part]
        rollouts = [rollouts for _, rollouts in parts] or [_no_rollouts(run)]
        order = np.argsort(indices).astype(int)
        rollouts = jax.tree.map(lambda *rows: np.concatenate(rows)[order], *rollouts)  # noqa: B023
        texts = row_texts(rollouts, policy.token_bytes, eos_token_ids=policy.config.eos_token_ids)
        yield Answers(
            indices=kept,
            examples=[examples[place] for place in kept],
            rollouts=rollouts,
            texts=texts,
            dropped={place: examples[place] for place in examples if place not in kept},
        )


def _prepared(
    run: Run, questions: Sequence[Example], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[dict[int, Example], dict[int, TokenizedPrompt]]]:
    """Examples and prompts of each group of indices; threads prepare the next group meanwhile."""
    workers = ThreadPoolExecutor(run.config.data.num_workers, "prompts")

    def prepare(place: int) -> tuple[Example, TokenizedPrompt]:
        example = questions[place]
        return example, run.policy.prompts.tokenize(example)

    def begin(places: Sequence[int]) -> dict[int, Future[tuple[Example, TokenizedPrompt]]]:
        return {place: workers.submit(prepare, place) for place in places}

    try:
        upcoming = iter(groups)
        begun = begin(next(upcoming, ()))
        for _ in groups:
            done = {place: future.result() for place, future in begun.items()}
            begun = begin(next(upcoming, ()))
            examples = {place: example for place, (example, _) in done.items()}
            yield examples, {place: prompt for place, (_, prompt) in done.items()}
    finally:
        workers.shutdown(cancel_futures=True)


def _no_rollouts(run: Run) -> Rollouts:
    """The empty rollouts of a process without requests."""
    shape = 0, run.config.evaluate.num_samples, run.config.evaluate.max_response_tokens
    return Rollouts(
        tokens=np.zeros(shape, np.int32),
        is_valid=np.zeros(shape, bool),
        is_forced=np.zeros(shape, bool),
        logp=np.zeros(shape, np.float32),
        embedding=np.zeros((*shape[:2], run.policy.config.text.hidden_size), np.float32),
        is_complete=np.zeros(shape[:2], bool),
    )
