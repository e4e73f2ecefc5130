"""The reinforcement learning loop.

The compiled functions are in `programs`; the host side is in `rollout`, `dynamic_sampling` and
`update_batch`.

A step decodes and verifies a rollout batch, selects subgroups, repairs failures and computes
advantages. Then come one or more updates on packed trees, `[prompt | r_0 | ...] [prompt' | ...]`.

Letters: B prompts, G rollouts per prompt, R rows per prompt (G, or G + 1 with a reflected row),
T response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from care_jax.batch import Example, TrainBatch
from care_jax.batch import Groups as StepGroups
from care_jax.data.pipeline import Batches
from care_jax.decoding import reflection
from care_jax.devices import distributed, loaded_programs, sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.devices.flops import PEAK_FLOPS, model_flops
from care_jax.method import diagnostics
from care_jax.method.advantages import RawAdvantages
from care_jax.method.credit import Credit
from care_jax.packing.plan import RowPlan
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.report.groups import Wording
from care_jax.report.metrics import (
    Pace,
    device_memory,
    format_line,
    host_usage,
    print_line,
    progress,
)
from care_jax.report.report import Report
from care_jax.rewards.verifier import Verifier
from care_jax.rl import dynamic_sampling
from care_jax.rl.dynamic_sampling import Draw
from care_jax.rl.programs import (
    RolloutPrograms,
    UpdatePrograms,
    compile_rollout,
    compile_update,
    rollout_sizes,
)
from care_jax.rl.rollout import Groups, PromptTable, gather_prompt_table, roll_out
from care_jax.rl.update_batch import copy_reference, gather_groups, train_batch, with_logprobs
from care_jax.run.attention_check import decoding_attention, training_attention
from care_jax.run.milestones import Evaluate, Milestones
from care_jax.run.run import Run, make_adamw, open_checkpoints, start_state, verifier_of
from care_jax.run.skipped_updates import SkippedUpdates
from care_jax.run.state_check import StateCheck
from models import backbone, lora

_SHOWN = ("reward", "acc", "fmt", "reflect_success", "rescue_rate", "response_tokens", "grad_norm")


def train(
    run: Run,
    params: backbone.Params,
    examples: Sequence[Example],
    evaluate: Evaluate | None = None,
) -> backbone.Params:
    """Runs or resumes the RL stage.

    Args:
        run: the run.
        params: initial parameters and reference of the KL term, of dtype `model.param_dtype`, on
            the mesh. Must not be used afterwards.
        examples: the prompts to learn from.
        evaluate: gives the metrics of weights, every `rl.eval_every` steps.

    Returns:
        the trained parameters.

    Raises:
        distributed.Preempted: the run was told to stop; the state before the unfinished step is
            saved.
        FloatingPointError: an update or a state is broken; says which checkpoint is good.
    """
    config, rl = run.config, run.config.rl
    updates_per_step = rl.prompts_per_step // rl.prompts_per_update
    learning_rate_at, adamw = make_adamw(run, "rl")
    reference = copy_reference(run, params)
    state = start_state(run, params, adamw)
    clock = DeviceClock()
    rollout_programs = compile_rollout(run, clock, decoding_attention(run, rollout_sizes(run)[0]))
    attention = training_attention(run, rl.row_tokens, rl.row_patches)
    programs = compile_update(run, adamw, sharding.of(state), attention)
    # Indices of this process's prompts, first in an update, then in a step: the same in every
    # update.
    local = sharding.local_rows(rl.prompts_per_update, run.decode_batch_sharding)
    local = (np.arange(0, rl.prompts_per_step, rl.prompts_per_update)[:, None] + local).ravel()
    batches = Batches(
        examples,
        run.policy.prompts,
        batch_size=rl.prompts_per_step,
        seed=config.seed,
        rows=local,
        num_workers=config.data.num_workers,
        left_out=run.metrics.counter("rl", "left_out"),
    )
    num_decoded, metadata = 0, {}
    update_batches: Sequence[TrainBatch] = ()

    def loss(params):
        """Of the policy on what the last update was trained on."""
        if not update_batches:
            return None
        return programs.nll(
            params, sharding.put_batch(update_batches[-1], run.train_batch_sharding)
        )

    with (
        open_checkpoints(run, "rl") as checkpoints,
        verifier_of(run) as verifier,
    ):
        start = 0
        if checkpoints.latest_step is not None:
            restored = checkpoints.restore(sharding.abstract(state))
            state, start = restored.state, restored.data_position
            metadata = restored.metadata
            num_decoded = metadata["num_decoded"]
        run.metrics.begin("rl", start)
        state_check = StateCheck(run, "rl", checkpoints, loss)
        skipped = SkippedUpdates(run, "rl", state.params, state_check.advice)
        milestones = Milestones(run, "rl", checkpoints, evaluate, state_check)
        milestones.begin(start, state, metadata)
        report = open_report(run)
        report.begin(start)
        pace = Pace(rl.num_steps)
        tail = 0.0  # seconds for which metrics and report of the step before kept the host busy
        for first in progress(batches.iterate(start, rl.num_steps), "rl", start, rl.num_steps):
            step, *_ = first
            loaded_programs.drop_if_many()
            began, counted = time.perf_counter(), dict(verifier.counts)
            busy = clock.busy_seconds()
            profile_steps(run, step)
            decode_params = programs.to_decode_layout(state.params)
            try:
                draws = draw_groups(
                    run, rollout_programs, decode_params, batches, first, local, verifier
                )
            except distributed.Preempted:
                milestones.save(step, state, {"num_decoded": num_decoded})
                raise distributed.Preempted(f"before rl step {step}") from None
            del decode_params  # frees memory for the update
            rolled_out = time.perf_counter()

            drawn = dynamic_sampling.fill(draws)
            table, prompts, groups = drawn.table, drawn.prompts, drawn.groups
            credited, raw = assign_credit(run, programs, groups)
            gathered = gather_groups(table, groups, credited, raw)
            # All batches are scored before the first update changes the policy.
            planned = [
                train_batch(run, table, prompts, groups, credited, gathered.num_tokens, index)
                for index in range(updates_per_step)
            ]
            update_batches, plans = zip(*planned, strict=True)
            update_batches = with_logprobs(run, programs, update_batches, state.params, reference)
            update_metrics = []
            placed = sharding.put_ahead(update_batches, run.train_batch_sharding)
            for index, batch in enumerate(placed):
                state, metrics = programs.update(state, batch)
                clock.watch(metrics)
                own = update_batches[index], updated_examples(run, drawn.examples, index)
                metrics = skipped.applied(step, jax.device_get(metrics), lambda own=own: own)
                if metrics:
                    update_metrics.append(metrics)
            ended = time.perf_counter()

            drew_once = len(draws) == 1
            seen = gathered if drew_once else dynamic_sampling.survey(draws)
            sources = [source for draw in draws for source in draw.table.sources]
            num_sampled = int((seen.rollouts.is_valid & ~seen.rollouts.is_forced).sum())
            num_decoded += num_sampled
            metrics = diagnostics.rollout_metrics(
                seen.rollouts, seen.scores, sources, rl.num_rollouts
            )
            if run.objective.overlong is not None:
                metrics |= diagnostics.dapo_metrics(
                    seen.rollouts,
                    seen.scores,
                    gathered.scores,
                    len(draws),
                    **run.objective.overlong,
                )
            if gathered.raw is not None:
                metrics |= diagnostics.subgroup_metrics(
                    gathered.scores,
                    gathered.subgroup,
                    gathered.raw,
                    gathered.advantage,
                    gathered.has_reflection,
                )
            metrics |= skipped.counted() | {
                name: float(np.mean([metrics[name] for metrics in update_metrics]))
                for name in (update_metrics or [{}])[0]
            }
            if verifier.has_reward:
                judged = [draw.groups.components for draw in draws]
                sums = diagnostics.component_sums(judged, rl.num_rollouts)
                metrics |= diagnostics.component_means(distributed.gather_json(sums))
            new_counts = distributed.gather_json(
                {name: count - counted.get(name, 0) for name, count in verifier.counts.items()}
            )
            metrics |= {
                f"verifier/{name}": sum(counts[name] for counts in new_counts)
                for name in verifier.counts
            }
            metrics |= (
                device_memory()
                | host_usage()
                | {
                    "learning_rate": float(learning_rate_at(step * updates_per_step)),
                    "decoded_tokens": num_decoded,
                    "rollout_tokens_per_second": num_sampled / (rolled_out - began),
                    "train_tokens_per_second": int(gathered.num_tokens.sum())
                    / (ended - rolled_out),
                    "rollout_seconds": rolled_out - began,
                    "train_seconds": ended - rolled_out,
                    "device_idle": 1 - (clock.busy_seconds() - busy) / (tail + ended - began),
                }
            )
            metrics |= fill(plans) | utilisation(
                run, table, gathered.num_tokens, ended - rolled_out
            )
            run.metrics.write("rl", step, metrics)  # stops the run if a metric is not finite
            left = pace.left(step)
            shown_groups = sampled(drawn.examples, groups, credited, raw)
            is_logged = step % config.log_every == 0 or step == rl.num_steps - 1
            if is_logged:
                shown = {name: metrics[name] for name in _SHOWN if name in metrics}
                print_line(format_line("rl", step, rl.num_steps, shown, ended - began, left))
            run.metrics.show("rl", step, report.add(step, shown_groups, is_logged=is_logged))
            tail = time.perf_counter() - ended
            milestones.reach(step + 1, state, {"num_decoded": num_decoded})
        profile_steps(run, rl.num_steps)
    return lora.merged(state.params)


def updated_examples(run: Run, examples: Sequence[Example], index: int) -> Sequence[Example]:
    """This process's examples of an update, of those of the step; see `train_batch`."""
    num_local = len(examples) * run.config.rl.prompts_per_update // run.config.rl.prompts_per_step
    return examples[index * num_local : (index + 1) * num_local]


def profile_steps(run: Run, step: int) -> None:
    """Starts or stops the trace of `config.profile_steps`; called before each step.

    The trace is written to `workdir/profile`, for TensorBoard's profiler or Perfetto.
    """
    if not run.config.profile_steps:
        return
    first, last = run.config.profile_steps
    if step == first:
        jax.profiler.start_trace(run.workdir / "profile")
    elif step == last + 1:
        jax.profiler.stop_trace()


def draw_groups(
    run: Run,
    programs: RolloutPrograms,
    params: backbone.Params,
    batches: Batches,
    first: tuple[int, list[Example], list[TokenizedPrompt]],
    local: Int[np.ndarray, " B"],
    verifier: Verifier,
) -> list[Draw]:
    """The rollout batches of a step: one, or with DAPO as many as fill it with mixed groups.

    Draw t of step s uses batch s + t·num_steps of the stream and the random key of that number.
    Both are functions of (s, t) alone, and no other draw or step uses them.

    Args:
        run: the run.
        programs: compiled for the run.
        params: in the decode layout.
        batches: the stream.
        first: the step, and the examples and tokenised prompts of its first draw.
        local: indices of this process's prompts in a batch.
        verifier: compares answers.
    """
    rl = run.config.rl

    def draw(number: int, examples: list[Example], prompts: list[TokenizedPrompt]) -> Draw:
        rng = jax.random.fold_in(jax.random.key(run.config.seed), number)
        table = gather_prompt_table(local, examples, prompts)
        groups = roll_out(run, programs, params, rng, table, examples, prompts, verifier)
        return Draw(table, examples, prompts, groups)

    draws = [draw(*first)]
    while len(draws) < run.objective.max_tries and not dynamic_sampling.is_full(draws):
        number = first[0] + len(draws) * rl.num_steps
        draws.append(draw(number, *batches.batch(number)))
    return draws


def utilisation(
    run: Run, table: PromptTable, num_tokens: Int[np.ndarray, "N R"], seconds: float
) -> dict[str, float]:
    """Model TFLOPs per second and device during the updates, and their share of the peak (MFU).

    Padding and rematerialisation do not count. The MFU is left out if the device's peak is not
    known.

    Args:
        run: the run.
        table: of the step's prompts.
        num_tokens: tokens of each response that was trained on, 0 for the others.
        seconds: wall time of the updates.
    """
    model = run.config.model
    flops = model_flops(
        run.policy.config,
        table.sizes,
        num_tokens,
        freeze_vision=model.freeze_vision,
        freeze_decoder=model.freeze_decoder,
        has_adapters=bool(model.lora_rank),
    )
    rate = flops / seconds / run.mesh.size
    peak = PEAK_FLOPS.get(run.mesh.devices.flat[0].device_kind)
    return {"train_tflops_per_second": rate / 1e12} | ({"train_mfu": rate / peak} if peak else {})


def fill(plans: Sequence[RowPlan]) -> dict[str, float]:
    """Share of the tokens and of the patches computed in a step's updates that are real.

    The others are padding and repeated prompts.
    """
    real, computed = (
        {of: sum(getattr(plan, f"{kind}_{of}") for plan in plans) for of in ("tokens", "patches")}
        for kind in ("real", "computed")
    )
    return {
        name: real[of] / computed[of]
        for name, of in (("train_fill", "tokens"), ("patch_fill", "patches"))
        if computed[of]
    }


def open_report(run: Run) -> Report:
    """The run report and the log of rollouts."""
    care, policy = run.config.care, run.policy
    wording = Wording(
        token_bytes=policy.token_bytes,
        eos_token_ids=policy.config.eos_token_ids,
        think_tag=policy.think_tag,
        cue=reflection.cue_text(care.cue, care.reflect_mode, seed=run.config.seed),
    )
    return Report(run.workdir, **run.config.report, wording=wording)


def sampled(
    examples: Sequence[Example], groups: Groups, credited: Credit, raw: RawAdvantages | None
) -> StepGroups:
    """What the report and the log of rollouts show of this process's prompts."""
    rows = np.empty(len(examples), object)
    rows[:] = examples
    return StepGroups(
        examples=rows,
        rollouts=groups.rollouts,
        scores=groups.scores,
        has_reflection=groups.has_reflection,
        reasons=groups.reasons,
        components=groups.components,
        subgroup=groups.subgroup,
        credit=credited,
        raw=raw,
    )


def assign_credit(
    run: Run, programs: UpdatePrograms, groups: Groups
) -> tuple[Credit, RawAdvantages | None]:
    """Advantages and token weights of a rollout batch; with CARE also A_raw, for its metrics."""
    if programs.raw_advantages is None:
        return jax.device_get(programs.credit(groups.rollouts, groups.scores)), None
    arguments = groups.scores, groups.subgroup, groups.has_reflection
    credited = programs.credit(groups.rollouts, *arguments)
    return jax.device_get((credited, programs.raw_advantages(*arguments)))
