"""Measures of a finished trial, and their mean and interval over seeds.

A measure is None if it is undefined for a trial: there is no gain without an evaluation before RL,
and the reference has no lead over itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.stats

# Fluctuating metrics are averaged over this last fraction of the steps.
_TAIL = 0.1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Configuration and metrics of a finished trial.

    Attributes:
        arm, seed: of the trial.
        config: as JSON.
        start: metrics of the last evaluation before RL (of the cold start, if any); {} without.
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
        """A metric at every step; NaN if it was not logged."""
        return np.array([step.get(name, math.nan) for step in self.steps], float)

    @property
    def num_triggers(self) -> np.ndarray:
        """Cumulative number of rescued groups, including each step."""
        return np.cumsum(self.series("rescue_rate")) * self.config["rl"]["prompts_per_step"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A column of the table.

    Attributes:
        label: column header with the unit; {reference} is replaced by the reference arm's name.
        of: maps an outcome and the reference arm's outcome for the same seed to the value.
        format: format specification.
    """

    label: str
    of: Callable[[Outcome, Outcome | None], float | None]
    format: str = ".1f"


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% interval, Student's t over seeds; NaN for a single seed."""
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
    """(slope, intercept, r) of ordinary least squares; None under 3 points or for constant x."""
    if len(x) < 3 or np.ptp(x) < 1e-6:
        return None
    line = scipy.stats.linregress(x, y)
    return float(line.slope), float(line.intercept), float(line.rvalue)


def _percent(name: str):
    return lambda outcome, _: 100 * outcome.final[name] if name in outcome.final else None


def _difference(metrics: dict[str, float], others: dict[str, float]) -> float | None:
    """Difference in percentage points of held-out accuracy, or else of the benchmark mean."""
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
    """Mean in percent over all reflections of a run, equally weighted."""

    def measure(outcome: Outcome, _) -> float | None:
        values, rates = outcome.series(name), outcome.series("reflect_rate")
        is_logged = np.isfinite(values)
        if not is_logged.any():
            return None
        return float(100 * np.average(values[is_logged], weights=rates[is_logged]))

    return measure


def _acc_at(number: int):
    """Rollout accuracy minus the reference arm's, over the ten steps up to a step."""

    def measure(outcome: Outcome, reference: Outcome | None) -> float | None:
        if reference is None or reference.arm == outcome.arm or len(outcome.steps) < number:
            return None
        ours, theirs = (
            each.series("acc")[number - 10 : number].mean() for each in (outcome, reference)
        )
        return float(100 * (ours - theirs))

    return measure


def _kl_per_trigger(outcome: Outcome, reference: Outcome | None) -> float | None:
    """KL of a run minus that of the reference arm, per 1000 rescued groups.

    The KL is to the reference policy, averaged over the end of the run, if one is kept. Otherwise
    it is the KL to the sampling policy, summed over the steps.
    """
    if reference is None or reference.arm == outcome.arm or not outcome.num_triggers[-1] > 0:
        return None
    if np.isfinite(outcome.series("kl_ref")).all() and outcome.steps:
        ours, theirs = (_tail("kl_ref")(each, None) for each in (outcome, reference))
    else:
        ours, theirs = (float(each.series("kl_old").sum()) for each in (outcome, reference))
    if ours is None or theirs is None:  # the reference arm has β = 0
        return None
    return 1000 * (ours - theirs) / float(outcome.num_triggers[-1])


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

BENCHMARKS = "benchmarks"  # expands to one column per evaluated benchmark and their mean


def columns_of(names: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, Measure]:
    """The measures by name; BENCHMARKS expands to one per evaluated benchmark and their mean."""
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
