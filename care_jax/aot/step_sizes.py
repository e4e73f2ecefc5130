"""How much one step computes: the rows of its updates and the calls of its decoding (host).

At worst every prompt and response is as long as it may be. Expected is what a run meets: lengths
drawn from the model in `lengths` around a mean. Of a reflected row, all tokens count as sampled.

Letters: N prompts, R rows of a prompt.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from care_jax.aot import lengths, shapes
from care_jax.decoding.schedule import Schedule, Waiting, simulate
from care_jax.devices import roofline, sharding
from care_jax.devices.roofline import Packed
from care_jax.packing.plan import RowPlan, TreeSizes, plan_rows
from care_jax.programs import rollout_sizes
from care_jax.run import Run

_SEED = 0  # of the drawn lengths: two mean lengths, or two topologies, get the same prompts


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """What a step of reinforcement learning computes.

    Attributes:
        updates: the rows of each update, and what a forward over them computes.
        decoding, reflecting: the schedules of the first decode and of the second, in which every
            prompt is taken to be repaired.
    """

    updates: tuple[tuple[RowPlan, Packed], ...]
    decoding: Schedule
    reflecting: Schedule

    @property
    def train_fill(self) -> float:
        """Share of the computed tokens that is real."""
        real = sum(plan.real_tokens for plan, _ in self.updates)
        return real / sum(plan.computed_tokens for plan, _ in self.updates)

    @property
    def num_microbatches(self) -> int:
        """Of all updates."""
        return sum(plan.num_microbatches for plan, _ in self.updates)


def num_processes(run: Run) -> int:
    """Of the hosts of the mesh; this one is none of them where devices are only compiled for."""
    return len({device.process_index for device in run.mesh.devices.flat})


def largest_step(run: Run) -> StepSizes:
    """Every prompt is of the largest bucket, every response as long as it may be."""
    rl = run.config.rl
    update = _plan(run, "rl", *shapes.largest_update(run))
    prompts = np.tile(shapes.largest_bucket(run), (rl.prompts_per_step, 1))
    responses = np.full((rl.prompts_per_step, shapes.num_rows(run)), rl.max_response_tokens)
    return StepSizes(
        (update,) * (rl.prompts_per_step // rl.prompts_per_update),
        *_schedules(run, prompts, responses),
    )


def expected_step(run: Run, mean_response: float) -> StepSizes:
    """Prompts and responses of drawn lengths, planned as a run plans them.

    Args:
        run: the run.
        mean_response: tokens of a response before rl.max_response_tokens cuts it.
    """
    rl = run.config.rl
    prompts, responses = _draw(
        run, rl.prompts_per_step, shapes.num_rows(run), mean_response, rl.max_response_tokens
    )
    updates = tuple(
        _plan(run, "rl", prompts[part], responses[part])
        for part in np.arange(rl.prompts_per_step).reshape(-1, rl.prompts_per_update)
    )
    return StepSizes(updates, *_schedules(run, prompts, responses))


def largest_imitation(run: Run) -> tuple[int, Packed]:
    """Microbatches of a step of the cold start, and what a forward over all its rows computes.

    As many rows as examples, all of them full: no step has more.
    """
    sft = run.config.sft
    num_rows = max(sft.batch_size, sft.microbatch_size)
    no_responses = np.zeros((1, 0), int)
    pairs = int(roofline.tree_pairs(np.array([sft.row_tokens]), no_responses)[0])
    return num_rows // sft.microbatch_size, Packed(
        tokens=num_rows * sft.row_tokens,
        patches=num_rows * sft.row_patches,
        pairs=num_rows * pairs,
        patch_pairs=num_rows * sft.row_patches**2,
        scored=num_rows * sft.row_tokens,
    )


def expected_imitation(run: Run, mean_response: float) -> tuple[int, Packed]:
    """As `largest_imitation`, of drawn lengths; a response is cut at what its row holds."""
    sft = run.config.sft
    prompts, responses = _draw(run, sft.batch_size, 1, mean_response, sft.row_tokens)
    room = np.maximum(sft.row_tokens - prompts[:, :1], 1)
    plan, packed = _plan(run, "sft", prompts, np.minimum(responses, room))
    return plan.num_microbatches, packed


def _draw(
    run: Run, num_prompts: int, num_rows: int, mean: float, cap: int
) -> tuple[Int[np.ndarray, "N 2"], Int[np.ndarray, "N R"]]:
    """Tokens and patches of prompts, and tokens of the responses to them."""
    data, vision = run.config.data, run.policy.config.vision
    rng = np.random.default_rng(_SEED)
    prompts = lengths.draw_prompts(
        num_prompts,
        data.buckets,
        rng,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
    )
    return prompts, lengths.draw_responses((num_prompts, num_rows), mean, cap, rng)


def _plan(
    run: Run, section: str, prompts: Int[np.ndarray, "N 2"], responses: Int[np.ndarray, "N R"]
) -> tuple[RowPlan, Packed]:
    """The rows of one update, as the processes that own the devices plan them.

    A prompt that is split over rows counts its own pairs once.
    """
    settings = run.config[section]
    plan = plan_rows(
        TreeSizes(*prompts.T, responses),
        row_tokens=settings.row_tokens,
        row_patches=settings.row_patches,
        microbatch_size=settings.microbatch_size,
        owner=sharding.owners(len(prompts), run.decode_batch_place),
        num_processes=num_processes(run),
        section=section,
    )
    return plan, Packed(
        tokens=plan.computed_tokens,
        patches=plan.computed_patches,
        pairs=int(roofline.tree_pairs(prompts[:, 0], responses).sum()),
        patch_pairs=int((prompts[:, 1].astype(np.int64) ** 2).sum()),
        scored=int(responses.sum()),
    )


def _schedules(
    run: Run, prompts: Int[np.ndarray, "N 2"], responses: Int[np.ndarray, "N R"]
) -> tuple[Schedule, Schedule]:
    """Of the first decode, and of the reflected one.

    A reflected row samples what its context leaves of it, which is cut as the longest context is.
    """
    buckets = sorted(map(tuple, run.config.data.buckets))
    first, second = rollout_sizes(run)
    everyone = [
        Waiting(int(tokens), place, int(patches)) for place, (tokens, patches) in enumerate(prompts)
    ]
    rollouts, reflected = np.split(responses, [first.num_rollouts], axis=1)
    decoding = simulate(first, everyone, dict(enumerate(rollouts)), buckets)
    if not reflected.size:
        return decoding, Schedule((), ())
    room = second.max_tokens - second.context_tokens
    reflected = dict(enumerate(np.minimum(reflected, room)))
    return decoding, simulate(second, everyone, reflected, buckets)
