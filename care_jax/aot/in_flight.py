"""Which rl.decode_rows and rl.decode_prompts fit, and which of them decode fastest.

Memory: the KV caches and slots of other numbers are known exactly. What else the compiled prefill
needs grows with the prompts, what else the decode steps need with the rows. Time: FLOPs and bytes
of the steps of the simulated schedule, each at its peak rate and one after the other, because the
matmuls of so few rows hide little of the traffic.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence

from care_jax.aot import shapes, step_sizes, workload
from care_jax.decoding.schedule import Sizes
from care_jax.decoding.simulation import Schedule
from care_jax.devices import sharding
from care_jax.devices.flops import Chip
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.run.run import Run

_ALIGNED = 4  # slots of a shard are a multiple, so that they can be halved twice


@dataclasses.dataclass(frozen=True)
class Concurrency:
    """Prompts, and rollouts of each, in flight."""

    num_prompts: int  # rl.decode_prompts
    num_rows: int  # rl.decode_rows
    share: float  # of the time of decode steps, the configured numbers' being 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one chip while a run decodes, as compiled for the configured numbers."""

    chip: float
    kept: int  # parameters in both layouts, optimizer state, reference policy
    programs: Sequence[tuple[int, int]]  # prefill and decode steps of each pass, without `kept`

    def needed(self, run: Run, num_prompts: int, num_rows: int) -> int:
        """Bytes for other numbers of prompts and rows in flight."""
        most, other = 0, _with(run, num_prompts, num_rows)
        passes = zip(rollout_sizes(run), rollout_sizes(other), strict=True)
        for (old, new), (prefill, steps) in zip(passes, self.programs, strict=False):
            had, has = shapes.slot_bytes(run, old), shapes.slot_bytes(run, new)
            prompts = new.num_slots / old.num_slots
            rows = prompts * new.num_rows / old.num_rows
            most = max(most, has + int(max((prefill - had) * prompts, (steps - had) * rows)))
        return self.kept + most

    def most_prompts(self, run: Run, num_rows: int) -> int:
        """The most prompts in flight that should fit with so many rows of each; 0 if none do."""
        parts = sharding.num_shards(run.decode_batch_sharding)
        numbers = range(parts, run.config.rl.prompts_per_step + 1, parts)
        needed = functools.partial(self.needed, run, num_rows=num_rows)
        return parts * bisect.bisect_right(numbers, self.chip, key=needed)


def fastest(run: Run, chip: Chip, memory: Memory, mean_response: float) -> Concurrency | None:
    """The numbers that decode a step of drawn lengths fastest, of those that should fit, if any."""
    rl = run.config.rl
    parts = sharding.num_shards(run.decode_batch_sharding)

    def seconds(num_prompts: int, num_rows: int) -> float:
        other = _with(run, num_prompts, num_rows)
        *schedules, _ = step_sizes.expected_schedules(other, mean_response)
        pairs = zip(rollout_sizes(other), schedules, strict=True)
        return sum(_seconds(other, chip, sizes, schedule) for sizes, schedule in pairs)

    configured = min(rl.decode_rows, rl.num_rollouts)
    now = seconds(rl.decode_prompts, configured)
    best = None
    if memory.needed(run, rl.decode_prompts, configured) <= memory.chip:
        best = Concurrency(rl.decode_prompts, configured, 1.0)
    for num_rows in {min(2**i, rl.num_rollouts) for i in range(rl.num_rollouts.bit_length() + 1)}:
        most = memory.most_prompts(run, num_rows)
        for step in (parts, _ALIGNED * parts):
            if number := most // step * step:
                other = Concurrency(number, num_rows, seconds(number, num_rows) / now)
                best = other if best is None or other.share < best.share else best
    return best


def _with(run: Run, num_prompts: int, num_rows: int) -> Run:
    config = run.config.copy_and_resolve_references()
    config.rl.decode_prompts, config.rl.decode_rows = num_prompts, num_rows
    return dataclasses.replace(run, config=config)


def _seconds(run: Run, chip: Chip, sizes: Sizes, schedule: Schedule) -> float:
    """FLOPs and bytes of the decode steps at the peak rates, one after the other."""
    impl = run.attention(is_decoding=True)
    works = [workload.decode(run, sizes, call, impl) for call in schedule.calls]
    bounds = [work.bounds(chip, run.mesh.size) for work in works]
    return sum(each["compute"] + each["memory"] for each in bounds)
