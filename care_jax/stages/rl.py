"""The reinforcement learning loop (alg:care).

A step decodes and verifies a rollout batch, selects subgroups, repairs failures and computes
advantages. One or more updates on packed trees, `[prompt | r_0 | ...] [prompt' | ...]`, follow.
The parts of a step are in the package `rl`.

Letters: B prompts of this process, R rows per prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from jaxtyping import Int

from care_jax.batch import Example, Groups
from care_jax.data.pipeline import Batches
from care_jax.devices import sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.learning.train_step import TrainState, train_step
from care_jax.method.credit import with_gradient
from care_jax.packing.plan import RowPlan
from care_jax.report.console import show_part
from care_jax.rl import carry_over
from care_jax.rl.dynamic_sampling import choose_mixed, draw_groups
from care_jax.rl.rollout import gather_groups
from care_jax.rl.rollout_programs import compile_rollout, rollout_sizes
from care_jax.rl.step_metrics import StepLog
from care_jax.rl.update_batch import copy_reference, put_scored, train_batch, with_logprobs
from care_jax.run.attention_check import decoding_attention, training_attention
from care_jax.run.run import (
    Run,
    compile_to_decode_layout,
    make_adamw,
    schedule_of,
    start_state,
    verifier_of,
)
from care_jax.run.stage import (
    Evaluate,
    Stage,
    compile_nll,
    compile_score,
    forward_options,
    open_stage,
)
from models import backbone, lora
from models.attention.packed import AttentionImpl


def train(
    run: Run, params: backbone.Params, examples: Sequence[Example], evaluate: Evaluate | None = None
) -> backbone.Params:
    """Runs or resumes the RL stage; returns the trained parameters.

    Args:
        params: initial parameters and reference of the KL term, of dtype `model.param_dtype`, on
            the mesh; shapes will do if the stage has a checkpoint and keeps no copy of them as the
            reference. Must not be used afterwards.
        evaluate: returns the metrics of weights; called every `rl.eval_every` steps.

    Raises:
        distributed.Preempted: the run was preempted; the state before the unfinished step is saved.
        FloatingPointError: an update or a state is broken; the message names a good checkpoint.
        RewardFailed: see `rewards.failures`; the state before the step is saved.
    """
    rl, clock, index = run.config.rl, DeviceClock(), prompts_of_process(run)
    adamw = make_adamw(run, "rl")
    reference = copy_reference(run, params)
    state = start_state(run, params, adamw, "rl")
    decoding = decoding_attention(run, rollout_sizes(run)[0])
    attention = training_attention(run, rl.row_tokens, rl.row_patches)
    programs = compile_update(run, adamw, sharding.of(state), attention)
    batches = Batches(
        examples,
        run.policy.prompts,
        batch_size=rl.prompts_per_step,
        seed=run.config.seed,
        rows=index,
        num_workers=run.config.data.num_workers,
        left_out=run.metrics.left_out("rl"),
        offset=carry_over.num_carried(run),
    )
    with (
        verifier_of(run) as verifier,
        open_stage(run, "rl", state, programs.nll, evaluate) as stage,
    ):
        del state  # the stage holds it, or has restored another
        log = StepLog(run, stage, clock, verifier)
        rollout = compile_rollout(run, clock, decoding, stage.catch_up)
        carried = carry_over.begin(run, rollout, batches, stage)
        stage.saved_beside = lambda: carry_over.save(rollout, carried)
        for step, questions, prompts in stage.steps(batches):
            log.begin(step)
            decode_params = programs.to_decode_layout(stage.state.params)
            clock.watch(decode_params)
            first = step, questions, prompts
            show_part("prefill")
            draws, left = draw_groups(
                run, rollout, decode_params, batches, first, index, verifier, carried
            )
            del decode_params  # frees memory for the update
            log.rolled_out(step)  # may break off the step; what the last one left is then saved
            carried = left

            groups = assign_credit(run, programs, choose_mixed(draws))
            everyone = gather_groups(groups)
            draws = list(map(_for_the_log, draws))
            plans, updates = _update(step, stage, programs, reference, groups, everyone, log)
            log.updating()
            carried = carried and carried.aged()
            written = step, draws, groups, everyone, plans, updates
            stage.finish(step, functools.partial(log.write, *written))
        log.close()
        stage.saved_beside = lambda: None  # a cycle with `rollout` would keep the state on devices
    return lora.merged(stage.state.params)


def _for_the_log(groups: Groups) -> Groups:
    """Without images and routes, which for all of DAPO's draws would fill the memory of a host."""
    rollouts = dataclasses.replace(groups.rollouts, routes=None)
    return dataclasses.replace(groups, rollouts=rollouts, prompts=None, examples=None)


def _update(
    step: int,
    stage: Stage,
    programs: UpdatePrograms,
    reference: backbone.Params | None,
    groups: Groups,
    everyone: Groups,
    log: StepLog,
) -> tuple[list[RowPlan], list[dict[str, float]]]:
    """Makes a step's updates; returns their packing plans, and the metrics that are known by then.

    `groups` and `everyone` are the groups of this process and of all processes, with credit.
    """
    run, clock = stage.run, log.clock
    num_updates = run.config.rl.prompts_per_step // run.config.rl.prompts_per_update
    parts = groups.split(num_updates)
    pairs = zip(parts, everyone.split(num_updates), strict=True)
    packed = (train_batch(run, *pair) for pair in pairs)  # each when its turn comes
    show_part("log-probabilities")
    scored = put_scored(run, programs.score, packed, stage.state.params, reference, clock)
    plans, updates = [], []
    for number, (part, (batch, plan, on_devices)) in enumerate(zip(parts, scored, strict=True), 1):
        show_part(f"update {number} of {num_updates}")
        plans.append(plan)
        if on_devices is None:
            stage.not_updated(step)
            continue
        stage.state, metrics, logp = programs.update(stage.state, on_devices)
        if number == 1:
            log.first_update(batch, logp)
        clock.watch(metrics)
        batch = with_logprobs(batch, on_devices)
        stage.updated(step, metrics, (batch, part.examples.tolist()))
        updates += stage.read(num_left=1)  # the devices run this one
    return plans, updates


def prompts_of_process(run: Run) -> Int[np.ndarray, " B"]:
    """Indices in the step of this process's prompts: the same slice of every update."""
    rl = run.config.rl
    local = sharding.local_rows(rl.prompts_per_update, run.decode_batch_sharding)
    return (np.arange(0, rl.prompts_per_step, rl.prompts_per_update)[:, None] + local).ravel()


@dataclasses.dataclass(frozen=True)
class UpdatePrograms:
    """The compiled functions of the update; for the rollout's see `RolloutPrograms`."""

    to_decode_layout: Callable  # params -> params in the decode layout
    credit: Callable  # (rollouts, scores[, subgroup, has_reflection]) -> Credit
    raw_advantages: Callable | None  # (scores, subgroup, has_reflection) -> RawAdvantages
    score: Callable  # (params, batch) -> log-probabilities at the tokens of the batch's rows
    nll: Callable  # (params, batch) -> mean of -log π over the tokens that are trained on
    update: Callable  # (state, batch) -> (state, metrics, log-probabilities before the update)


def compile_update(
    run: Run,
    adamw: optax.GradientTransformation,
    state_shardings: TrainState,
    attention: AttentionImpl | None = None,
) -> UpdatePrograms:
    """The jitted functions of an update, each compiled once per shape of rows that occurs."""
    rl, objective = run.config.rl, run.objective
    options, learning_rate_at = forward_options(run, attention), schedule_of(run, "rl")

    def update(state, batch):
        learning_rate = learning_rate_at(state.step)
        state, metrics, logp = train_step(
            state,
            batch,
            run.policy.config,
            adamw,
            objective,
            options,
            microbatch_size=rl.microbatch_size,
            freeze_vision=run.config.model.freeze_vision,
            skip_nonfinite=rl.max_skipped > 0,
        )
        return state, metrics | {"learning_rate": learning_rate}, logp

    score = compile_score(run, "rl", options)
    shardings = state_shardings, None, run.train_batch_sharding
    return UpdatePrograms(
        to_decode_layout=compile_to_decode_layout(run),
        credit=jax.jit(objective.credit),
        raw_advantages=objective.raw_advantages and jax.jit(objective.raw_advantages),
        score=score,
        nll=compile_nll(run, score),
        update=jax.jit(run.placed(update), donate_argnums=0, out_shardings=shardings),
    )


def assign_credit(run: Run, programs: UpdatePrograms, groups: Groups) -> Groups:
    """The groups with advantages and token weights, and for CARE with A_raw, for its metrics."""
    if programs.raw_advantages is None:
        credit, raw = programs.credit(groups.rollouts, groups.trained_scores), None
    else:
        compared = groups.trained_scores, groups.subgroup, groups.has_reflection
        credit = programs.credit(groups.rollouts, *compared)
        raw = programs.raw_advantages(*compared)
    credit, raw = jax.device_get((credit, raw))
    if not run.objective.beta:
        credit = with_gradient(credit)
    return dataclasses.replace(groups, credit=credit, raw=raw)
