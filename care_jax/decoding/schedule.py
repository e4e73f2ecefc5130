"""Who waits, who sits where, and how long it takes: the schedule of continuous decoding (host).

Prompts wait in line, the shortest first, each on the shard of the devices that its update is placed
on. When nobody waits any more, a seat that gets free takes over half of the rollouts that another
prompt has not begun; when there are none of these, half of the seats go. `Line` decides all that,
so that `simulate`, with lengths in place of a model, gives the calls that a run makes.

Letters: B seats, R rows in flight of each, G rollouts of a prompt, T tokens of a rollout, N prompts
of a prefill, P prompt tokens, S slots of a row's ring.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

NUM_STEPS = 64  # most of a call of `sampler.advance`
FEWEST_SLOTS = 128  # of a ring that is smaller than T; a quarter of T at least
_NUM_PREFILLS = 4  # that fill all seats
_FEWEST_SEATS = 1 / 4  # of all, that are left when nobody waits; each half is one more to compile


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the programs of decoding.

    Attributes:
        num_seats: B, over all processes.
        num_rows: R.
        num_rollouts: G.
        max_tokens: T, context included.
        context_tokens: most forced tokens that a rollout starts with.
        num_shards: of the batch; divides B.
        period: places that are spread over the shards together: prompts of an update.
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
        """N, the same number on every shard."""
        return self.num_shards * max(self.num_seats // self.num_shards // _NUM_PREFILLS, 1)

    @property
    def rings(self) -> tuple[int, ...]:
        """The S that occur, ascending, each twice the one before; T is the largest.

        Each is a program to compile, so there are three at most.
        """
        sizes = [self.max_tokens]
        fewest = max(FEWEST_SLOTS, self.max_tokens // 4)
        while sizes[0] % 2 == 0 and sizes[0] // 2 >= fewest:
            sizes.insert(0, sizes[0] // 2)
        return tuple(sizes)

    def ring_for(self, longest: int) -> int:
        """The least S with room for a call, where a row has read `longest` tokens."""
        needed = longest + NUM_STEPS
        return next((size for size in self.rings if size >= needed), self.max_tokens)

    def shard_of(self, place: int) -> int:
        """The shard on which the prompt at a place of the step is trained."""
        return place % self.period // (self.period // self.num_shards)


@dataclasses.dataclass(frozen=True, order=True)
class Waiting:
    """A prompt in line: its tokens, its place in the step, its image patches."""

    num_tokens: int
    place: int
    num_patches: int


@dataclasses.dataclass(frozen=True)
class Newcomers:
    """Prompts that sit down together, over all processes.

    Attributes:
        prompts: of the N of a prefill, by shard; None in rows that nobody takes.
        seats: that each of the N takes; -1 likewise.
        chosen: of each seat, which of its shard's N / num_shards prompts takes it; -1 for none.
    """

    prompts: tuple[Waiting | None, ...]
    seats: Int[np.ndarray, " N"]
    chosen: Int[np.ndarray, " B"]

    @property
    def sizes(self) -> Int[np.ndarray, "n 2"]:
        """Tokens and patches of each prompt that there is."""
        return np.array([(p.num_tokens, p.num_patches) for p in self.prompts if p is not None])


@dataclasses.dataclass(frozen=True)
class Shares:
    """Free seats take over rollouts of prompts that sit elsewhere.

    Attributes:
        source: of each seat, which of its shard's seats it takes over from; -1 for none.
        begin: the first rollout that it takes over.
        end: of every seat, the rollout in front of which it stops.
    """

    source: Int[np.ndarray, " B"]
    begin: Int[np.ndarray, " B"]
    end: Int[np.ndarray, " B"]


class Line:
    """Who waits and who sits where; the same on every process.

    Args:
        everyone: the prompts of all processes.
        sizes: of the programs.
    """

    def __init__(self, everyone: Sequence[Waiting], sizes: Sizes):
        self._sizes = sizes
        self._waiting: list[deque[Waiting]] = [deque() for _ in range(sizes.num_shards)]
        for prompt in sorted(everyone):
            self._waiting[sizes.shard_of(prompt.place)].append(prompt)
        shape = sizes.num_shards, sizes.num_seats // sizes.num_shards
        self._who = np.full(shape, -1)  # places of who sits there
        self._next = np.zeros(shape, int)  # the rollout that a free row of the seat takes next
        self._end = np.zeros(shape, int)  # and the one in front of which it stops

    @property
    def is_anyone_left(self) -> bool:
        return bool((self._who >= 0).any() or any(self._waiting))

    @property
    def who(self) -> Int[np.ndarray, " B"]:
        """Places of the prompts on the seats, -1 on free ones."""
        return self._who.ravel()

    @property
    def num_wanted(self) -> int:
        """Free seats at which there is something to decide; more than there are if never."""
        num_seats, num_free = self._who.size, int((self._who < 0).sum())
        if num_waiting := sum(map(len, self._waiting)):
            missing = min(self._enough, num_waiting) - int(self._num_admitted().sum())
            return num_free + max(missing, 1)
        if (self._next < self._end).any():
            return num_free + 1
        if self._can_halve:
            return max(num_seats // 2, num_free + 1)
        return num_seats + 1

    def next_newcomers(self) -> Newcomers | None:
        """Those who sit down now; None while too few can for a prefill to be worth it."""
        num_admitted = self._num_admitted()
        total, num_waiting = int(num_admitted.sum()), sum(map(len, self._waiting))
        if not total or (total < min(self._enough, num_waiting) and (self._who >= 0).any()):
            return None
        num_shards, per_shard = (
            self._sizes.num_shards,
            self._sizes.num_new // self._sizes.num_shards,
        )
        prompts: list[Waiting | None] = [None] * self._sizes.num_new
        seats = np.full(self._sizes.num_new, -1)
        chosen = np.full(self._who.shape, -1, np.int32)
        for shard in range(num_shards):
            free = np.flatnonzero(self._who[shard] < 0)[: num_admitted[shard]]
            for number, seat in enumerate(free):
                row = shard * per_shard + number
                prompts[row] = self._waiting[shard].popleft()
                seats[row] = shard * self._who.shape[1] + seat
                chosen[shard, seat] = number
                self._sit(shard, seat, prompts[row].place, 0, self._sizes.num_rollouts)
        return Newcomers(tuple(prompts), seats, chosen.ravel())

    def next_shares(self) -> Shares | None:
        """Whose rollouts the free seats take over now, the most of them first."""
        source, begin = np.full((2, *self._who.shape), -1, np.int32)
        for shard in range(self._sizes.num_shards):
            if self._waiting[shard]:
                continue
            for seat in np.flatnonzero(self._who[shard] < 0):
                left = self._end[shard] - self._next[shard]
                giver = int(left.argmax())
                if left[giver] < 1:
                    break
                end = self._end[shard, giver]
                source[shard, seat], begin[shard, seat] = giver, end - (left[giver] + 1) // 2
                self._end[shard, giver] = begin[shard, seat]
                self._sit(shard, seat, self._who[shard, giver], begin[shard, seat], end)
        if (source < 0).all():
            return None
        return Shares(source.ravel(), begin.ravel(), self._end.ravel().astype(np.int32))

    def next_half(self) -> Int[np.ndarray, " half"] | None:
        """The seats that stay, of each shard by their number in it; None where all do."""
        is_free = self._who < 0
        half = self._who.shape[1] // 2
        if not self._can_halve or any(self._waiting) or ((~is_free).sum(1) > half).any():
            return None
        kept = np.argsort(is_free, axis=1, kind="stable")[:, :half]
        self._who, self._next, self._end = (
            np.take_along_axis(x, kept, 1) for x in (self._who, self._next, self._end)
        )
        return kept.ravel().astype(np.int32)

    def leave(
        self, is_free: Bool[np.ndarray, " B"], next_rollout: Int[np.ndarray, " B"]
    ) -> list[tuple[int, int]]:
        """Who has just left which seat, as (place, seat), after a call of `sampler.advance`."""
        shape = self._who.shape
        self._next = np.minimum(next_rollout.reshape(shape), self._end)
        left = (self._who >= 0) & is_free.reshape(shape)
        found = [(int(self.who[seat]), int(seat)) for seat in np.flatnonzero(left)]
        self._who[left] = -1
        return found

    def _sit(self, shard: int, seat: int, place: int, begin: int, end: int) -> None:
        self._who[shard, seat] = place
        self._next[shard, seat] = min(begin + self._sizes.num_rows, end)
        self._end[shard, seat] = end

    @property
    def _can_halve(self) -> bool:
        fewest = self._sizes.num_seats // self._sizes.num_shards * _FEWEST_SEATS
        return self._who.shape[1] % 2 == 0 and self._who.shape[1] // 2 >= fewest

    @property
    def _enough(self) -> int:
        """Newcomers that are worth a prefill."""
        return max(self._sizes.num_new // 2, 1)

    def _num_admitted(self) -> Int[np.ndarray, " shards"]:
        """How many of each shard's prompts the next prefill can take."""
        waiting = np.array([len(line) for line in self._waiting])
        per_shard = self._sizes.num_new // self._sizes.num_shards
        return np.minimum(np.minimum(waiting, (self._who < 0).sum(1)), per_shard)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `sampler.advance`.

    Attributes:
        num_steps: that it takes.
        num_tokens: that its rows sample.
        num_seats, num_prompt_tokens, num_slots: B, P and S.
    """

    num_steps: int
    num_tokens: int
    num_seats: int
    num_prompt_tokens: int
    num_slots: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What decoding calls.

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
    everyone: Sequence[Waiting],
    lengths: dict[int, Int[np.ndarray, " G"]],
    buckets: Sequence[tuple[int, int]],
) -> Schedule:
    """The schedule of prompts whose answers have given lengths.

    Args:
        sizes: of the programs.
        everyone: the prompts.
        lengths: by place, tokens that each rollout of a prompt samples, at least 1.
        buckets: (tokens, patches) that prompts are padded to, ascending; see `data.buckets`.
    """
    line, R = Line(everyone, sizes), sizes.num_rows
    left = np.zeros((sizes.num_seats, R), int)  # steps until each row's rollout ends; 0: idle
    read = np.zeros_like(left)  # tokens of it that the row has read
    samples = np.zeros_like(left)  # 0 where it was over with its first token, else 1
    following = np.zeros(sizes.num_seats, int)  # rollout that the seat's next free row takes
    end = np.zeros(sizes.num_seats, int)
    num_prompt_tokens, prefills, calls, num_first = 0, [], [], 0

    def begin(seat: int, row: int, rollout: int) -> None:
        """The first token comes from the prompt; reading it takes a step in any case."""
        steps = int(lengths[int(line.who[seat])][rollout]) - 1
        left[seat, row], samples[seat, row] = max(steps, 1), steps > 0

    def sit(seat: int, first: int, last: int) -> None:
        left[seat], read[seat] = 0, 0
        taken = range(first, min(first + R, last))
        for row, rollout in enumerate(taken):
            begin(seat, row, rollout)
        following[seat] = first + len(taken)

    while line.is_anyone_left:
        while (newcomers := line.next_newcomers()) is not None:
            largest = newcomers.sizes.max(0)
            tokens, patches = next(b for b in buckets if (largest <= b).all())
            tokens += sizes.context_tokens
            prefills.append((tokens, patches))
            num_prompt_tokens = max(num_prompt_tokens, tokens)
            for seat in newcomers.seats[newcomers.seats >= 0]:
                end[seat] = sizes.num_rollouts
                num_first += sizes.num_rollouts
                sit(seat, 0, sizes.num_rollouts)
        if (shares := line.next_shares()) is not None:
            end[:] = shares.end
            for seat in np.flatnonzero(shares.source >= 0):
                sit(seat, shares.begin[seat], shares.end[seat])
        while (kept := line.next_half()) is not None:
            rows = (np.arange(sizes.num_shards)[:, None] * (len(left) // sizes.num_shards)) + (
                kept.reshape(sizes.num_shards, -1)
            )
            left, read, samples, following, end = (
                x[rows.ravel()] for x in (left, read, samples, following, end)
            )
        num_steps, num_tokens, longest = 0, num_first, int(read.max())
        num_first, num_wanted = 0, line.num_wanted
        while num_steps < NUM_STEPS:
            num_free = int((left == 0).all(1).sum())
            if num_free >= num_wanted or num_free == len(left):
                break
            passed = min(int(left[left > 0].min()), NUM_STEPS - num_steps)
            num_steps += passed
            is_active = left > 0
            num_tokens += passed * int(samples[is_active].sum())
            left, read = left - passed * is_active, read + passed * is_active
            for seat, row in np.argwhere(is_active & (left == 0)):
                read[seat, row] = 0
                if following[seat] < end[seat]:
                    begin(seat, row, following[seat])
                following[seat] += 1
        shape = len(left), num_prompt_tokens, sizes.ring_for(longest)
        calls.append(Call(num_steps, num_tokens, *shape))
        line.leave((left == 0).all(1), following)
    return Schedule(tuple(prefills), tuple(calls))
