"""The schedule of continuous decoding: which prompts wait, and which take which slots (host).

Prompts wait in one queue per batch shard, the shard that trains on them, shortest first. Once a
queue is empty, a free slot takes half of the rollouts not yet started on another slot of its shard.
Once all queues are empty and every shard uses at most half of its slots, the slots are halved.
`Scheduler` makes these decisions, so `simulate`, given lengths instead of a model, yields the calls
of a run.

Letters: B slots, R rows of a slot, G rollouts of a prompt, T tokens of a rollout, N prompts of a
prefill, P prompt tokens, S positions of a row's ring. `sampler` explains slots, rows and rings.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

NUM_STEPS = 64  # most decode steps of a call of `sampler.advance`
FEWEST_POSITIONS = 128  # least positions of a ring that is smaller than T; also at least T / 4
_NUM_PREFILLS = 4  # prefills that fill all slots
_FEWEST_SLOTS = 1 / 4  # least share of the slots that is kept; each halving is one more compile


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the programs of decoding.

    Attributes:
        num_slots: B, over all processes.
        num_rows: R.
        num_rollouts: G.
        max_tokens: T, context included.
        context_tokens: most forced tokens at the start of a rollout.
        num_shards: of the batch; divides B.
        period: consecutive places split evenly over the shards: the prompts of an update.
    """

    num_slots: int
    num_rows: int
    num_rollouts: int
    max_tokens: int
    context_tokens: int
    num_shards: int
    period: int

    @property
    def num_new(self) -> int:
        """N, equally many on every shard."""
        return self.num_shards * max(self.num_slots // self.num_shards // _NUM_PREFILLS, 1)

    @property
    def rings(self) -> tuple[int, ...]:
        """The possible S, ascending, each twice the one before; T is the largest.

        Each is one more program to compile, so there are three at most.
        """
        sizes = [self.max_tokens]
        fewest = max(FEWEST_POSITIONS, self.max_tokens // 4)
        while sizes[0] % 2 == 0 and sizes[0] // 2 >= fewest:
            sizes.insert(0, sizes[0] // 2)
        return tuple(sizes)

    def ring_for(self, longest: int) -> int:
        """The least S with room for one more call if a row has read `longest` tokens; at most T."""
        needed = longest + NUM_STEPS
        return next((size for size in self.rings if size >= needed), self.max_tokens)

    def shard_of(self, place: int) -> int:
        """The shard that trains on the prompt at this place of the step."""
        return place % self.period // (self.period // self.num_shards)


@dataclasses.dataclass(frozen=True, order=True)
class WaitingPrompt:
    """A waiting prompt: its tokens, its place in the step, its image patches."""

    num_tokens: int
    place: int
    num_patches: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """Prompts that take slots together, over all processes.

    Attributes:
        prompts: the N prompts of a prefill, by shard; None for padding.
        slots: the slot that each of the N takes; -1 for padding.
        chosen: per slot, index among its shard's N / num_shards prompts of the one that takes it;
            -1 for none.
    """

    prompts: tuple[WaitingPrompt | None, ...]
    slots: Int[np.ndarray, " N"]
    chosen: Int[np.ndarray, " B"]

    @property
    def sizes(self) -> Int[np.ndarray, "n 2"]:
        """Tokens and patches of each prompt, without padding."""
        return np.array([(p.num_tokens, p.num_patches) for p in self.prompts if p is not None])


@dataclasses.dataclass(frozen=True)
class Shares:
    """Rollouts that free slots take over from other slots.

    Attributes:
        source: per slot, index in its shard of the slot it takes over from; -1 for none.
        begin: per slot, the first rollout that it takes over.
        end: per slot, also the others, the end (exclusive) of its range of rollouts.
    """

    source: Int[np.ndarray, " B"]
    begin: Int[np.ndarray, " B"]
    end: Int[np.ndarray, " B"]


class Scheduler:
    """The waiting prompts and the prompts on slots; identical on every process.

    Args:
        prompts: the prompts of all processes.
        sizes: of the programs.
    """

    def __init__(self, prompts: Sequence[WaitingPrompt], sizes: Sizes):
        self._sizes = sizes
        self._waiting: list[deque[WaitingPrompt]] = [deque() for _ in range(sizes.num_shards)]
        for prompt in sorted(prompts):
            self._waiting[sizes.shard_of(prompt.place)].append(prompt)
        shape = sizes.num_shards, sizes.num_slots // sizes.num_shards
        self._places = np.full(shape, -1)  # place of the prompt on each slot
        self._next = np.zeros(shape, int)  # the rollout that the slot's next free row takes
        self._end = np.zeros(shape, int)  # end (exclusive) of the slot's range of rollouts

    @property
    def has_prompts(self) -> bool:
        """Whether any prompt waits or is on a slot."""
        return bool((self._places >= 0).any() or any(self._waiting))

    @property
    def places(self) -> Int[np.ndarray, " B"]:
        """Place of the prompt on each slot, -1 on free slots."""
        return self._places.ravel()

    @property
    def num_wanted(self) -> int:
        """Number of free slots at which `advance` should return; more than B for never."""
        num_slots, num_free = self._places.size, int((self._places < 0).sum())
        if num_waiting := sum(map(len, self._waiting)):
            missing = min(self._fewest_admitted, num_waiting) - int(self._num_admissible().sum())
            return num_free + max(missing, 1)
        if (self._next < self._end).any():
            return num_free + 1
        if self._can_halve:
            return max(num_slots // 2, num_free + 1)
        return num_slots + 1

    def admit(self) -> Admission | None:
        """Gives prompts their slots; None while too few can take one to be worth a prefill."""
        num_admitted = self._num_admissible()
        total, num_waiting = int(num_admitted.sum()), sum(map(len, self._waiting))
        is_too_few = total < min(self._fewest_admitted, num_waiting)
        if not total or (is_too_few and (self._places >= 0).any()):
            return None
        num_shards, per_shard = (
            self._sizes.num_shards,
            self._sizes.num_new // self._sizes.num_shards,
        )
        prompts: list[WaitingPrompt | None] = [None] * self._sizes.num_new
        slots = np.full(self._sizes.num_new, -1)
        chosen = np.full(self._places.shape, -1, np.int32)
        for shard in range(num_shards):
            free = np.flatnonzero(self._places[shard] < 0)[: num_admitted[shard]]
            for number, slot in enumerate(free):
                row = shard * per_shard + number
                prompt = prompts[row] = self._waiting[shard].popleft()
                slots[row] = shard * self._places.shape[1] + slot
                chosen[shard, slot] = number
                self._assign(shard, slot, prompt.place, 0, self._sizes.num_rollouts)
        return Admission(tuple(prompts), slots, chosen.ravel())

    def share(self) -> Shares | None:
        """Gives free slots rollouts of the slots with the most not yet started; None if none."""
        source, begin = np.full((2, *self._places.shape), -1, np.int32)
        for shard in range(self._sizes.num_shards):
            if self._waiting[shard]:
                continue
            for slot in np.flatnonzero(self._places[shard] < 0).tolist():
                left = self._end[shard] - self._next[shard]
                donor = int(left.argmax())
                if left[donor] < 1:
                    break
                end = self._end[shard, donor]
                source[shard, slot], begin[shard, slot] = donor, end - (left[donor] + 1) // 2
                self._end[shard, donor] = begin[shard, slot]
                self._assign(shard, slot, self._places[shard, donor], begin[shard, slot], end)
        if (source < 0).all():
            return None
        return Shares(source.ravel(), begin.ravel(), self._end.ravel().astype(np.int32))

    def halve(self) -> Int[np.ndarray, " half"] | None:
        """Halves the slots; returns those kept, by their index in each shard; None if all are."""
        is_free = self._places < 0
        half = self._places.shape[1] // 2
        if not self._can_halve or any(self._waiting) or ((~is_free).sum(1) > half).any():
            return None
        kept = np.argsort(is_free, axis=1, kind="stable")[:, :half]
        self._places, self._next, self._end = (
            np.take_along_axis(x, kept, 1) for x in (self._places, self._next, self._end)
        )
        return kept.ravel().astype(np.int32)

    def release(
        self, is_free: Bool[np.ndarray, " B"], next_rollout: Int[np.ndarray, " B"]
    ) -> list[tuple[int, int]]:
        """Frees the slots that the last call of `sampler.advance` left without rollouts.

        Returns:
            (place, slot) of the prompt of each.
        """
        shape = self._places.shape
        self._next = np.minimum(next_rollout.reshape(shape), self._end)
        is_released = (self._places >= 0) & is_free.reshape(shape)
        released = [(int(self.places[slot]), int(slot)) for slot in np.flatnonzero(is_released)]
        self._places[is_released] = -1
        return released

    def _assign(self, shard: int, slot: int, place: int, begin: int, end: int) -> None:
        self._places[shard, slot] = place
        self._next[shard, slot] = min(begin + self._sizes.num_rows, end)
        self._end[shard, slot] = end

    @property
    def _can_halve(self) -> bool:
        fewest = self._sizes.num_slots // self._sizes.num_shards * _FEWEST_SLOTS
        return self._places.shape[1] % 2 == 0 and self._places.shape[1] // 2 >= fewest

    @property
    def _fewest_admitted(self) -> int:
        """New prompts that are worth a prefill."""
        return max(self._sizes.num_new // 2, 1)

    def _num_admissible(self) -> Int[np.ndarray, " shards"]:
        """The number of each shard's prompts that the next prefill can take."""
        waiting = np.array([len(queue) for queue in self._waiting])
        per_shard = self._sizes.num_new // self._sizes.num_shards
        return np.minimum(np.minimum(waiting, (self._places < 0).sum(1)), per_shard)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `sampler.advance`.

    Attributes:
        num_steps: decode steps.
        num_tokens: tokens sampled, with the first tokens of the prompts with slots before it.
        num_slots, num_prompt_tokens, num_positions: B, P and S.
        prefix_tokens: tokens in the prefixes of the slots, without padding, summed over the steps.
        suffix_tokens: tokens that the rows attend to in their rings, summed over the steps.
    """

    num_steps: int
    num_tokens: int
    num_slots: int
    num_prompt_tokens: int
    num_positions: int
    prefix_tokens: int
    suffix_tokens: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The calls of decoding.

    Attributes:
        prefills: (tokens, patches) to which each prefill is padded, contexts included.
        calls: of `sampler.advance`.
    """

    prefills: tuple[tuple[int, int], ...]
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
        sizes: of the programs.
        prompts: the prompts.
        lengths: by place, tokens that each rollout of a prompt samples, at least 1.
        buckets: (tokens, patches) that prompts are padded to, ascending; see `data.buckets`.
    """
    scheduler, R = Scheduler(prompts, sizes), sizes.num_rows
    left = np.zeros((sizes.num_slots, R), int)  # steps until each row's rollout ends; 0: idle
    read = np.zeros_like(left)  # tokens of the rollout in the row's cache
    samples = np.zeros_like(left)  # tokens per step: 0 if the first token ended the rollout, else 1
    next_rollout = np.zeros(sizes.num_slots, int)  # rollout that the slot's next free row takes
    end = np.zeros(sizes.num_slots, int)
    prefix = np.zeros(sizes.num_slots, int)  # tokens of the slot's prompt, context included
    num_prompt_tokens, prefills, calls, num_first = 0, [], [], 0

    def begin(slot: int, row: int, rollout: int) -> None:
        """Prefill samples the first token; reading it takes a step even if it is the last."""
        steps = int(lengths[int(scheduler.places[slot])][rollout]) - 1
        left[slot, row], samples[slot, row] = max(steps, 1), steps > 0

    def assign(slot: int, first: int, last: int) -> None:
        left[slot], read[slot] = 0, 0
        taken = range(first, min(first + R, last))
        for row, rollout in enumerate(taken):
            begin(slot, row, rollout)
        next_rollout[slot] = first + len(taken)

    while scheduler.has_prompts:
        while (admission := scheduler.admit()) is not None:
            largest = admission.sizes.max(0)
            tokens, patches = next(b for b in buckets if (largest <= b).all())
            tokens += sizes.context_tokens
            prefills.append((tokens, patches))
            num_prompt_tokens = max(num_prompt_tokens, tokens)
            for prompt, slot in zip(admission.prompts, admission.slots, strict=True):
                if prompt is None:
                    continue
                prefix[slot] = prompt.num_tokens + sizes.context_tokens
                end[slot] = sizes.num_rollouts
                num_first += sizes.num_rollouts
                assign(slot, 0, sizes.num_rollouts)
        if (shares := scheduler.share()) is not None:
            end[:] = shares.end
            per_shard = len(left) // sizes.num_shards
            for slot in np.flatnonzero(shares.source >= 0).tolist():
                prefix[slot] = prefix[slot // per_shard * per_shard + shares.source[slot]]
                assign(slot, shares.begin[slot], shares.end[slot])
        while (kept := scheduler.halve()) is not None:
            rows = (np.arange(sizes.num_shards)[:, None] * (len(left) // sizes.num_shards)) + (
                kept.reshape(sizes.num_shards, -1)
            )
            left, read, samples, next_rollout, end, prefix = (
                x[rows.ravel()] for x in (left, read, samples, next_rollout, end, prefix)
            )
        num_steps, num_tokens, longest, suffix_tokens = 0, num_first, int(read.max()), 0
        num_first, num_wanted = 0, scheduler.num_wanted
        while num_steps < NUM_STEPS:
            num_free = int((left == 0).all(1).sum())
            if num_free >= num_wanted or num_free == len(left):
                break
            passed = min(int(left[left > 0].min()), NUM_STEPS - num_steps)
            num_steps += passed
            is_active = left > 0
            num_tokens += passed * int(samples[is_active].sum())
            # A row attends to its new token and to those it has read, one more each step.
            suffix_tokens += passed * int((read + 1).sum())
            suffix_tokens += passed * (passed - 1) // 2 * int(is_active.sum())
            left -= passed * is_active
            read += passed * is_active
            for slot, row in np.argwhere(is_active & (left == 0)).tolist():
                read[slot, row] = 0
                if next_rollout[slot] < end[slot]:
                    begin(slot, row, next_rollout[slot])
                next_rollout[slot] += 1
        shape = len(left), num_prompt_tokens, sizes.ring_for(longest)
        calls.append(
            Call(num_steps, num_tokens, *shape, num_steps * int(prefix.sum()), suffix_tokens)
        )
        scheduler.release((left == 0).all(1), next_rollout)
    return Schedule(tuple(prefills), tuple(calls))
