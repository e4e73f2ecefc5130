"""The schedule of continuous decoding: which prompts wait, and which take which seats (host).

Prompts wait in one queue per batch shard, the shard that trains on them, shortest first. Once a
queue is empty, a free seat takes half of the rollouts not yet started on another seat of its shard.
Once all queues are empty and every shard uses at most half of its seats, the seats are halved.
`Scheduler` makes these decisions, so `simulate`, given lengths instead of a model, yields the calls
of a run.

Letters: B seats, R rows of a seat, G rollouts of a prompt, T tokens of a rollout, N prompts of a
prefill, P prompt tokens, S slots of a row's ring. `sampler` explains seats, rows and rings.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

NUM_STEPS = 64  # most decode steps of a call of `sampler.advance`
FEWEST_SLOTS = 128  # least slots of a ring that is smaller than T; also at least T / 4
_NUM_PREFILLS = 4  # prefills that fill all seats
_FEWEST_SEATS = 1 / 4  # least share of the seats that is kept; each halving is one more compile


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the programs of decoding.

    Attributes:
        num_seats: B, over all processes.
        num_rows: R.
        num_rollouts: G.
        max_tokens: T, context included.
        context_tokens: most forced tokens at the start of a rollout.
        num_shards: of the batch; divides B.
        period: consecutive places split evenly over the shards: the prompts of an update.
    """

    num_seats: int
    num_rows: int
    num_rollouts: int
    max_tokens: int
    context_tokens: int
    num_shards: int
    period: int

    @property
    def num_new(self) -> int:
        """N, equally many on every shard."""
        return self.num_shards * max(self.num_seats // self.num_shards // _NUM_PREFILLS, 1)

    @property
    def rings(self) -> tuple[int, ...]:
        """The possible S, ascending, each twice the one before; T is the largest.

        Each is one more program to compile, so there are three at most.
        """
        sizes = [self.max_tokens]
        fewest = max(FEWEST_SLOTS, self.max_tokens // 4)
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
    """Prompts that take seats together, over all processes.

    Attributes:
        prompts: the N prompts of a prefill, by shard; None for padding.
        seats: the seat that each of the N takes; -1 for padding.
        chosen: per seat, index among its shard's N / num_shards prompts of the one that takes it;
            -1 for none.
    """

    prompts: tuple[WaitingPrompt | None, ...]
    seats: Int[np.ndarray, " N"]
    chosen: Int[np.ndarray, " B"]

    @property
    def sizes(self) -> Int[np.ndarray, "n 2"]:
        """Tokens and patches of each prompt, without padding."""
        return np.array([(p.num_tokens, p.num_patches) for p in self.prompts if p is not None])


@dataclasses.dataclass(frozen=True)
class Shares:
    """Rollouts that free seats take over from other seats.

    Attributes:
        source: per seat, index in its shard of the seat it takes over from; -1 for none.
        begin: per seat, the first rollout that it takes over.
        end: per seat, also the others, the end (exclusive) of its range of rollouts.
    """

    source: Int[np.ndarray, " B"]
    begin: Int[np.ndarray, " B"]
    end: Int[np.ndarray, " B"]


class Scheduler:
    """The waiting prompts and the prompts on seats; identical on every process.

    Args:
        prompts: the prompts of all processes.
        sizes: of the programs.
    """

    def __init__(self, prompts: Sequence[WaitingPrompt], sizes: Sizes):
        self._sizes = sizes
        self._waiting: list[deque[WaitingPrompt]] = [deque() for _ in range(sizes.num_shards)]
        for prompt in sorted(prompts):
            self._waiting[sizes.shard_of(prompt.place)].append(prompt)
        shape = sizes.num_shards, sizes.num_seats // sizes.num_shards
        self._places = np.full(shape, -1)  # place of the prompt on each seat
        self._next = np.zeros(shape, int)  # the rollout that the seat's next free row takes
        self._end = np.zeros(shape, int)  # end (exclusive) of the seat's range of rollouts

    @property
    def has_prompts(self) -> bool:
        """Whether any prompt waits or is on a seat."""
        return bool((self._places >= 0).any() or any(self._waiting))

    @property
    def places(self) -> Int[np.ndarray, " B"]:
        """Place of the prompt on each seat, -1 on free seats."""
        return self._places.ravel()

    @property
    def num_wanted(self) -> int:
        """Number of free seats at which `advance` should return; more than B for never."""
        num_seats, num_free = self._places.size, int((self._places < 0).sum())
        if num_waiting := sum(map(len, self._waiting)):
            missing = min(self._fewest_admitted, num_waiting) - int(self._num_admissible().sum())
            return num_free + max(missing, 1)
        if (self._next < self._end).any():
            return num_free + 1
        if self._can_halve:
            return max(num_seats // 2, num_free + 1)
        return num_seats + 1

    def admit(self) -> Admission | None:
        """Gives prompts their seats; None while too few can take one to be worth a prefill."""
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
        seats = np.full(self._sizes.num_new, -1)
        chosen = np.full(self._places.shape, -1, np.int32)
        for shard in range(num_shards):
            free = np.flatnonzero(self._places[shard] < 0)[: num_admitted[shard]]
            for number, seat in enumerate(free):
                row = shard * per_shard + number
                prompt = prompts[row] = self._waiting[shard].popleft()
                seats[row] = shard * self._places.shape[1] + seat
                chosen[shard, seat] = number
                self._assign(shard, seat, prompt.place, 0, self._sizes.num_rollouts)
        return Admission(tuple(prompts), seats, chosen.ravel())

    def share(self) -> Shares | None:
        """Gives free seats rollouts of the seats with the most not yet started; None if none."""
        source, begin = np.full((2, *self._places.shape), -1, np.int32)
        for shard in range(self._sizes.num_shards):
            if self._waiting[shard]:
                continue
            for seat in np.flatnonzero(self._places[shard] < 0).tolist():
                left = self._end[shard] - self._next[shard]
                donor = int(left.argmax())
                if left[donor] < 1:
                    break
                end = self._end[shard, donor]
                source[shard, seat], begin[shard, seat] = donor, end - (left[donor] + 1) // 2
                self._end[shard, donor] = begin[shard, seat]
                self._assign(shard, seat, self._places[shard, donor], begin[shard, seat], end)
        if (source < 0).all():
            return None
        return Shares(source.ravel(), begin.ravel(), self._end.ravel().astype(np.int32))

    def halve(self) -> Int[np.ndarray, " half"] | None:
        """Halves the seats; returns those kept, by their index in each shard; None if all are."""
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
        """Frees the seats that the last call of `sampler.advance` left without rollouts.

        Returns:
            (place, seat) of the prompt of each.
        """
        shape = self._places.shape
        self._next = np.minimum(next_rollout.reshape(shape), self._end)
        is_released = (self._places >= 0) & is_free.reshape(shape)
        released = [(int(self.places[seat]), int(seat)) for seat in np.flatnonzero(is_released)]
        self._places[is_released] = -1
        return released

    def _assign(self, shard: int, seat: int, place: int, begin: int, end: int) -> None:
        self._places[shard, seat] = place
        self._next[shard, seat] = min(begin + self._sizes.num_rows, end)
        self._end[shard, seat] = end

    @property
    def _can_halve(self) -> bool:
        fewest = self._sizes.num_seats // self._sizes.num_shards * _FEWEST_SEATS
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
        num_tokens: tokens sampled, with the first tokens of the prompts seated before it.
        num_seats, num_prompt_tokens, num_slots: B, P and S.
        prefix_tokens: tokens in the prefixes of the seats, without padding, summed over the steps.
        suffix_tokens: tokens that the rows attend to in their rings, summed over the steps.
    """

    num_steps: int
    num_tokens: int
    num_seats: int
    num_prompt_tokens: int
    num_slots: int
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
    left = np.zeros((sizes.num_seats, R), int)  # steps until each row's rollout ends; 0: idle
    read = np.zeros_like(left)  # tokens of the rollout in the row's cache
    samples = np.zeros_like(left)  # tokens per step: 0 if the first token ended the rollout, else 1
    next_rollout = np.zeros(sizes.num_seats, int)  # rollout that the seat's next free row takes
    end = np.zeros(sizes.num_seats, int)
    prefix = np.zeros(sizes.num_seats, int)  # tokens of the seat's prompt, context included
    num_prompt_tokens, prefills, calls, num_first = 0, [], [], 0

    def begin(seat: int, row: int, rollout: int) -> None:
        """Prefill samples the first token; reading it takes a step even if it is the last."""
        steps = int(lengths[int(scheduler.places[seat])][rollout]) - 1
        left[seat, row], samples[seat, row] = max(steps, 1), steps > 0

    def assign(seat: int, first: int, last: int) -> None:
        left[seat], read[seat] = 0, 0
        taken = range(first, min(first + R, last))
        for row, rollout in enumerate(taken):
            begin(seat, row, rollout)
        next_rollout[seat] = first + len(taken)

    while scheduler.has_prompts:
        while (admission := scheduler.admit()) is not None:
            largest = admission.sizes.max(0)
            tokens, patches = next(b for b in buckets if (largest <= b).all())
            tokens += sizes.context_tokens
            prefills.append((tokens, patches))
            num_prompt_tokens = max(num_prompt_tokens, tokens)
            for prompt, seat in zip(admission.prompts, admission.seats, strict=True):
                if prompt is None:
                    continue
                prefix[seat] = prompt.num_tokens + sizes.context_tokens
                end[seat] = sizes.num_rollouts
                num_first += sizes.num_rollouts
                assign(seat, 0, sizes.num_rollouts)
        if (shares := scheduler.share()) is not None:
            end[:] = shares.end
            per_shard = len(left) // sizes.num_shards
            for seat in np.flatnonzero(shares.source >= 0).tolist():
                prefix[seat] = prefix[seat // per_shard * per_shard + shares.source[seat]]
                assign(seat, shares.begin[seat], shares.end[seat])
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
            for seat, row in np.argwhere(is_active & (left == 0)).tolist():
                read[seat, row] = 0
                if next_rollout[seat] < end[seat]:
                    begin(seat, row, next_rollout[seat])
                next_rollout[seat] += 1
        shape = len(left), num_prompt_tokens, sizes.ring_for(longest)
        calls.append(
            Call(num_steps, num_tokens, *shape, num_steps * int(prefix.sum()), suffix_tokens)
        )
        scheduler.release((left == 0).all(1), next_rollout)
    return Schedule(tuple(prefills), tuple(calls))
