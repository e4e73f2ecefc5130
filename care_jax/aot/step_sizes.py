"""Sizes of one step: the packed rows of its updates and the calls of its decoding (host).

In the largest step every prompt and response has the maximum length. In the expected step lengths
are drawn by `lengths`. All tokens of a reflected row count as sampled. With rl.carry_over the first
decode of the expected step is one of several that are simulated in a row.

Letters: N prompts, R rows of a prompt.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from care_jax.aot import lengths, shapes
from care_jax.decoding.schedule import WaitingPrompt
from care_jax.decoding.simulation import Schedule, Simulation, simulate
from care_jax.devices import flops
from care_jax.devices.flops import Packed
from care_jax.packing.plan import RowPlan, TreeSizes, plan_rows
from care_jax.rl.carry_over import first_indices
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.run.run import Run
from care_jax.stages.answering import answering_sizes

_SEED = 0  # of the drawn lengths: all means and topologies get the same prompts
_NUM_STEPS, _NUM_STEADY = 10, 7  # simulated with rl.carry_over; the last of them are steady


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Sizes of an RL step."""

    updates: tuple[tuple[RowPlan, Packed], ...]  # packed rows, and the size of their forward
    decoding: Schedule  # of the first decode
    reflecting: Schedule  # of the second, as if every prompt were repaired
    num_rows: int  # in flight in the first decode, over all chips
    num_left: int = 0  # most slots that the first decode leaves to the next step

    @property
    def train_fill(self) -> float:
        """Share of the computed tokens that are real."""
        real = sum(plan.real_tokens for plan, _ in self.updates)
        return real / sum(plan.computed_tokens for plan, _ in self.updates)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of all updates."""
        return sum(plan.num_microbatches for plan, _ in self.updates)

    @property
    def least_decode_steps(self) -> float:
        """Steps of the first decode if no row were ever idle."""
        return sum(call.num_tokens for call in self.decoding.calls) / self.num_rows


def largest_step(run: Run) -> StepSizes:
    """A step in which prompts fill the largest bucket and responses have maximum length."""
    num_updates = run.config.rl.prompts_per_step // run.config.rl.prompts_per_update
    prompts, responses = shapes.largest_update(run)
    update = plan_update(run, "rl", prompts, responses)
    whole = (np.tile(part, (num_updates, 1)) for part in (prompts, responses))
    num_left = rollout_sizes(run)[0].num_slots if run.config.rl.carry_over else 0
    return StepSizes((update,) * num_updates, *schedules(run, *whole), _num_rows(run), num_left)


def expected_step(run: Run, mean_response: float) -> StepSizes:
    """A step with prompts and responses of drawn lengths, planned as in a run.

    `mean_response` is in tokens, before clipping to rl.max_response_tokens.
    """
    rl = run.config.rl
    prompts, responses = _draw_step(run, mean_response)
    updates = tuple(
        plan_update(run, "rl", prompts[part], responses[part])
        for part in np.arange(rl.prompts_per_step).reshape(-1, rl.prompts_per_update)
    )
    decoding, reflecting, num_left = expected_schedules(run, mean_response)
    return StepSizes(updates, decoding, reflecting, _num_rows(run), num_left)


def expected_schedules(run: Run, mean_response: float) -> tuple[Schedule, Schedule, int]:
    """The schedules of the expected step, and `StepSizes.num_left`."""
    decoding, reflecting = schedules(run, *_draw_step(run, mean_response))
    if not run.config.rl.carry_over:
        return decoding, reflecting, 0
    decoding, num_left = _steady(run, mean_response)
    return decoding, reflecting, num_left


def _draw_step(
    run: Run, mean_response: float
) -> tuple[Int[np.ndarray, "N 2"], Int[np.ndarray, "N R"]]:
    rl = run.config.rl
    sizes = rl.prompts_per_step, shapes.num_rows(run), mean_response, rl.max_response_tokens
    return draw(run, *sizes)


def _steady(run: Run, mean_response: float) -> tuple[Schedule, int]:
    """The first decode of a typical step with rl.carry_over, some steps after the first.

    Of the last steps that are simulated, it is the one whose decode steps are nearest to the mean.

    Returns:
        the schedule, and the most slots that one of these steps leaves to the next.
    """
    rl, (sizes, _) = run.config.rl, rollout_sizes(run)
    simulation = Simulation(sizes, _buckets(run), rl.max_age)
    scheduler, found = simulation.scheduler, []
    for step in range(_NUM_STEPS):
        uids = np.arange(rl.prompts_per_step)
        if step == 0:
            uids = np.concatenate([uids, first_indices(run)])
        else:
            scheduler.grow_older()
        uids += scheduler.next_uid
        prompts, responses = draw(
            run,
            len(uids),
            sizes.num_rollouts,
            mean_response,
            rl.max_response_tokens,
            seed=_SEED + step,
        )
        waiting = _waiting(prompts, uids)
        lengths_of = dict(zip(uids.tolist(), responses, strict=True))
        schedule = simulation.step(waiting, lengths_of, rl.prompts_per_step)
        found.append((schedule, len(scheduler.uids)))
    schedules, num_left = zip(*found[-_NUM_STEADY:], strict=True)
    mean = np.mean([schedule.num_steps for schedule in schedules])
    return min(schedules, key=lambda each: abs(each.num_steps - mean)), max(num_left)


def _num_rows(run: Run) -> int:
    sizes, _ = rollout_sizes(run)
    return sizes.num_slots * sizes.num_rows


def _buckets(run: Run) -> list[tuple[int, int]]:
    return sorted(map(tuple, run.config.data.buckets))


def _waiting(prompts: Int[np.ndarray, "N 2"], uids: Int[np.ndarray, " N"]) -> list[WaitingPrompt]:
    rows = np.column_stack([prompts[:, 0], uids, prompts[:, 1]])
    return [WaitingPrompt(*row) for row in rows.tolist()]


def largest_evaluation(run: Run) -> Schedule:
    """The decode of one evaluation batch, with prompts and responses of maximum length."""
    sizes = answering_sizes(run)
    num_tokens, num_patches = shapes.largest_bucket(run)
    waiting = [WaitingPrompt(num_tokens, number, num_patches) for number in range(sizes.num_slots)]
    lengths_of = dict.fromkeys(
        range(sizes.num_slots), np.full(sizes.num_rollouts, sizes.max_tokens)
    )
    return simulate(sizes, waiting, lengths_of, _buckets(run))


def largest_imitation(run: Run) -> tuple[int, Packed]:
    """Microbatches of the largest SFT step, and the size of a forward over all its rows.

    It has one full row per example.
    """
    sft = run.config.sft
    num_rows = max(sft.batch_size, sft.microbatch_size)
    no_responses = np.zeros((1, 0), int)
    pairs = int(flops.tree_pairs(np.array([sft.row_tokens]), no_responses)[0])
    return num_rows // sft.microbatch_size, Packed(
        tokens=num_rows * sft.row_tokens,
        patches=num_rows * sft.row_patches,
        pairs=num_rows * pairs,
        patch_pairs=num_rows * sft.row_patches**2,
        scored=num_rows * sft.row_tokens,
    )


def expected_imitation(run: Run, mean_response: float) -> tuple[int, Packed]:
    """As `largest_imitation`, with drawn lengths; a response is clipped to fit its row."""
    sft = run.config.sft
    prompts, responses = draw(run, sft.batch_size, 1, mean_response, sft.row_tokens)
    room = np.maximum(sft.row_tokens - prompts[:, :1], 1)
    plan, packed = plan_update(run, "sft", prompts, np.minimum(responses, room))
    return plan.num_microbatches, packed


def draw(
    run: Run, num_prompts: int, num_rows: int, mean: float, cap: int, seed: int = _SEED
) -> tuple[Int[np.ndarray, "N 2"], Int[np.ndarray, "N R"]]:
    """Tokens and patches of N prompts, and tokens of R responses to each; deterministic.

    Responses have `mean` tokens on average before they are clipped to `cap`.
    """
    data, config = run.config.data, run.policy.config
    rng = np.random.default_rng(seed)
    prompts = lengths.draw_prompts(
        num_prompts,
        data.buckets,
        rng,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        patch_size=config.vision.patch_size if config.vision else None,
        merge_size=config.merge_size,
    )
    return prompts, lengths.draw_responses((num_prompts, num_rows), mean, cap, rng)


def plan_update(
    run: Run, section: str, prompts: Int[np.ndarray, "N 2"], responses: Int[np.ndarray, "N R"]
) -> tuple[RowPlan, Packed]:
    """The rows of one update, of all processes.

    The (query, key) pairs of a prompt count once, even if its tree is split over several rows.
    """
    settings = run.config[section]
    plan = plan_rows(
        TreeSizes(*prompts.T, branches=responses),
        row_tokens=settings.row_tokens,
        row_patches=settings.row_patches,
        microbatch_size=settings.microbatch_size,
        row_lengths=settings.row_lengths,
        section=section,
    )
    return plan, Packed(
        tokens=plan.computed_tokens,
        patches=plan.computed_patches,
        pairs=int(flops.tree_pairs(prompts[:, 0], responses).sum()),
        patch_pairs=int((prompts[:, 1].astype(np.int64) ** 2).sum()),
        scored=int(responses.sum()),
    )


def schedules(
    run: Run, prompts: Int[np.ndarray, "N 2"], responses: Int[np.ndarray, "N R"]
) -> tuple[Schedule, Schedule]:
    """The schedules of the first and of the reflected decode.

    Sampled tokens of a reflected row are clipped to what the longest context leaves.
    """
    buckets, waiting = _buckets(run), _waiting(prompts, np.arange(len(prompts)))
    first, second = rollout_sizes(run)
    rollouts, reflected = np.split(responses, [first.num_rollouts], axis=1)
    decoding = simulate(first, waiting, dict(enumerate(rollouts)), buckets)
    if not reflected.size:
        return decoding, Schedule((), ())
    room = second.max_tokens - second.num_context_tokens
    reflected = dict(enumerate(np.minimum(reflected, room)))
    return decoding, simulate(second, waiting, reflected, buckets)
