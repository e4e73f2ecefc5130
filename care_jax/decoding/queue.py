"""Decodes many prompts in few slots: the compiled programs, and the host loop that calls them.

`schedule` admits prompts to slots, `sampler` decodes all their rollouts. Finished prompts are
yielded while the devices decode the others, so that verification overlaps with decoding. Between
two calls of `advance` the host reads which slots are free and pads the next prompts.

A prompt is decoded on the batch shard that trains on it, so neither prompts nor responses cross the
network. Every process has the sizes of all waiting prompts and makes the same decisions. They do
not depend on the host's speed: the same weights and prompts give the same calls.

Letters: B slots, G rollouts of a prompt, T tokens of a rollout, P prompt tokens, N prompts of a
prefill.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from care_jax.batch import Rollouts
from care_jax.decoding import sampler
from care_jax.decoding.sampler import DecodeOptions, SampledTokens
from care_jax.decoding.schedule import Scheduler, Sizes, WaitingPrompt, sizes_of, widened
from care_jax.decoding.slots import Slots, empty_slots, keep_slots, pad_left, slot_axes
from care_jax.devices import distributed, sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.prompts.builder import PromptBuilder, TokenizedPrompt
from models import backbone
from models.attention.cached import keys_axis

NO_CONTEXT = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode."""

    # Of the prompt in the step; folded into the prompt's random key, so that samples depend on
    # neither schedule nor mesh. It also determines the prompt's shard.
    index: int
    prompt: TokenizedPrompt
    # Forced tokens at the start of each response; they count towards T.
    context: Int[np.ndarray, " c"] = dataclasses.field(default_factory=lambda: NO_CONTEXT)
    limits: Int[np.ndarray, " G"] | None = None  # maximum tokens of each response; None for T


@dataclasses.dataclass(frozen=True)
class DecodePrograms:
    """The compiled functions of decoding, see `compile_decoding`."""

    options: DecodeOptions  # what they are compiled for
    empty: Callable[..., Slots]  # (sizes, P)
    # (params, slots, prompts, rng, indices [N], budget [N, G], chosen [B]), prefill included
    admit: Callable[..., tuple[Slots, SampledTokens]]
    share: Callable[..., Slots]  # (slots, source [B], begin [B], end [B])
    # (params, slots, refill) -> slots, sampled tokens, progress
    advance: Callable[..., tuple[Slots, SampledTokens, tuple[jax.Array, ...]]]
    pad: Callable[..., jax.Array]  # (array of the prefix, axis of its tokens, size P)
    keep: Callable[..., jax.Array]  # (array of the slots, indices of the slots to keep)


def compile_decoding(options: DecodeOptions) -> DecodePrograms:
    """The jitted functions of decoding."""
    mesh, rules, num_shards = options.mesh, options.rules, options.num_shards
    placed = functools.partial(sharding.placed, rules=rules, mesh=mesh)

    def laid_out(slots: Slots) -> Slots:
        """Constrains the slots to the same shardings after every program."""
        shardings = sharding.param_shardings(slot_axes(slots), slots, rules, mesh)
        return jax.lax.with_sharding_constraint(slots, shardings)

    def by_slot(sampled: SampledTokens) -> SampledTokens:
        return jax.lax.with_sharding_constraint(sampled, options.batch_sharding)

    def empty(sizes, num_prompt_tokens):
        attention = options.attention.steps
        slots = empty_slots(options.config, sizes, num_prompt_tokens, options.dtype, attention)
        return laid_out(slots)

    def admit(params, slots, prompts, rng, indices, budget, chosen):
        slots, first = sampler.admit(params, slots, prompts, rng, indices, budget, chosen, options)
        return laid_out(slots), by_slot(first)

    def share(slots, source, begin, end):
        return laid_out(sampler.occupy(slots, slots.prefix, source, begin, end, num_shards))

    def advance(params, slots, refill):
        slots, sampled, progress = sampler.advance(params, slots, refill, options)
        progress = jax.lax.with_sharding_constraint(progress, sharding.replicated(mesh))
        return laid_out(slots), by_slot(sampled), progress

    return DecodePrograms(
        options=options,
        empty=jax.jit(placed(empty), static_argnums=(0, 1)),
        admit=jax.jit(placed(admit), donate_argnums=1),
        share=jax.jit(share, donate_argnums=0),
        advance=jax.jit(placed(advance), donate_argnums=1),
        pad=jax.jit(pad_left, static_argnames=("axis", "size")),
        keep=jax.jit(functools.partial(keep_slots, num_shards=num_shards)),
    )


class DecodeQueue:
    """Decodes prompts with the sizes and settings of one configuration.

    `prompts` pads the policy's prompts, `clock` measures the device time of the programs, and
    `num_steps` counts the decode steps so far; a step advances all rows. `meanwhile` is called
    whenever the devices have begun to decode: it does other work of the host.
    """

    def __init__(
        self,
        programs: DecodePrograms,
        prompts: PromptBuilder,
        sizes: Sizes,
        clock: DeviceClock,
        meanwhile: Callable[[], None] = lambda: None,
    ):
        self.programs, self.prompts, self.sizes, self.clock = programs, prompts, sizes, clock
        self.meanwhile = meanwhile
        self.num_steps = 0

    def decode(
        self, params: backbone.Params, rng: PRNGKeyArray, requests: Sequence[Request]
    ) -> Iterator[tuple[list[int], Rollouts]]:
        """Decodes prompts and yields them in the order in which they finish.

        Each process passes its requests, with indices of its shards. `params` are in the decode
        layout; `rng` is the key of all draws.

        Yields:
            indices of n requests in `requests`, and their rollouts [n, G, ...] in numpy.

        Raises:
            distributed.Preempted: the run was preempted.
        """
        scheduler = Scheduler(_gather_waiting(requests), self.sizes)
        buffer = _RolloutBuffer(requests, self.sizes, self.programs.options)
        slots, num_steps, finished = None, 0, None
        while scheduler.has_prompts:
            if distributed.is_preempted():
                raise distributed.Preempted
            while (admission := scheduler.admit()) is not None:
                slots, first = self._admit(params, rng, requests, *admission, slots)
                self.clock.watch(first)
                buffer.enqueue(first, scheduler.indices)
            if (shares := scheduler.share()) is not None:
                slots = self.programs.share(slots, *map(self._put, shares))
            assert slots is not None  # the first prompts are admitted
            while (kept := scheduler.halve()) is not None:
                slots = self._keep(slots, self._put(kept))
            slots, sampled, progress = self.programs.advance(params, slots, scheduler.refill)
            self.clock.watch(progress)
            buffer.enqueue(sampled, scheduler.indices)
            self.meanwhile()
            if finished is not None:
                yield finished  # the devices are decoding meanwhile
            buffer.store()
            *progress, num_steps = (np.asarray(x.addressable_data(0)) for x in progress)
            released = scheduler.release(*progress)
            finished = buffer.collect(released, scheduler.indices, slots)
        self.num_steps += int(num_steps)
        if finished is not None:
            yield finished

    def _put(self, array: Int[np.ndarray, " B"]) -> jax.Array:
        """Puts one number per slot, known to all processes, on the devices."""
        batch_sharding = self.programs.options.batch_sharding
        rows = sharding.local_rows(len(array), batch_sharding)
        return sharding.put_batch(array[rows], batch_sharding)

    def _admit(
        self,
        params: backbone.Params,
        rng: PRNGKeyArray,
        requests: Sequence[Request],
        waiting: Sequence[WaitingPrompt | None],
        chosen: Int[np.ndarray, " B"],
        slots: Slots | None,
    ) -> tuple[Slots, SampledTokens]:
        """Prefills the admitted prompts and assigns their slots."""
        sizes, batch_sharding = self.sizes, self.programs.options.batch_sharding
        by_index = {request.index: request for request in requests}
        padding = Request(0, self.prompts.empty_prompt)
        local = [waiting[row] for row in sharding.local_rows(sizes.num_new, batch_sharding)]
        admitted = [padding if prompt is None else by_index[prompt.index] for prompt in local]
        tokenized, contexts = [r.prompt for r in admitted], [r.context for r in admitted]
        prompts = self.prompts.batch(
            tokenized, sizes_of(waiting), contexts=contexts, context_tokens=sizes.context_tokens
        )
        budget = np.full((len(admitted), sizes.num_rollouts), sizes.max_tokens, np.int32)
        for row, request in zip(budget, admitted, strict=True):
            row[:] = (row if request.limits is None else request.limits) - len(request.context)
        largest = self.prompts.buckets[-1][0] + sizes.context_tokens
        before = 0 if slots is None else slots.prefix.is_valid.shape[1]
        num_tokens = widened(before, prompts.tokens.shape[1], largest)
        if slots is None:
            slots = self.programs.empty(sizes, num_tokens)
        elif num_tokens > before:
            slots = self._widen(slots, num_tokens)
        indices = np.array([request.index for request in admitted], np.int32)
        prompts, *arrays = sharding.put_batch((prompts, indices, budget), batch_sharding)
        return self.programs.admit(params, slots, prompts, rng, *arrays, self._put(chosen))

    def _widen(self, slots: Slots, num_tokens: int) -> Slots:
        """Pads the prefix cache to `num_tokens` prompt tokens."""
        prefix, is_valid = slots.prefix, [slots.prefix.is_valid]
        keys = keys_axis(self.programs.options.attention.steps)
        for arrays, axis in ((prefix.cache.keys, keys), (prefix.cache.values, -2), (is_valid, 1)):
            _change(arrays, functools.partial(self.programs.pad, axis=axis, size=num_tokens))
        return dataclasses.replace(slots, prefix=dataclasses.replace(prefix, is_valid=is_valid[0]))

    def _keep(self, slots: Slots, kept: jax.Array) -> Slots:
        """Keeps half of the slots; see `Scheduler.halve`."""
        clock, arrays = slots.clock, dataclasses.replace(slots, clock=None)
        leaves, structure = jax.tree.flatten(arrays)
        del slots, arrays
        _change(leaves, lambda x: self.programs.keep(x, kept))
        return dataclasses.replace(jax.tree.unflatten(structure, leaves), clock=clock)


def _change(arrays: list[jax.Array], function: Callable[[jax.Array], jax.Array]) -> None:
    """Replaces each array by the program's result, in the same sharding.

    One array at a time, so that no second copy of the whole cache exists.
    """
    for number, array in enumerate(arrays):
        arrays[number] = jax.device_put(function(array), array.sharding)


def _gather_waiting(requests: Sequence[Request]) -> list[WaitingPrompt]:
    """The prompts of all processes."""
    local = [(len(r.prompt.tokens), r.index, len(r.prompt.patches)) for r in requests]
    return [WaitingPrompt(*row) for part in distributed.gather_json(local) for row in part]


class _RolloutBuffer:
    """The rollouts of this process's requests as they accumulate (numpy)."""

    def __init__(self, requests: Sequence[Request], sizes: Sizes, options: DecodeOptions):
        self._config, self._sharding = options.config, options.batch_sharding
        self._number_of = {request.index: number for number, request in enumerate(requests)}
        self._num_forced = np.array([len(request.context) for request in requests], int)
        shape = len(requests), sizes.num_rollouts, sizes.max_tokens
        self._tokens = np.full(shape, self._config.pad_token_id, np.int32)
        self._logp = np.zeros(shape, np.float32)
        self._is_sampled = np.zeros(shape, bool)
        self._rationale = np.zeros((*shape[:2], self._config.text.hidden_size), np.float32)
        for rows, request in zip(self._tokens, requests, strict=True):
            rows[:, : len(request.context)] = request.context
        self._queued: list[tuple[SampledTokens, Int[np.ndarray, " b"]]] = []

    def _numbers(self, indices: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Index of each slot's request; -1 if the slot is free or of another process."""
        return np.array([self._number_of.get(index, -1) for index in indices.tolist()])

    def enqueue(self, sampled: SampledTokens, indices: Int[np.ndarray, " B"]) -> None:
        """Queues the tokens of a program that may still run; `indices` as in `collect`."""
        rows = sharding.local_rows(len(indices), self._sharding)
        self._queued.append((sampled, self._numbers(indices)[rows]))

    def store(self) -> None:
        """Waits for the queued tokens and stores them."""
        queued, self._queued = self._queued, []
        for sampled, numbers in queued:
            sampled = distributed.fetch(sampled)
            found = np.nonzero(sampled.rollout >= 0)
            number = numbers[found[0]]
            index = sampled.index[found] + self._num_forced[number]
            target = number, sampled.rollout[found], index
            self._tokens[target], self._logp[target] = sampled.token[found], sampled.logp[found]
            self._is_sampled[target] = True

    def collect(
        self, released: Sequence[tuple[int, int]], indices: Int[np.ndarray, " B"], slots: Slots
    ) -> tuple[list[int], Rollouts] | None:
        """The requests that have just released their last slot, with their rollouts, if any.

        Args:
            released: (index of the prompt, slot) of the slots that have just become free.
            indices: of the prompt in each slot, -1 if free.
            slots: as `advance` returned them.
        """
        released = [
            (self._number_of[index], slot) for index, slot in released if index in self._number_of
        ]
        if not released:
            return None
        rows = sharding.local_rows(len(indices), self._sharding)
        rationale = distributed.fetch(slots.rationale)
        for number, slot in released:  # a prompt's rollouts may be spread over several slots
            self._rationale[number] += rationale[np.searchsorted(rows, slot)]
        done = {number for number, _ in released}.difference(self._numbers(indices).tolist())
        return (sorted(done), self._rollouts(sorted(done))) if done else None

    def _rollouts(self, numbers: list[int]) -> Rollouts:
        """The rollouts of some requests, each with its context in front."""
        tokens, num_forced = self._tokens[numbers], self._num_forced[numbers][:, None, None]
        is_forced = np.broadcast_to(np.arange(tokens.shape[-1]) < num_forced, tokens.shape)
        is_valid = is_forced | self._is_sampled[numbers]
        last = np.take_along_axis(tokens, is_valid.sum(-1, keepdims=True) - 1, -1)[..., 0]
        rationale = self._rationale[numbers]
        norm = np.linalg.norm(rationale, axis=-1, keepdims=True)
        return Rollouts(
            tokens=tokens,
            is_valid=is_valid,
            is_forced=is_forced,
            logp=self._logp[numbers],
            embedding=rationale / np.maximum(norm, 1e-6),
            is_complete=np.isin(last, self._config.eos_token_ids),
        )
