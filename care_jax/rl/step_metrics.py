"""Measures and logs RL steps: groups, updates and timings.

Letters: N prompts of a step, R rows per prompt.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from care_jax.batch import Groups, TrainBatch
from care_jax.decoding import reflection
from care_jax.devices import distributed
from care_jax.devices.device_clock import DeviceClock
from care_jax.devices.flops import PEAK_FLOPS, model_flops
from care_jax.method import diagnostics
from care_jax.method.advantages import overlong_penalty
from care_jax.packing.plan import RowPlan, fill_of
from care_jax.report.console import print_line
from care_jax.report.groups import Wording
from care_jax.report.metrics import device_memory
from care_jax.report.report import Report
from care_jax.rewards.failures import FailureLimit
from care_jax.rewards.verifier import Verifier
from care_jax.rl.collapse import CollapseWatch
from care_jax.rl.rollout import gather_groups
from care_jax.run.run import Run
from care_jax.run.stage import Stage

_MOST_SHOWN = 200  # steps whose groups TensorBoard and the trackers have, about 1 MB each
_ROUTES = "routes/differ"  # how the names of `routing.differing` begin
# Printed of a step, under these names.
_SHOWN = {"reward": "reward", "acc": "sampled acc", "fmt": "format", "reflect_success": "repaired"}
_SHOWN |= {"rescue_rate": "rescued", "response_tokens": "length", "grad_norm": "grad_norm"}


@dataclasses.dataclass
class StepLog:
    """Times a step and writes its metrics, rollouts and report."""

    run: Run
    stage: Stage
    clock: DeviceClock
    verifier: Verifier

    def __post_init__(self):
        self._report = open_report(self.run)
        self._report.begin(self.stage.start)
        self._collapse = CollapseWatch()
        self._limit = FailureLimit(self.verifier, self.run.config.verifier.max_failed)
        self._seconds = 0.0  # that logging the last step took
        self._is_tracing = False
        # Of the step in progress, in the order in which they are set.
        self._counted: dict[str, int]  # the verifier's counts when it began
        self._began: tuple[float, float]  # the time then, and the devices' busy seconds until then
        self._verdicts: dict[str, int]  # the verifier's counts of the step, of all processes
        self._not_judged: float  # share of the responses without a verdict
        self._rolled_out: float  # when the rollouts were done
        self._first: tuple[np.ndarray, jax.Array, np.ndarray, np.ndarray]  # of `sampler_mismatch`
        # As `_began`, at the end of the updates; and the time at which they had been called.
        self._updated: tuple[Future[tuple[float, float]], float]

    def begin(self, step: int) -> None:
        """Called before the rollouts."""
        self._counted = dict(self.verifier.counts)
        if not self.stage.is_behind:  # else the step began when the last one's updates were done
            self._began = time.perf_counter() - self._seconds, self.clock.busy_seconds()
        self._trace(step)

    def rolled_out(self, step: int) -> None:
        """Called between rollouts and updates; raises RewardFailed if too little was judged."""
        self.stage.catch_up()
        counts = {name: n - self._counted[name] for name, n in self.verifier.counts.items()}
        everywhere = distributed.gather_json(counts)
        self._verdicts = {name: sum(each[name] for each in everywhere) for name in counts}
        self._not_judged = self._limit.check(step, self._verdicts)
        self._rolled_out = time.perf_counter()

    def first_update(self, sampled: TrainBatch, logp: jax.Array) -> None:
        """Called after the first update of a step.

        Args:
            sampled: its batch on the host, whose `old_logp` is still the sampler's.
            logp: log-probabilities of its tokens before the update, on the devices.
        """
        is_compared = sampled.is_compared
        if sampled.is_fresh is not None:  # older weights drew the others
            is_compared = is_compared & sampled.is_fresh
        self._first = sampled.old_logp, logp, is_compared, sampled.rows.branch

    def updating(self) -> None:
        """Called when the updates have been called, and may still run."""
        self._updated = self.clock.reading(), time.perf_counter()

    def write(
        self,
        step: int,
        draws: Sequence[Groups],
        groups: Groups,
        everyone: Groups,
        plans: Sequence[RowPlan],
        updates: Sequence[Mapping[str, float]],
    ) -> None:
        """Called after `updating`; raises FloatingPointError if a metric is not finite.

        A step takes from the end of the last one's updates to the end of its own.

        Args:
            draws: the rollout batches of this process.
            groups, everyone: the groups trained on, of this process and of all processes.
            plans, updates: packing plan and metrics of each update; {} if it was skipped. The
                stage may have updates that were not read yet.
        """
        run, began = self.run, time.perf_counter()
        updates = [*updates, *self.stage.read()]
        drawn = everyone
        if len(draws) > 1:  # rollout metrics need all: the groups trained on are selected by acc
            drawn = Groups.concatenate([gather_groups(each) for each in draws])
        num_sampled = int((drawn.rollouts.is_valid & ~drawn.rollouts.is_forced).sum())
        self.stage.num_decoded += num_sampled
        reading, called = self._updated
        ended, busy = reading.result()
        ended = max(ended, called)  # in a step without an update all programs ended before
        rolling, training = self._rolled_out - self._began[0], ended - self._rolled_out
        idle = 1 - (busy - self._began[1]) / (ended - self._began[0])
        self._began = ended, busy
        most = run.config.rl.max_grad_norm
        applied = [
            {**metrics, "grad_clipped": float(metrics["grad_norm"] > most)}
            for metrics in updates
            if metrics
        ]
        metrics = (
            group_metrics(run, drawn, everyone, len(draws))
            | {
                name: float(np.mean([of[name] for of in applied]))
                for name in (applied or [{}])[0]
                if not name.startswith(_ROUTES)
            }
            | self._mismatch(updates)
            | self._verifier_metrics(draws)
            | device_memory()
            | {
                "decoded_tokens": self.stage.num_decoded,
                "rollout_tokens_per_second": num_sampled / rolling,
                "train_tokens_per_second": int(everyone.num_trained.sum()) / training,
                "rollout_seconds": rolling,
                "train_seconds": training,
                "device_idle": idle,
            }
            | ages_of(run, groups)
            | fill_of(plans)
            | utilisation(run, everyone, training)
        )
        names = _SHOWN | ({"not_judged": "not judged"} if self._not_judged else {})
        self.stage.log(step, metrics, names)
        for warning in self._collapse.warnings(step, metrics):
            print_line(warning)
        shown = self._report.add(
            step, with_penalty(groups, run.objective.overlong), is_logged=self.stage.is_logged(step)
        )
        if step % math.ceil(run.config.rl.num_steps / _MOST_SHOWN) == 0:
            run.metrics.show("rl", step, shown)
        self._seconds = time.perf_counter() - began

    def _mismatch(self, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """How trainer and sampler differ, in the first update; later ones have other weights."""
        if not updates[0]:
            return {}
        routes = {name: value for name, value in updates[0].items() if name.startswith(_ROUTES)}
        return routes | sampler_mismatch(self.run, *self._first)

    def close(self) -> None:
        """Called after the last step."""
        self._trace(self.run.config.rl.num_steps)

    def _trace(self, step: int) -> None:
        """Starts or stops the trace of `config.profile_steps`; called before each step.

        Waits for the last step, which may still run. The trace is written to `workdir/profile`, for
        TensorBoard's profiler or Perfetto. A run resumed among these steps traces the rest.
        """
        is_traced = bool(steps := self.run.config.profile_steps) and steps[0] <= step <= steps[1]
        if is_traced == self._is_tracing:
            return
        self.clock.busy_seconds()
        if is_traced:
            jax.profiler.start_trace(self.run.workdir / "profile")
        else:
            jax.profiler.stop_trace()
        self._is_tracing = is_traced

    def _verifier_metrics(self, draws: Sequence[Groups]) -> dict[str, float]:
        """Means of the reward function's components, and the verifier's counts of the step."""
        verifier, metrics = self.verifier, {}
        if verifier.has_reward:
            judged = [groups.components for groups in draws]
            sums = diagnostics.component_sums(judged, self.run.config.rl.num_rollouts)
            metrics = diagnostics.component_means(distributed.gather_json(sums))
            metrics["not_judged"] = self._not_judged
        return metrics | {f"verifier/{name}": count for name, count in self._verdicts.items()}


def group_metrics(run: Run, drawn: Groups, trained: Groups, num_draws: int) -> dict[str, float]:
    """Metrics of the groups of all processes: all that were drawn, and those trained on."""
    metrics = diagnostics.rollout_metrics(drawn, run.config.rl.num_rollouts)
    metrics["skip_rate"] = diagnostics.skip_rate(trained)
    if run.objective.overlong is not None:
        metrics |= diagnostics.dapo_metrics(drawn, trained, num_draws, **run.objective.overlong)
    if trained.raw is not None:
        metrics |= diagnostics.subgroup_metrics(trained)
    return metrics


def sampler_mismatch(
    run: Run,
    sampler_logp: Float[np.ndarray, "B S"],
    trainer_logp: Float[jax.Array, "B S"],
    is_compared: Bool[np.ndarray, "B S"],
    branch: Int[np.ndarray, "B S"],
) -> dict[str, float]:
    """`diagnostics.mismatch_metrics` of the tokens of all processes; each passes its rows."""
    rows = sampler_logp, distributed.fetch(trainer_logp), is_compared, branch
    index = jax.process_index() * len(branch) + np.arange(len(branch))
    objective = run.objective
    return diagnostics.mismatch_metrics(
        *distributed.gather_rows(rows, index),
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        has_sequence_ratio=objective.has_sequence_ratio,
    )


def update_flops(
    run: Run, prompt_sizes: Int[np.ndarray, "N 2"], num_row_tokens: Int[np.ndarray, "N R"]
) -> float:
    """`flops.model_flops` of the run's updates over N prompts."""
    model = run.config.model
    return model_flops(
        run.policy.config,
        prompt_sizes,
        num_row_tokens,
        freeze_vision=model.freeze_vision,
        has_adapters=bool(model.lora_rank),
    )


def utilisation(run: Run, groups: Groups, seconds: float) -> dict[str, float]:
    """Model TFLOPs per second and device during the updates, and their share of the peak (MFU).

    Padding and rematerialisation do not count. The MFU is left out if the device's peak is unknown.
    `groups` are those trained on, of all processes.
    """
    rate = update_flops(run, groups.sizes, groups.num_trained) / seconds / run.mesh.size
    peak = PEAK_FLOPS.get(run.mesh.devices.flat[0].device_kind)
    return {"train_tflops_per_second": rate / 1e12} | ({"train_mfu": rate / peak} if peak else {})


def ages_of(run: Run, groups: Groups) -> dict[str, float]:
    """Shares of the sampled tokens by their age in steps, and that of the oldest one."""
    if not run.config.rl.carry_over:
        return {}
    is_sampled = groups.rollouts.is_valid & ~groups.rollouts.is_forced
    assert groups.rollouts.age is not None  # as the decode queue gives them
    counts = distributed.gather_json(np.bincount(groups.rollouts.age[is_sampled]).tolist())
    total = np.zeros(max(map(len, counts)), int)
    for each in counts:
        total[: len(each)] += each
    shares = {f"age/{age}": float(n / total.sum()) for age, n in enumerate(total)}
    return shares | {"oldest_age": len(total) - 1}


def with_penalty(groups: Groups, overlong: Mapping[str, int] | None) -> Groups:
    """The groups with DAPO's penalty for length among the components that the report shows.

    `overlong`: see `Objective`; None for objectives without the penalty.
    """
    if overlong is None:
        return groups
    penalty = np.asarray(overlong_penalty(groups.rollouts.is_valid.sum(-1), **overlong))
    components = np.empty(penalty.shape, object)
    for place in np.ndindex(*penalty.shape):
        own = {} if groups.components is None else groups.components[place]
        components[place] = own | ({"overlong penalty": penalty[place]} if penalty[place] else {})
    return dataclasses.replace(groups, components=components)


def open_report(run: Run) -> Report:
    """The run's report of rollouts."""
    care, policy = run.config.care, run.policy
    wording = Wording(
        token_bytes=policy.token_bytes,
        config=policy.config,
        think_tag=policy.think_tag,
        cue=reflection.cue_text(care.cue, care.reflect_mode, seed=run.config.seed),
    )
    return Report(run.workdir, **run.config.report, wording=wording)
