"""What a finished trial is measured by, and those measures over seeds.

A measure is None where it is not defined for a trial: without a cold start there is no gain, and
the reference has no lead over itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.stats

# Steps at the end of a run over which a fluctuating metric is averaged: a tenth of them.
_TAIL = 0.1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial left.

    Attributes:
        arm, seed: whose.
        config: as JSON.
        start: metrics of the evaluation of the cold start; {} where there was none.
        final: metrics of the last evaluation.
        steps: metrics of each RL step.
    """

    arm: str
    seed: int
    config: dict[str, Any]
    start: dict[str, float]
    final: dict[str, float]
    steps: list[dict[str, float]]

    def series(self, name: str) -> np.ndarray:
        """A metric at every step, NaN where it was not logged."""
        return np.array([step.get(name, math.nan) for step in self.steps], float)

    @property
    def num_triggers(self) -> np.ndarray:
        """Groups rescued up to and with each step."""
        return np.cumsum(self.series("rescue_rate")) * self.config["rl"]["prompts_per_step"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A column of the table.

    Attributes:
        label: its head, with the unit; {reference} stands for the name of that arm.
        of: an outcome and that of the reference arm under the same seed, to the number.
        format: how it is written.
    """

    label: str
    of: Callable[[Outcome, Outcome | None], float | None]
    format: str = ".1f"


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95% interval, Student's t over the seeds; NaN for a single one."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    quantile = scipy.stats.t.ppf(0.975, len(values) - 1)
    return mean, float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def signature_points(outcome: Outcome, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Points (x, y) of the √K' signature, each the mean over the groups of one step.

    Args:
        outcome: of a run of CARE.
        name: "anchor", (√K', A_raw of the anchor); "negative", (1/√K', mean A_raw of the
            negatives); "alpha", (α̂, A_raw/√K' of the anchor).
    """
    if name == "alpha":
        x, y = outcome.series("signature/alpha"), outcome.series("signature/ratio")
    else:
        counts = range(1, outcome.config["care"]["K"] + 1)
        ys = [outcome.series(f"signature/{name}_{count}") for count in counts]
        power = 0.5 if name == "anchor" else -0.5
        x = np.repeat([count**power for count in counts], [len(each) for each in ys])
        y = np.concatenate(ys)
    is_logged = np.isfinite(x) & np.isfinite(y)
    return x[is_logged], y[is_logged]


def fit(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float] | None:
    """(slope, intercept, r) of ordinary least squares; None where x does not vary."""
    if len(x) < 3 or np.ptp(x) < 1e-6:
        return None
    line = scipy.stats.linregress(x, y)
    return float(line.slope), float(line.intercept), float(line.rvalue)


def _percent(name: str):
    return lambda outcome, _: 100 * outcome.final[name] if name in outcome.final else None


def _difference(metrics: dict[str, float], others: dict[str, float]) -> float | None:
    """Points between two evaluations: of held-out accuracy, or else of the benchmarks' mean."""
    name = "acc" if "acc" in metrics else "mean/acc"
    return 100 * (metrics[name] - others[name]) if name in metrics and name in others else None


def _gain(outcome: Outcome, _) -> float | None:
    return _difference(outcome.final, outcome.start)


def _lead(outcome: Outcome, reference: Outcome | None) -> float | None:
    if reference is None or reference.arm == outcome.arm:
        return None
    return _difference(outcome.final, reference.final)


def _tail(name: str):
    def measure(outcome: Outcome, _) -> float | None:
        values = outcome.series(name)
        values = values[-max(1, round(_TAIL * len(values))) :]
        return float(np.nanmean(values)) if np.isfinite(values).any() else None

    return measure


def _over_triggers(name: str):
    """Percent over all reflections of a run, each counted once."""

    def measure(outcome: Outcome, _) -> float | None:
        values, rates = outcome.series(name), outcome.series("reflect_rate")
        is_logged = np.isfinite(values)
        if not is_logged.any():
            return None
        return float(100 * np.average(values[is_logged], weights=rates[is_logged]))

    return measure


def _acc_at(number: int):
    """Accuracy of the rollouts at a step above the reference's; mean of the ten steps up to it."""

    def measure(outcome: Outcome, reference: Outcome | None) -> float | None:
        if reference is None or reference.arm == outcome.arm or len(outcome.steps) < number:
            return None
        ours, theirs = (
            each.series("acc")[number - 10 : number].mean() for each in (outcome, reference)
        )
        return float(100 * (ours - theirs))

    return measure


def _kl_per_trigger(outcome: Outcome, reference: Outcome | None) -> float | None:
    """How much further than the reference a run moved, for each thousand rescued groups.

    Measured by the KL to the reference policy at the end, where one is kept; otherwise by the sum
    over the steps of the KL to the policy that sampled.
    """
    if reference is None or reference.arm == outcome.arm or not outcome.num_triggers[-1] > 0:
        return None
    if np.isfinite(outcome.series("kl_ref")).all() and outcome.steps:
        moved = [_tail("kl_ref")(each, None) for each in (outcome, reference)]
    else:
        moved = [float(each.series("kl_old").sum()) for each in (outcome, reference)]
    return 1000 * (moved[0] - moved[1]) / float(outcome.num_triggers[-1])


def _fit_of(name: str, which: int):
    def measure(outcome: Outcome, _) -> float | None:
        line = fit(*signature_points(outcome, name))
        if line is None:
            return None
        return line[0] if which == 0 else line[2] ** which

    return measure


MEASURES = {
    "acc": Measure("held-out acc, %", _percent("acc")),
    "fmt": Measure("format, %", _percent("fmt")),
    "gain": Measure("gain over the start", _gain),
    "lead": Measure("lead over {reference}", _lead),
    "response_tokens": Measure("response tokens", _tail("response_tokens")),
    "decoded_tokens": Measure(
        "decoded tokens, M",
        lambda outcome, _: outcome.steps[-1]["decoded_tokens"] / 1e6 if outcome.steps else None,
        ".2f",
    ),
    "reflect_success": Measure(
        "reflections that succeed, %", _over_triggers("reflect_success"), ".1f"
    ),
    "reflect_first_try": Measure(
        "first tries of the same groups, %", _over_triggers("reflect_first_try"), ".1f"
    ),
    "triggers": Measure(
        "rescued groups",
        lambda outcome, _: float(outcome.num_triggers[-1]) if outcome.steps else None,
        ".0f",
    ),
    "acc_at_50": Measure("ΔAcc@50, points", _acc_at(50)),
    "kl_per_trigger": Measure("ΔKL per 1000 triggers, nats", _kl_per_trigger, ".4f"),
    "anchor_slope": Measure("A⁺ on √K′: slope", _fit_of("anchor", 0), ".3f"),
    "anchor_r2": Measure("R²", _fit_of("anchor", 2), ".4f"),
    "negative_slope": Measure("A⁻ on 1/√K′: slope", _fit_of("negative", 0), ".3f"),
    "negative_r2": Measure("R²", _fit_of("negative", 2), ".4f"),
    "alpha": Measure("α̂", _tail("signature/alpha"), ".3f"),
    "alpha_slope": Measure("A⁺/√K′ on α̂: slope", _fit_of("alpha", 0), ".3f"),
    "alpha_r": Measure("r", _fit_of("alpha", 1), ".4f"),
}

BENCHMARKS = "benchmarks"  # stands for as many columns as there are


def columns_of(names: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, Measure]:
    """The measures by name; BENCHMARKS become one for each that was asked, and their mean."""
    columns = {}
    for name in names:
        if name == BENCHMARKS:
            found = dict.fromkeys(
                key for outcome in outcomes for key in outcome.final if key.endswith("/acc")
            )
            columns |= {key: Measure(f"{key[:-4]}, %", _percent(key)) for key in found}
        else:
            columns[name] = MEASURES[name]
    return columns
