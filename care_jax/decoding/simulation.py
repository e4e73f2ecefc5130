"""Decoding of given lengths without a model, by the same `Scheduler` (host).

Letters: B slots, R rows of a slot, G rollouts of a prompt, P prompt tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from care_jax.decoding.schedule import (
    NUM_STEPS,
    Scheduler,
    Sizes,
    WaitingPrompt,
    sizes_of,
    widened,
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `sampler.advance`."""

    num_steps: int
    num_tokens: int  # sampled, including the first tokens of the prompts admitted before it
    num_slots: int  # B
    num_prompt_tokens: int  # P
    # Summed over the steps:
    prefix_tokens: int  # in the prefixes of the slots with an active row, without padding
    suffix_tokens: int  # that the active rows attend to in their rings
    num_active_slots: int  # with an active row
    num_active_rows: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The calls of decoding."""

    prefills: tuple[tuple[int, int], ...]  # (tokens, patches) of each, padded, with contexts
    calls: tuple[Call, ...]

    @property
    def num_steps(self) -> int:
        """Decode steps of all calls."""
        return sum(call.num_steps for call in self.calls)


class Simulation:
    """Steps of decoding, one after the other.

    Args:
        buckets: (tokens, patches) that prompts are padded to, ascending; see `data.buckets`.
        max_age: see `Scheduler`.
    """

    def __init__(self, sizes: Sizes, buckets: Sequence[tuple[int, int]], max_age: int = 0):
        self.scheduler = Scheduler(sizes, max_age)
        self._sizes, self._buckets = sizes, buckets
        self._num_tokens_of: dict[int, int] = {}  # by uid of the prompt, context included
        self._lengths: dict[int, Int[np.ndarray, " G"]] = {}
        self._num_prompt_tokens = 0  # P
        # Steps left of each row's rollout, 0 if it is idle; tokens of the rollout in the row's
        # cache; tokens a step, 0 if the first token ended the rollout, else 1; each slot's next
        # rollout; tokens of its prompt.
        shape = sizes.num_slots, sizes.num_rows
        self._left, self._read, self._samples = np.zeros((3, *shape), int)
        self._next_rollout, self._prefix = np.zeros((2, sizes.num_slots), int)

    def step(
        self,
        prompts: Sequence[WaitingPrompt],
        lengths: Mapping[int, Int[np.ndarray, " G"]],
        num_wanted: int | None = None,
    ) -> Schedule:
        """The schedule of one step.

        Args:
            prompts: of this step; those left over by the last one go on.
            lengths: by uid of the prompt, tokens that each of its rollouts samples, at least 1.
            num_wanted: prompts that must be whole at the end; None: all.
        """
        sizes, scheduler = self._sizes, self.scheduler
        self._num_tokens_of |= {p.uid: p.num_tokens + sizes.num_context_tokens for p in prompts}
        self._lengths |= lengths
        scheduler.begin(prompts, num_wanted)
        self._move(scheduler.widen())
        prefills, calls = [], []
        while not scheduler.is_over:
            num_tokens = 0
            while (admission := scheduler.admit()) is not None:
                new, source = admission
                size = sizes_of(new).max(0)
                tokens, patches = next(b for b in self._buckets if (size <= b).all())
                prefills.append((tokens + sizes.num_context_tokens, patches))
                largest = self._buckets[-1][0] + sizes.num_context_tokens
                needed = prefills[-1][0]
                self._num_prompt_tokens = widened(self._num_prompt_tokens, needed, largest)
                for slot in np.flatnonzero(source >= 0).tolist():
                    self._occupy(slot, 0)
                    num_tokens += sizes.num_rollouts
            if (shares := scheduler.share()) is not None:
                source, first, _ = shares
                for slot in np.flatnonzero(source >= 0).tolist():
                    self._occupy(slot, first[slot])
            while (kept := scheduler.halve()) is not None:
                self._move(kept)
            calls.append(self._call(num_tokens))
        self._move(scheduler.compact())
        return Schedule(tuple(prefills), tuple(calls))

    def _call(self, num_tokens: int) -> Call:
        """A call of `sampler.advance`; `num_tokens` were sampled before it."""
        left, read, next_rollout = self._left, self._read, self._next_rollout
        num_steps, refill = 0, self.scheduler.refill
        totals = np.zeros(4, int)  # the last four fields of the call
        lost, is_due = (int(refill.lost), 0), False
        costs = int(refill.prefill_cost), len(left)

        def state():
            return (left == 0).all(1), np.maximum(self.scheduler.ends - next_rollout, 0)

        num_idle = refill.num_idle(*state())
        while num_steps < NUM_STEPS and not is_due:
            is_active = left > 0
            passed = min(int(left[is_active].min()), NUM_STEPS - num_steps)
            for cost, spent, idle in zip(costs, lost, num_idle, strict=True):
                passed = min(passed, max(math.ceil((cost - spent) / idle), 1) if idle else passed)
            num_steps += passed
            num_tokens += passed * int(self._samples[is_active].sum())
            num_rows, is_busy = is_active.sum(), is_active.any(1)
            prefix_tokens = self._prefix[is_busy].sum()
            totals[:2] += passed * np.array([prefix_tokens, (read + 1)[is_active].sum()])
            # A row attends to its new token and to the tokens in its cache, one more each step.
            totals[1] += passed * (passed - 1) // 2 * num_rows
            totals[2:] += passed * np.array([is_busy.sum(), num_rows])
            left -= passed * is_active
            read += passed * is_active
            for slot, row in np.argwhere(is_active & (left == 0)).tolist():
                read[slot, row] = 0
                self._take_next(slot, row)
            before, num_idle = num_idle, refill.num_idle(*state())
            lost = (
                lost[0] + (passed - 1) * before[0] + num_idle[0],
                lost[1] + (passed - 1) * before[1] + num_idle[1],
            )
            is_due = bool(refill.is_due(*state(), lost))
        self.scheduler.release((left == 0).all(1), next_rollout, lost[0])
        totals = totals.tolist()
        return Call(num_steps, num_tokens, len(left), self._num_prompt_tokens, *totals)

    def _take_next(self, slot: int, row: int) -> None:
        """Prefill samples the first token; reading it takes a step even if it is the last."""
        rollout = self._next_rollout[slot]
        if rollout < self.scheduler.ends[slot]:
            steps = int(self._lengths[int(self.scheduler.uids[slot])][rollout]) - 1
            self._left[slot, row], self._samples[slot, row] = max(steps, 1), steps > 0
        self._next_rollout[slot] += 1

    def _occupy(self, slot: int, begin: int) -> None:
        self._left[slot], self._read[slot], self._next_rollout[slot] = 0, 0, begin
        self._prefix[slot] = self._num_tokens_of[int(self.scheduler.uids[slot])]
        for row in range(self._sizes.num_rows):
            self._take_next(slot, row)

    def _move(self, kept: Int[np.ndarray, " kept"] | None) -> None:
        """Keeps slots, each named by its index in its shard; -1 is a new one."""
        if kept is None:
            return
        by_shard = kept.reshape(self._sizes.num_shards, -1)

        def moved(x: np.ndarray) -> np.ndarray:
            shards = x.reshape(len(by_shard), -1, *x.shape[1:])
            found = np.stack([shard[i] for shard, i in zip(shards, by_shard, strict=True)])
            found[by_shard < 0] = 0
            return found.reshape(-1, *x.shape[1:])

        self._left, self._read = moved(self._left), moved(self._read)
        self._samples, self._prefix = moved(self._samples), moved(self._prefix)
        self._next_rollout = moved(self._next_rollout)


def simulate(
    sizes: Sizes,
    prompts: Sequence[WaitingPrompt],
    lengths: Mapping[int, Int[np.ndarray, " G"]],
    buckets: Sequence[tuple[int, int]],
) -> Schedule:
    """The schedule of a single step, see `Simulation`."""
    return Simulation(sizes, buckets).step(prompts, lengths)
