"""Schedules continuous decoding: which waiting prompt gets which slot, and when (host).

Prompts wait in one queue per batch shard, the shard that trains on them, shortest first. Once a
queue is empty, a free slot takes over half of the unstarted rollouts of another slot of its shard.
Once all queues are empty and every shard uses at most half of its slots, the number of slots is
halved. `simulate` runs the same `Scheduler` on given lengths, without a model.

Letters: B slots, R rows of a slot, G rollouts of a prompt, T tokens of a rollout, N prompts of a
prefill, P prompt tokens. `sampler` explains slots and rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

NUM_STEPS = 64  # maximum decode steps of a call of `sampler.advance`
_NUM_PREFILLS = 16  # prefills that fill all slots
_FEWEST_SLOTS = 1 / 4  # smallest fraction of the slots to keep; each halving is one more compile


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the decoding programs."""

    num_slots: int  # B, over all processes
    num_rows: int  # R
    num_rollouts: int  # G
    max_tokens: int  # T, context included
    context_tokens: int  # maximum number of forced tokens at the start of a rollout
    num_shards: int  # of the batch; divides B
    period: int  # prompts of an update; each such run of prompts is split evenly over the shards

    @property
    def num_new(self) -> int:
        """N, the prompts of a prefill; equally many on every shard."""
        return self.num_shards * max(self.num_slots // self.num_shards // _NUM_PREFILLS, 1)

    def shard_of(self, index: int) -> int:
        """The shard that trains on the prompt with this index in the step."""
        return index % self.period // (self.period // self.num_shards)


@dataclasses.dataclass(frozen=True, order=True)
class WaitingPrompt:
    """A waiting prompt: tokens, index in the step, image patches."""

    num_tokens: int
    index: int
    num_patches: int


def sizes_of(prompts: Sequence[WaitingPrompt | None]) -> Int[np.ndarray, "n 2"]:
    """Tokens and patches of each prompt; None is padding."""
    return np.array([(p.num_tokens, p.num_patches) for p in prompts if p is not None])


class Refill(NamedTuple):
    """What the host could do with free slots after a call of `sampler.advance`."""

    num_waiting: Int[np.ndarray, " shards"]  # prompts of each shard that one prefill could admit
    num_admitted: Int[np.ndarray, ""]  # fewest admitted prompts worth a prefill
    num_kept: Int[np.ndarray, ""]  # slots of a shard after halving; -1 if they are not halved

    def num_idle(
        self, is_free: Bool[Any, " B"], num_unstarted: Int[Any, " B"]
    ) -> Int[Any, ""]:
        """Slots that a step leaves idle though the host could refill them, in numpy or in jax.

        All slots if it should admit prompts or halve the slots at once, or nothing is decoded. A
        call ends when its steps have left as many slots idle as one step of all slots has: sharing
        rollouts copies the caches of the prompts, and with the round trip this takes about as long
        as that step. Ending at the first free slot, or waiting for many, costs more than twice the
        least; this does not.

        Args:
            is_free: whether all rows of the slot are idle.
            num_unstarted: rollouts of the slot that are in no row yet.
        """
        shards = len(self.num_waiting), -1
        free, unstarted = is_free.reshape(shards).sum(1), num_unstarted.reshape(shards).sum(1)
        num_slots, is_waiting = is_free.shape[0], self.num_waiting > 0
        shareable = (~is_waiting * free.clip(max=unstarted)).sum()
        occupied = num_slots // len(self.num_waiting) - free
        at_once = (
            (free.clip(max=self.num_waiting).sum() >= self.num_admitted)
            | ((occupied + unstarted).max() <= self.num_kept)
            | (free.sum() == num_slots)
        )
        return shareable + num_slots * at_once


class Scheduler:
    """The waiting prompts and those in slots, of all processes; identical on each process."""

    def __init__(self, prompts: Sequence[WaitingPrompt], sizes: Sizes):
        self._sizes = sizes
        self._waiting: list[deque[WaitingPrompt]] = [deque() for _ in range(sizes.num_shards)]
        for prompt in sorted(prompts):
            self._waiting[sizes.shard_of(prompt.index)].append(prompt)
        shape = sizes.num_shards, sizes.num_slots // sizes.num_shards
        self._indices = np.full(shape, -1)  # of the prompt in each slot
        self._next = np.zeros(shape, int)  # the next rollout that the slot starts
        self._end = np.zeros(shape, int)  # end (exclusive) of the slot's range of rollouts

    @property
    def has_prompts(self) -> bool:
        """Whether any prompt waits or is in a slot."""
        return bool((self._indices >= 0).any() or any(self._waiting))

    @property
    def indices(self) -> Int[np.ndarray, " B"]:
        """Index in the step of the prompt in each slot, -1 in free slots."""
        return self._indices.ravel()

    @property
    def ends(self) -> Int[np.ndarray, " B"]:
        """End (exclusive) of each slot's range of rollouts."""
        return self._end.ravel()

    @property
    def refill(self) -> Refill:
        """When `sampler.advance` should return."""
        num_waiting = np.array([len(queue) for queue in self._waiting])
        fewest = self._fewest_admitted if num_waiting.any() else self._indices.size + 1
        can_halve = self._can_halve and not num_waiting.any()
        return Refill(
            np.minimum(num_waiting, self._num_new_of_shard).astype(np.int32),
            np.int32(fewest),
            np.int32(self._indices.shape[1] // 2 if can_halve else -1),
        )

    def admit(self) -> tuple[list[WaitingPrompt | None], Int[np.ndarray, " B"]] | None:
        """Assigns waiting prompts to free slots; None while too few fit to be worth a prefill.

        Returns:
            the N prompts of a prefill, by shard, None for padding; and for each slot the index of
            its new prompt among the N / num_shards of its shard, -1 for none.
        """
        num_admitted = self._num_admissible()
        is_too_few = num_admitted.sum() < self._fewest_admitted
        if not num_admitted.any() or (is_too_few and (self._indices >= 0).any()):
            return None
        prompts: list[WaitingPrompt | None] = []
        chosen = np.full(self._indices.shape, -1, np.int32)
        for shard, count in enumerate(num_admitted.tolist()):
            free = np.flatnonzero(self._indices[shard] < 0)[:count]
            chosen[shard, free] = np.arange(count)
            taken = [self._waiting[shard].popleft() for _ in free]
            for slot, prompt in zip(free.tolist(), taken, strict=True):
                self._assign(shard, slot, prompt.index, 0, self._sizes.num_rollouts)
            prompts += taken + [None] * (self._num_new_of_shard - count)
        return prompts, chosen.ravel()

    def share(self) -> Int[np.ndarray, "3 B"] | None:
        """Moves unstarted rollouts from the slots with the most to free slots; None if none move.

        Returns:
            source: for each slot, index in its shard of the slot it takes over from; -1 for none.
            begin: for each such slot, the first rollout that it takes over.
            end: for every slot, the end (exclusive) of its range of rollouts.
        """
        source, begin = np.full((2, *self._indices.shape), -1, np.int32)
        for shard in range(self._sizes.num_shards):
            if self._waiting[shard]:
                continue
            for slot in np.flatnonzero(self._indices[shard] < 0).tolist():
                left = self._end[shard] - self._next[shard]
                donor = int(left.argmax())
                if left[donor] < 1:
                    break
                end = self._end[shard, donor]
                source[shard, slot], begin[shard, slot] = donor, end - (left[donor] + 1) // 2
                self._end[shard, donor] = begin[shard, slot]
                self._assign(shard, slot, self._indices[shard, donor], begin[shard, slot], end)
        if (source < 0).all():
            return None
        return np.stack([source.ravel(), begin.ravel(), self.ends]).astype(np.int32)

    def halve(self) -> Int[np.ndarray, " half"] | None:
        """Halves the number of slots; returns the index in its shard of each kept slot, or None."""
        is_free = self._indices < 0
        half = self._indices.shape[1] // 2
        if not self._can_halve or any(self._waiting) or ((~is_free).sum(1) > half).any():
            return None
        kept = np.argsort(is_free, axis=1, kind="stable")[:, :half]
        self._indices, self._next, self._end = (
            np.take_along_axis(x, kept, 1) for x in (self._indices, self._next, self._end)
        )
        return kept.ravel().astype(np.int32)

    def release(
        self, is_free: Bool[np.ndarray, " B"], next_rollout: Int[np.ndarray, " B"]
    ) -> list[tuple[int, int]]:
        """Frees the slots without rollouts after a call of `sampler.advance`.

        Returns:
            (index of the prompt, slot) for each.
        """
        self._next = np.minimum(next_rollout.reshape(self._end.shape), self._end)
        slots = np.flatnonzero((self.indices >= 0) & is_free)
        released = [(int(self.indices[slot]), int(slot)) for slot in slots]
        self._indices.flat[slots] = -1
        return released

    def _assign(self, shard: int, slot: int, index: int, begin: int, end: int) -> None:
        self._indices[shard, slot] = index
        self._next[shard, slot] = min(begin + self._sizes.num_rows, end)
        self._end[shard, slot] = end

    @property
    def _can_halve(self) -> bool:
        fewest = self._sizes.num_slots // self._sizes.num_shards * _FEWEST_SLOTS
        return self._indices.shape[1] % 2 == 0 and self._indices.shape[1] // 2 >= fewest

    @property
    def _fewest_admitted(self) -> int:
        """Fewest prompts worth a prefill: half of its size, or all that wait."""
        return min(max(self._sizes.num_new // 2, 1), sum(map(len, self._waiting)))

    @property
    def _num_new_of_shard(self) -> int:
        return self._sizes.num_new // self._sizes.num_shards

    def _num_admissible(self) -> Int[np.ndarray, " shards"]:
        """Number of prompts of each shard that the next prefill can admit."""
        waiting = np.array([len(queue) for queue in self._waiting])
        num_free = (self._indices < 0).sum(1)
        return np.minimum(np.minimum(waiting, num_free), self._num_new_of_shard)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `sampler.advance`."""

    num_steps: int
    num_tokens: int  # sampled, including the first tokens of the prompts admitted before it
    num_slots: int  # B
    num_prompt_tokens: int  # P
    prefix_tokens: int  # in the prefixes of the slots, without padding, summed over the steps
    suffix_tokens: int  # that the rows attend to in their rings, summed over the steps


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The calls of decoding."""

    prefills: tuple[tuple[int, int], ...]  # (tokens, patches) of each, padded, with contexts
    calls: tuple[Call, ...]

    @property
    def num_steps(self) -> int:
        return sum(call.num_steps for call in self.calls)


def simulate(
    sizes: Sizes,
    prompts: Sequence[WaitingPrompt],
    lengths: dict[int, Int[np.ndarray, " G"]],
    buckets: Sequence[tuple[int, int]],
) -> Schedule:
    """The schedule of prompts whose responses have given lengths.

    Args:
        lengths: by index of the prompt, number of tokens that each rollout samples, at least 1.
        buckets: (tokens, patches) that prompts are padded to, ascending; see `data.buckets`.
    """
    scheduler = Scheduler(prompts, sizes)
    num_tokens_of = {prompt.index: prompt.num_tokens + sizes.context_tokens for prompt in prompts}
    left = np.zeros((sizes.num_slots, sizes.num_rows), int)  # steps of a row's rollout; 0: idle
    read = np.zeros_like(left)  # tokens of the rollout in the row's cache
    samples = np.zeros_like(left)  # tokens per step: 0 if the first token ended the rollout, else 1
    next_rollout = np.zeros(sizes.num_slots, int)  # the next rollout that the slot starts
    prefix = np.zeros(sizes.num_slots, int)  # tokens of the slot's prompt, context included
    num_prompt_tokens, prefills, calls = 0, [], []

    def take_next(slot: int, row: int) -> None:
        """Prefill samples the first token; reading it takes a step even if it is the last."""
        if next_rollout[slot] < scheduler.ends[slot]:
            steps = int(lengths[int(scheduler.indices[slot])][next_rollout[slot]]) - 1
            left[slot, row], samples[slot, row] = max(steps, 1), steps > 0
        next_rollout[slot] += 1

    def occupy(slot: int, begin: int) -> None:
        left[slot], read[slot], next_rollout[slot] = 0, 0, begin
        prefix[slot] = num_tokens_of[int(scheduler.indices[slot])]
        for row in range(sizes.num_rows):
            take_next(slot, row)

    while scheduler.has_prompts:
        num_tokens = 0
        while (admission := scheduler.admit()) is not None:
            new, chosen = admission
            largest = sizes_of(new).max(0)
            tokens, patches = next(b for b in buckets if (largest <= b).all())
            prefills.append((tokens + sizes.context_tokens, patches))
            num_prompt_tokens = max(num_prompt_tokens, prefills[-1][0])
            for slot in np.flatnonzero(chosen >= 0).tolist():
                occupy(slot, 0)
                num_tokens += sizes.num_rollouts
        if (shares := scheduler.share()) is not None:
            source, first, _ = shares
            for slot in np.flatnonzero(source >= 0).tolist():
                occupy(slot, first[slot])
        while (kept := scheduler.halve()) is not None:
            shards = np.arange(len(left)).reshape(sizes.num_shards, -1)
            slots = np.take_along_axis(shards, kept.reshape(sizes.num_shards, -1), 1).ravel()
            left, read, samples, next_rollout, prefix = (
                x[slots] for x in (left, read, samples, next_rollout, prefix)
            )
        num_steps, suffix_tokens, refill = 0, 0, scheduler.refill
        lost, num_idle = 0, 0  # slot-steps of the call, slots of the last step
        while num_steps < NUM_STEPS and lost < len(left):
            is_active = left > 0
            passed = min(int(left[is_active].min()), NUM_STEPS - num_steps)
            if num_idle:
                passed = min(passed, math.ceil((len(left) - lost) / num_idle))
            num_steps += passed
            num_tokens += passed * int(samples[is_active].sum())
            # A row attends to its new token and to the tokens in its cache, one more each step.
            suffix_tokens += passed * int((read + 1).sum())
            suffix_tokens += passed * (passed - 1) // 2 * int(is_active.sum())
            left -= passed * is_active
            read += passed * is_active
            for slot, row in np.argwhere(is_active & (left == 0)).tolist():
                read[slot, row] = 0
                take_next(slot, row)
            unstarted = np.maximum(scheduler.ends - next_rollout, 0)
            lost += (passed - 1) * num_idle
            num_idle = int(refill.num_idle((left == 0).all(1), unstarted))
            lost += num_idle
        read_tokens = num_steps * int(prefix.sum()), suffix_tokens
        calls.append(Call(num_steps, num_tokens, len(left), num_prompt_tokens, *read_tokens))
        scheduler.release((left == 0).all(1), next_rollout)
    return Schedule(tuple(prefills), tuple(calls))
