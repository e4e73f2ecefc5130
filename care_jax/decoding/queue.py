"""Decodes many prompts on few slots: the host's side of continuous decoding.

Prompts take slots a few at a time (`schedule`), and all their rollouts are decoded (`sampler`).
Finished prompts are yielded while the devices decode the others, so verifying takes no device
time. Between two calls of `advance` the host reads which slots are free and pads the prompts that
take them.

A prompt is decoded on the batch shard that trains on it, so neither prompts nor responses cross the
network. Every process knows all waiting prompts and makes the same decisions. Nothing depends on
how long the host takes: the same weights and prompts give the same calls.

Letters: B slots, R rows of a slot, G rollouts of a prompt, T tokens of a rollout, N prompts of a
prefill, P prompt tokens, S positions of a row's ring. `sampler` explains slots, rows and rings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int, PRNGKeyArray

from care_jax.batch import Rollouts
from care_jax.decoding.programs import DecodePrograms
from care_jax.decoding.sampler import Sampled
from care_jax.decoding.schedule import Admission, Scheduler, Sizes, WaitingPrompt
from care_jax.decoding.slots import Slots
from care_jax.devices import distributed, sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.prompts.builder import PromptBuilder, TokenizedPrompt
from models import backbone
from models.config import BackboneConfig

NO_CONTEXT = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
        place: index of the prompt in the step. It is folded into the prompt's random key, so
            samples depend on neither schedule nor mesh, and it determines the prompt's shard.
        prompt: the prompt, tokenised.
        context: forced tokens at the start of each response; they count towards T.
        limits: most tokens of each response, at most T; None for T.
    """

    place: int
    prompt: TokenizedPrompt
    context: Int[np.ndarray, " c"] = dataclasses.field(default_factory=lambda: NO_CONTEXT)
    limits: Int[np.ndarray, " G"] | None = None


class DecodeQueue:
    """Decodes prompts with the sizes and settings of one configuration.

    Args:
        programs: compiled for the policy.
        prompts: pads the policy's prompts.
        sizes: shapes to run the programs with.
        clock: measures the device time of the programs.

    Attributes:
        num_steps: decode steps so far; a step advances all rows.
    """

    def __init__(
        self, programs: DecodePrograms, prompts: PromptBuilder, sizes: Sizes, clock: DeviceClock
    ):
        self.programs, self.prompts, self.sizes, self.clock = programs, prompts, sizes, clock
        self.num_steps = 0

    def decode(
        self, params: backbone.Params, rng: PRNGKeyArray, requests: Sequence[Request]
    ) -> Iterator[tuple[list[int], Rollouts]]:
        """Decodes prompts and yields them in the order in which they finish.

        Args:
            params: in the decode layout.
            rng: key of all draws.
            requests: of this process. Each process passes different requests, with places of its
                shards.

        Yields:
            indices of n requests, and their rollouts [n, G, ...] as numpy arrays.

        Raises:
            distributed.Preempted: the run is to end.
        """
        scheduler = Scheduler(_gather_waiting(requests), self.sizes)
        buffer = _RolloutBuffer(
            requests, self.sizes, self.programs.batch_sharding, self.programs.config
        )
        slots, longest, num_steps, finished = None, 0, 0, None
        while scheduler.has_prompts:
            if distributed.is_preempted():
                raise distributed.Preempted
            while (admission := scheduler.admit()) is not None:
                slots, first = self._admit(params, rng, requests, admission, slots, longest)
                self.clock.watch(first)
                buffer.enqueue(first, scheduler.places)
            if (shares := scheduler.share()) is not None:
                slots = self.programs.share(
                    slots, *map(self._put_slots, (shares.source, shares.begin, shares.end))
                )
            assert slots is not None  # the first prompts are admitted
            while (kept := scheduler.halve()) is not None:
                slots = self._keep(slots, self._put_slots(kept))
            slots = self._with_room(slots, slots.prefix.is_valid.shape[1], longest)
            num_wanted = np.int32(scheduler.num_wanted)
            slots, sampled, progress = self.programs.advance(params, slots, num_wanted)
            self.clock.watch(progress)
            buffer.enqueue(sampled, scheduler.places)
            if finished is not None:
                yield finished  # the devices are decoding meanwhile
            buffer.store()
            progress = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), progress)
            longest, num_steps = int(progress.longest), int(progress.clock)
            released = scheduler.release(progress.is_free, progress.next_rollout)
            finished = buffer.collect(released, scheduler.places, slots)
        self.num_steps += num_steps
        if finished is not None:
            yield finished

    def _put_slots(self, array: Int[np.ndarray, " B"]) -> jax.Array:
        """Puts one number per slot, known to all processes, on the devices."""
        rows = sharding.local_rows(len(array), self.programs.batch_sharding)
        return sharding.put_batch(array[rows], self.programs.batch_sharding)

    def _admit(
        self,
        params: backbone.Params,
        rng: PRNGKeyArray,
        requests: Sequence[Request],
        admission: Admission,
        slots: Slots | None,
        longest: int,
    ) -> tuple[Slots, Sampled]:
        """Prefills the admitted prompts and gives them their slots."""
        sizes, put = (
            self.sizes,
            functools.partial(sharding.put_batch, sharding=self.programs.batch_sharding),
        )
        by_place = {request.place: request for request in requests}
        padding = Request(0, self.prompts.empty_prompt)
        admitted = [
            padding if prompt is None else by_place[prompt.place]
            for prompt in (
                admission.prompts[row]
                for row in sharding.local_rows(sizes.num_new, self.programs.batch_sharding)
            )
        ]
        prompts = self.prompts.batch(
            [request.prompt for request in admitted],
            admission.sizes,
            contexts=[request.context for request in admitted],
            context_tokens=sizes.context_tokens,
        )
        full_budget = np.full(sizes.num_rollouts, sizes.max_tokens)
        budget = [
            (full_budget if request.limits is None else request.limits) - len(request.context)
            for request in admitted
        ]
        places = np.array([request.place for request in admitted], np.int32)
        num_tokens = prompts.tokens.shape[1]
        if slots is None:
            slots = self.programs.empty(sizes, num_tokens, sizes.ring_for(0))
        slots = self._with_room(slots, num_tokens, longest)
        arrays = *put((places, np.array(budget, np.int32))), self._put_slots(admission.chosen)
        return self.programs.admit(params, slots, put(prompts), rng, *arrays)

    def _with_room(self, slots: Slots, num_tokens: int, longest: int) -> Slots:
        """Makes room for prompts of `num_tokens` tokens, and in the ring for one `advance` call."""
        prefix, cache, programs = slots.prefix, slots.cache, self.programs
        if num_tokens > prefix.is_valid.shape[1]:
            _change(prefix.cache.keys, lambda x: programs.pad(x, 3, num_tokens))
            _change(prefix.cache.values, lambda x: programs.pad(x, 2, num_tokens))
            is_valid = [prefix.is_valid]
            _change(is_valid, lambda x: programs.pad(x, 1, num_tokens))
            prefix = dataclasses.replace(prefix, is_valid=is_valid[0])
            slots = dataclasses.replace(slots, prefix=prefix)
        wanted = self.sizes.ring_for(longest)
        while (size := cache.keys[0].shape[4]) != wanted:
            size = size * 2 if size < wanted else size // 2
            _change(cache.keys, lambda x: programs.resize(x, slots.clock, 4, size))  # noqa: B023
            _change(cache.values, lambda x: programs.resize(x, slots.clock, 3, size))  # noqa: B023
        return slots

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
    for place, array in enumerate(arrays):
        arrays[place] = jax.device_put(function(array), array.sharding)


def _gather_waiting(requests: Sequence[Request]) -> list[WaitingPrompt]:
    """The prompts of all processes."""
    local = [
        (len(request.prompt.tokens), request.place, len(request.prompt.patches))
        for request in requests
    ]
    return [WaitingPrompt(*row) for part in distributed.gather_json(local) for row in part]


class _RolloutBuffer:
    """The rollouts of this process's requests as they accumulate (numpy)."""

    def __init__(
        self,
        requests: Sequence[Request],
        sizes: Sizes,
        batch_sharding: NamedSharding,
        config: BackboneConfig,
    ):
        self._contexts = [request.context for request in requests]
        self._index_of = {request.place: index for index, request in enumerate(requests)}
        self._config, self._sharding = config, batch_sharding
        shape = len(requests), sizes.num_rollouts, sizes.max_tokens
        self._tokens = np.full(shape, config.pad_token_id, np.int32)
        self._logp = np.zeros(shape, np.float32)
        self._is_sampled = np.zeros(shape, bool)
        self._rationale = np.zeros((*shape[:2], config.text.hidden_size), np.float32)
        self._queued: list[tuple[Sampled, Int[np.ndarray, " b"]]] = []

    def enqueue(self, sampled: Sampled, places: Int[np.ndarray, " B"]) -> None:
        """Queues the samples of a program that may still run.

        Args:
            sampled: its samples.
            places: place of the prompt on each slot, -1 if free.
        """
        slots = sharding.local_rows(len(places), self._sharding)
        indices = [self._index_of.get(place, -1) for place in places[slots].tolist()]
        self._queued.append((sampled, np.array(indices)))

    def store(self) -> None:
        """Waits for the queued samples and stores them."""
        queued, self._queued = self._queued, []
        for sampled, indices in queued:
            sampled = distributed.fetch(sampled)
            slot, row, step = np.nonzero(sampled.rollout >= 0)
            found = slot, row, step
            target = indices[slot], sampled.rollout[found], sampled.index[found]
            self._tokens[target], self._logp[target] = sampled.tokens[found], sampled.logp[found]
            self._is_sampled[target] = True

    def collect(
        self, released: Sequence[tuple[int, int]], places: Int[np.ndarray, " B"], slots: Slots
    ) -> tuple[list[int], Rollouts] | None:
        """Returns the requests that have just released their last slot, with their rollouts.

        Args:
            released: (place, slot) of prompts that have just released a slot.
            places: place of the prompt on each slot, -1 if free.
            slots: as `advance` returned them.

        Returns:
            None if there are none.
        """
        released = [
            (self._index_of[place], slot) for place, slot in released if place in self._index_of
        ]
        if not released:
            return None
        local = {
            int(slot): row
            for row, slot in enumerate(sharding.local_rows(len(places), self._sharding))
        }
        rationale = distributed.fetch(slots.rationale)
        for index, slot in released:  # a prompt's rollouts may be spread over several slots
            self._rationale[index] += rationale[local[slot]]
        busy = {self._index_of.get(place) for place in places.tolist()}
        indices = sorted({index for index, _ in released} - busy)
        return (indices, self._rollouts(indices)) if indices else None

    def _rollouts(self, indices: list[int]) -> Rollouts:
        """The rollouts of some requests, each with its context in front."""
        contexts = [self._contexts[index] for index in indices]
        num_forced = np.array([len(context) for context in contexts])[:, None, None]
        slots = np.arange(self._tokens.shape[-1])
        is_forced = np.broadcast_to(slots < num_forced, self._tokens[indices].shape)
        source = np.maximum(slots - num_forced, 0)
        shift = functools.partial(np.take_along_axis, indices=source, axis=-1)
        is_sampled = shift(self._is_sampled[indices]) & ~is_forced
        tokens = np.where(is_sampled, shift(self._tokens[indices]), self._config.pad_token_id)
        for row, context in zip(tokens, contexts, strict=True):
            row[:, : len(context)] = context
        is_valid = is_forced | is_sampled
        last = np.take_along_axis(tokens, is_valid.sum(-1, keepdims=True) - 1, -1)[..., 0]
        rationale = self._rationale[indices]
        norm = np.linalg.norm(rationale, axis=-1, keepdims=True)
        return Rollouts(
            tokens=tokens,
            is_valid=is_valid,
            is_forced=is_forced,
            logp=np.where(is_sampled, shift(self._logp[indices]), 0.0),
            embedding=rationale / np.maximum(norm, 1e-6),
            is_complete=np.isin(last, self._config.eos_token_ids),
        )
