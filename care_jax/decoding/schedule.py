"""Schedules continuous decoding: which waiting prompt gets which slot, and when (host).

Prompts wait in one queue per batch shard, the shard that trains on them, shortest first. Once a
queue is empty, a free slot takes over half of the unstarted rollouts of another slot of its shard.
Once all queues are empty and every shard uses at most half of its slots, the number of slots is
halved. `simulation` runs the same `Scheduler` on given lengths, without a model.

A step may end once enough prompts are whole, that is, have all their rollouts. The others go on in
the next step, in the slots that they have.

Letters: B slots, R rows of a slot, G rollouts of a prompt, T tokens of a rollout, N prompts of a
prefill, P prompt tokens. `sampler` explains slots and rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from models.attention.cached import whole_blocks

NUM_STEPS = 64  # maximum decode steps of a call of `sampler.advance`
_NUM_PREFILLS = 16  # prefills that fill all slots
_NUM_COMPACTED = 8  # sizes of the slots between two steps
_FEWEST_SLOTS = 1 / 4  # smallest fraction of the slots to keep; each halving is one more compile


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the decoding programs."""

    num_slots: int  # B, over all processes
    num_rows: int  # R
    num_rollouts: int  # G
    max_tokens: int  # T, context included
    num_context_tokens: int  # maximum number of forced tokens at the start of a rollout
    num_shards: int  # of the batch; divides B
    period: int  # prompts of an update; each such run of prompts is split evenly over the shards

    @property
    def num_new(self) -> int:
        """N, the prompts of a prefill; equally many on every shard."""
        return self.num_shards * max(self.num_slots // self.num_shards // _NUM_PREFILLS, 1)

    def shard_of(self, uid: Any) -> Any:
        """The shard that decodes the prompt with this uid, or the shards of several."""
        return uid % self.period // (self.period // self.num_shards)


@dataclasses.dataclass(frozen=True, order=True)
class WaitingPrompt:
    """A waiting prompt: tokens, uid, image patches."""

    num_tokens: int
    # Its index in the step plus a multiple of the period; no other prompt has it, of earlier steps
    # either.
    uid: int
    num_patches: int


def sizes_of(prompts: Sequence[WaitingPrompt | None]) -> Int[np.ndarray, "n 2"]:
    """Tokens and patches of each prompt; None is padding."""
    return np.array([(p.num_tokens, p.num_patches) for p in prompts if p is not None])


def widened(num_tokens: int, needed: int, largest: int) -> int:
    """P, the tokens of a prompt's slot, once a prompt padded to `needed` tokens is admitted.

    At least doubled and at most the `largest`, so that slots of few sizes are compiled; in whole
    blocks of the cache.
    """
    if needed <= num_tokens:
        return num_tokens
    return whole_blocks(max(needed, min(2 * num_tokens, largest)))


class Refill(NamedTuple):
    """When a call of `sampler.advance` should end, so that the host refills free slots.

    It ends once the slots left idle have cost as much as refilling them does, so the loss is at
    most twice the optimum, whatever the lengths. Costs are in slot-steps; a step of all B slots
    costs B:

        prompts     N P / R for the tokens of a prefill, as a slot-step computes R tokens, and B
        rollouts    B: copying the caches of the prompts, and the round trip, take about a step

    Its methods take arrays of numpy or of jax.
    """

    num_waiting: Int[Any, " shards"]  # prompts of each shard
    num_new: Int[Any, ""]  # prompts of a shard that a prefill admits
    prefill_cost: Int[Any, ""]
    num_kept: Int[Any, ""]  # slots of a shard after halving; -1 if they are not halved
    num_free: Int[Any, ""]  # fewest free slots with which the step may be over
    lost: Int[Any, ""]  # slot-steps left idle while prompts waited, since the last prefill

    def num_idle(
        self, is_free: Bool[Any, " B"], unstarted: Int[Any, " B"]
    ) -> tuple[Int[Any, ""], Int[Any, ""]]:
        """Free slots that waiting prompts, and that unstarted rollouts of other slots could take.

        Args:
            is_free: whether all rows of the slot are idle.
            unstarted: rollouts of the slot that are in no row yet.
        """
        free, unstarted = self._by_shard(is_free), self._by_shard(unstarted)
        sharing = (self.num_waiting == 0) * free.clip(max=unstarted)
        return free.clip(max=self.num_waiting).sum(), sharing.sum()

    def is_due(
        self,
        is_free: Bool[Any, " B"],
        unstarted: Int[Any, " B"],
        lost: tuple[Int[Any, ""], Int[Any, ""]],
    ) -> Bool[Any, ""]:
        """Whether the call should end, after steps that left `lost` slots of `num_idle` idle.

        It ends at once if a prefill would be full or admit all that wait, if half of the slots
        suffice, if the step may end, or if nothing is decoded.
        """
        free, unstarted = self._by_shard(is_free), self._by_shard(unstarted)
        num_slots, most = is_free.shape[0], self.num_waiting.clip(max=self.num_new)
        occupied = num_slots // len(self.num_waiting) - free
        return (
            (lost[0] >= self.prefill_cost)
            | (lost[1] >= num_slots)
            | ((free >= most).all() & (most > 0).any())
            | ((occupied + unstarted).max() <= self.num_kept)
            | (free.sum() >= self.num_free)
        )

    def _by_shard(self, x: Shaped[Any, " B"]) -> Int[Any, " shards"]:
        return x.reshape(len(self.num_waiting), -1).sum(1)


class Scheduler:
    """The waiting prompts and those in slots, of all processes; identical on each process.

    `chosen` are the uids of the prompts that are whole and count for this step, in the order in
    which they became whole; `spare` of those that are whole and count for the next step. A prompt
    that was carried over `max_age` times must be whole for a step to end.
    """

    def __init__(self, sizes: Sizes, max_age: int = 0):
        self._sizes, self._max_age = sizes, max_age
        self._waiting: list[deque[WaitingPrompt]] = [deque() for _ in range(sizes.num_shards)]
        shape = sizes.num_shards, sizes.num_slots // sizes.num_shards
        self._uids = np.full(shape, -1)  # of the prompt in each slot, -1 if it is free
        self._next = np.zeros(shape, int)  # the next rollout that the slot starts
        self._end = np.zeros(shape, int)  # end (exclusive) of the slot's range of rollouts
        self._lost = 0  # as in `Refill`
        self._age: dict[int, int] = {}  # of prompts that are not whole: steps since they came
        self._num_wanted: int | None = None
        self.chosen: list[int] = []
        self.spare: list[int] = []
        self.next_uid = 0  # larger than those of all prompts, and a multiple of the period

    def grow_older(self) -> None:
        """Counts a step for the prompts that are not whole."""
        self._age = {uid: age + 1 for uid, age in self._age.items()}

    def begin(self, prompts: Sequence[WaitingPrompt], num_wanted: int | None = None) -> None:
        """Begins a step with further prompts, which wait behind those of earlier steps.

        It ends once `num_wanted` prompts are whole, by default all.
        """
        spare, self.spare, self.chosen, self._num_wanted = self.spare, [], [], num_wanted
        self._age |= {prompt.uid: 0 for prompt in prompts}
        period, last = self._sizes.period, max((p.uid for p in prompts), default=-1)
        self.next_uid = max(self.next_uid, -(-(last + 1) // period) * period)
        for prompt in sorted(prompts):
            self._waiting[self._sizes.shard_of(prompt.uid)].append(prompt)
        for uid in spare:
            self._choose(uid)

    def saved(self) -> dict[str, Any]:
        """The state between two steps, in JSON types; `restore` takes it."""
        return {
            "indices": self._uids.tolist(),
            "next": self._next.tolist(),
            "end": self._end.tolist(),
            "lost": self._lost,
            "age": list(self._age.items()),
            "spare": self.spare,
            "next_number": self.next_uid,
            "waiting": [[dataclasses.astuple(p) for p in queue] for queue in self._waiting],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes over the state of another scheduler of these sizes."""
        names = "indices", "next", "end"  # the uids are under "indices"
        self._uids, self._next, self._end = (np.array(saved[name]) for name in names)
        self._lost, self.next_uid = saved["lost"], saved["next_number"]
        self._age, self.spare = dict(map(tuple, saved["age"])), list(saved["spare"])
        self._waiting = [deque(WaitingPrompt(*p) for p in queue) for queue in saved["waiting"]]

    @property
    def has_prompts(self) -> bool:
        """Whether prompts are left that do not count for this step."""
        return bool(self._age or self.spare)

    @property
    def is_over(self) -> bool:
        """Whether the step ends: enough prompts are whole, or none is left."""
        return self._num_missing <= 0 or not self._age

    @property
    def _num_missing(self) -> int:
        """Prompts that are not whole yet and have to be for the step to end."""
        wanted = math.inf if self._num_wanted is None else self._num_wanted - len(self.chosen)
        return int(max(min(wanted, len(self._age)), self._num_overdue))

    @property
    def _num_overdue(self) -> int:
        if self._num_wanted is None:
            return 0
        return sum(age >= self._max_age for age in self._age.values())

    def _choose(self, uid: int) -> None:
        """Counts a prompt that is whole, for this step if it has room for it."""
        room = math.inf if self._num_wanted is None else self._num_wanted - self._num_overdue
        (self.chosen if len(self.chosen) < room else self.spare).append(uid)

    @property
    def uids(self) -> Int[np.ndarray, " B"]:
        """The uid of the prompt in each slot, -1 in free slots."""
        return self._uids.ravel()

    @property
    def ends(self) -> Int[np.ndarray, " B"]:
        """End (exclusive) of each slot's range of rollouts."""
        return self._end.ravel()

    @property
    def refill(self) -> Refill:
        """When the next call of `sampler.advance` should return."""
        can_halve = self._can_halve and not any(self._waiting)
        num_free = self._uids.size
        if self._num_wanted is not None:
            num_free = min((self._uids < 0).sum() + self._num_missing, num_free)
        return Refill(
            np.array([len(queue) for queue in self._waiting], np.int32),
            np.int32(self._num_new_of_shard),
            np.int32(self._prefill_cost),
            np.int32(self._uids.shape[1] // 2 if can_halve else -1),
            np.int32(num_free),
            np.int32(self._lost),
        )

    def admit(self) -> tuple[list[WaitingPrompt | None], Int[np.ndarray, " B"]] | None:
        """Assigns waiting prompts to free slots; None while a prefill is not worth it.

        Returns:
            the N prompts of a prefill, by shard, None for padding; and for each slot the source of
            its new prompt, its index among the N / num_shards of the shard, -1 for none.
        """
        waiting = np.array([len(queue) for queue in self._waiting])
        most = np.minimum(waiting, self._num_new_of_shard)
        num_admitted = np.minimum(most, (self._uids < 0).sum(1))
        is_worth = (num_admitted == most).all() or self._lost >= self._prefill_cost
        if not num_admitted.any() or not (is_worth or (self._uids < 0).all()):
            return None
        self._lost = 0
        prompts: list[WaitingPrompt | None] = []
        source = np.full(self._uids.shape, -1, np.int32)
        for shard, count in enumerate(num_admitted.tolist()):
            free = np.flatnonzero(self._uids[shard] < 0)[:count]
            source[shard, free] = np.arange(count)
            taken = [self._waiting[shard].popleft() for _ in free]
            for slot, prompt in zip(free.tolist(), taken, strict=True):
                self._assign(shard, slot, prompt.uid, 0, self._sizes.num_rollouts)
            prompts += taken + [None] * (self._num_new_of_shard - count)
        return prompts, source.ravel()

    def share(self) -> Int[np.ndarray, "3 B"] | None:
        """Moves unstarted rollouts from the slots with the most to free slots; None if none move.

        Returns:
            source: for each slot, index in its shard of the slot it takes over from; -1 for none.
            begin: for each such slot, the first rollout that it takes over.
            end: for every slot, the end (exclusive) of its range of rollouts.
        """
        source, begin = np.full((2, *self._uids.shape), -1, np.int32)
        for shard in range(self._sizes.num_shards):
            if self._waiting[shard]:
                continue
            for slot in np.flatnonzero(self._uids[shard] < 0).tolist():
                left = self._end[shard] - self._next[shard]
                donor = int(left.argmax())
                if left[donor] < 1:
                    break
                end = self._end[shard, donor]
                # A donor that takes over itself does not hold the prompt yet; its source does.
                source[shard, slot] = source[shard, donor] if source[shard, donor] >= 0 else donor
                begin[shard, slot] = end - (left[donor] + 1) // 2
                self._end[shard, donor] = begin[shard, slot]
                self._assign(shard, slot, self._uids[shard, donor], begin[shard, slot], end)
        if (source < 0).all():
            return None
        return np.stack([source.ravel(), begin.ravel(), self.ends]).astype(np.int32)

    def halve(self) -> Int[np.ndarray, " half"] | None:
        """Halves the number of slots; returns the index in its shard of each kept slot, or None."""
        is_free = self._uids < 0
        half = self._uids.shape[1] // 2
        if not self._can_halve or any(self._waiting) or ((~is_free).sum(1) > half).any():
            return None
        return self._keep(half)

    def compact(self) -> Int[np.ndarray, " kept"] | None:
        """Between two steps, keeps as few slots as hold the prompts; returns them as `halve` does.

        Each shard keeps as many, in whole eighths, so that few sizes are compiled.
        """
        num_slots, most = self._uids.shape[1], int((self._uids >= 0).sum(1).max())
        unit = -(-self._sizes.num_slots // self._sizes.num_shards // _NUM_COMPACTED)
        count = max(-(-most // unit), 1) * unit
        return None if count >= num_slots else self._keep(count)

    def widen(self) -> Int[np.ndarray, " B"] | None:
        """Restores the number of slots; returns each slot's index in its shard before, or None.

        The index of a new slot is -1.
        """
        num_shards, before = self._uids.shape
        missing = self._sizes.num_slots // num_shards - before
        if missing <= 0:
            return None
        kept = np.tile(np.arange(before), (num_shards, 1))
        kept, self._uids = (
            np.pad(x, ((0, 0), (0, missing)), constant_values=-1) for x in (kept, self._uids)
        )
        self._next, self._end = (np.pad(x, ((0, 0), (0, missing))) for x in (self._next, self._end))
        return kept.ravel().astype(np.int32)

    def _keep(self, count: int) -> Int[np.ndarray, " kept"]:
        kept = np.argsort(self._uids < 0, axis=1, kind="stable")[:, :count]
        self._uids, self._next, self._end = (
            np.take_along_axis(x, kept, 1) for x in (self._uids, self._next, self._end)
        )
        return kept.ravel().astype(np.int32)

    def release(
        self, is_free: Bool[np.ndarray, " B"], next_rollout: Int[np.ndarray, " B"], lost: Any
    ) -> list[tuple[int, int]]:
        """Frees the slots without rollouts after a call of `sampler.advance`; `lost` is its result.

        Returns:
            (uid of the prompt, slot) for each.
        """
        self._lost = int(lost)
        self._next = np.minimum(next_rollout.reshape(self._end.shape), self._end)
        slots = np.flatnonzero((self.uids >= 0) & is_free)
        released = [(int(self.uids[slot]), int(slot)) for slot in slots]
        self._uids.flat[slots] = -1
        left = self.uids.tolist()
        for uid in dict.fromkeys(uid for uid, _ in released if uid not in left):
            del self._age[uid]
            self._choose(uid)
        return released

    def _assign(self, shard: int, slot: int, uid: int, begin: int, end: int) -> None:
        self._uids[shard, slot] = uid
        self._next[shard, slot] = min(begin + self._sizes.num_rows, end)
        self._end[shard, slot] = end

    @property
    def _can_halve(self) -> bool:
        fewest = self._sizes.num_slots // self._sizes.num_shards * _FEWEST_SLOTS
        return self._uids.shape[1] % 2 == 0 and self._uids.shape[1] // 2 >= fewest

    @property
    def _num_new_of_shard(self) -> int:
        return self._sizes.num_new // self._sizes.num_shards

    @property
    def _prefill_cost(self) -> int:
        """Slot-steps that a prefill of the next prompts costs, as in `Refill`."""
        longest = max((queue[0].num_tokens for queue in self._waiting if queue), default=0)
        num_tokens = self._sizes.num_new * (longest + self._sizes.num_context_tokens)
        return num_tokens // self._sizes.num_rows + self._uids.size
