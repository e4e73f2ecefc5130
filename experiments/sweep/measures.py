"""Measures of a finished trial by name, and their mean and interval over seeds.

A measure is None if it is undefined for a trial: there is no gain without an evaluation before RL,
and the reference has no lead over itself. It raises `NotLogged` where the run lacks the rows that
it needs. A name of MEASURES_AT is followed by a number, `held_out@50`. Behind every name `:lead`
stands for the difference to the reference arm under the same seed, `held_out@50:lead`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.stats

from experiments.sweep import curves, signature
from experiments.sweep.curves import acc_name
from experiments.sweep.outcome import Outcome

# Fluctuating metrics are averaged over this last fraction of the steps.
_TAIL = 0.1

_Of = Callable[[Outcome, Outcome | None], float | None]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A column of the table.

    Attributes:
        label: column header with the unit; {reference} is replaced by the reference arm's name.
        of: maps an outcome and the reference arm's outcome for the same seed to the value. It
            raises `NotLogged` where the run lacks rows.
        format: format specification.
    """

    label: str
    of: _Of
    format: str = ".1f"


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% interval, Student's t over seeds; NaN for a single seed."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    quantile = scipy.stats.t.ppf(0.975, len(values) - 1)
    return mean, float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def _percent(name: str) -> _Of:
    return lambda outcome, _: 100 * outcome.final[name] if name in outcome.final else None


def _difference(metrics: dict[str, float], others: dict[str, float]) -> float | None:
    """Difference in percentage points of held-out accuracy, or else of the benchmark mean."""
    name = acc_name(metrics)
    return 100 * (metrics[name] - others[name]) if name in metrics and name in others else None


def _gain(outcome: Outcome, _) -> float | None:
    return _difference(outcome.final, outcome.start)


def _lead(outcome: Outcome, reference: Outcome | None) -> float | None:
    if reference is None or reference.arm == outcome.arm:
        return None
    return _difference(outcome.final, reference.final)


def _defined_mean(values: np.ndarray) -> float | None:
    """Mean over the steps at which a metric is defined; None without any."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else None


def _num_tail(outcome: Outcome) -> int:
    return max(1, round(_TAIL * len(outcome.steps)))


def _tail(name: str) -> _Of:
    return lambda outcome, _: _defined_mean(outcome.series(name)[-_num_tail(outcome) :])


def _mean(name: str) -> _Of:
    return lambda outcome, _: _defined_mean(outcome.series(name))


def _change(name: str, scale: float = 1.0) -> _Of:
    """Mean over the last tenth of the steps minus that over the first tenth."""

    def measure(outcome: Outcome, _) -> float | None:
        values, number = outcome.series(name), _num_tail(outcome)
        first, last = _defined_mean(values[:number]), _defined_mean(values[-number:])
        return None if first is None or last is None else scale * (last - first)

    return measure


def _kl_ref(outcome: Outcome, _) -> float | None:
    return _defined_mean(outcome.kl_ref()[-_num_tail(outcome) :])


def _over_triggers(name: str) -> _Of:
    """Mean in percent over all reflections of a run, equally weighted."""

    def measure(outcome: Outcome, _) -> float | None:
        values, rates = outcome.series(name), outcome.series("reflect_rate")
        is_logged = np.isfinite(values)
        if not is_logged.any():
            return None
        return float(100 * np.average(values[is_logged], weights=rates[is_logged]))

    return measure


def _kl_per_trigger(outcome: Outcome, reference: Outcome | None) -> float | None:
    """KL of a run minus that of the reference arm, per 1000 rescued groups.

    The KL is to the reference policy, averaged over the end of the run, if one is kept. Otherwise
    it is the KL to the sampling policy, summed over the steps.
    """
    if reference is None or reference.arm == outcome.arm or not outcome.steps:
        return None
    if not outcome.num_triggers[-1] > 0:
        return None
    if np.isfinite(outcome.series("kl_ref")).all():
        ours, theirs = (_tail("kl_ref")(each, None) for each in (outcome, reference))
    else:
        ours, theirs = (float(each.series("kl_old").sum()) for each in (outcome, reference))
    if ours is None or theirs is None:  # the reference arm has β = 0
        return None
    return 1000 * (ours - theirs) / float(outcome.num_triggers[-1])


def _of_curve(function: Callable[[Outcome], float | None]) -> _Of:
    """A fraction of a run alone, in percent."""

    def measure(outcome: Outcome, _) -> float | None:
        value = function(outcome)
        return None if value is None else 100 * value

    return measure


def _equal_tokens(function: Callable[[Outcome, float], float]) -> _Of:
    """An accuracy in percent at the decoded tokens that all arms of the seed have reached."""

    def measure(outcome: Outcome, _) -> float | None:
        tokens = outcome.shared_tokens
        return 100 * function(outcome, tokens) if tokens > 0 else None  # NaN: not known

    return measure


def _fit_of(points: Callable, name: str, which: str) -> _Of:
    def measure(outcome: Outcome, _) -> float | None:
        line = signature.fit(*points(outcome, name))
        if line is None:
            return None
        slope, _intercept, r = line
        return {"slope": slope, "r": r, "r2": r**2}[which]

    return measure


def _step_fit(name: str, which: str) -> _Of:
    return _fit_of(signature.step_points, name, which)


def _sample_fit(name: str, which: str) -> _Of:
    return _fit_of(signature.sample_points, name, which)


def _alpha(formula: str) -> _Of:
    """Mean of α̂ over the contrasted groups."""
    return lambda outcome, _: _mean_or_none(signature.sample_points(outcome, formula)[0])


def _alpha_error(formula: str) -> _Of:
    """Root mean square of A_raw/√K' - α̂ over the contrasted groups."""

    def measure(outcome: Outcome, _) -> float | None:
        predicted, ratio = signature.sample_points(outcome, formula)
        square = _mean_or_none((ratio - predicted) ** 2)
        return None if square is None else math.sqrt(square)

    return measure


def _of_bucket(name: str, count: int) -> _Of:
    """Mean over the groups with K' = count of the anchor's A_raw, or the negatives'."""

    def measure(outcome: Outcome, _) -> float | None:
        sample = signature.sample_of(outcome)
        return _mean_or_none(getattr(sample, name)[sample.num_negatives == count])

    return measure


def _mean_or_none(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def lead_of(measure: Measure) -> Measure:
    """The difference of a measure to the reference arm's under the same seed."""

    def of(outcome: Outcome, reference: Outcome | None) -> float | None:
        if reference is None or reference.arm == outcome.arm:
            return None
        ours, theirs = (measure.of(each, reference) for each in (outcome, reference))
        return None if ours is None or theirs is None else ours - theirs

    return Measure(f"{measure.label}: lead over {{reference}}", of, measure.format)


# fmt: off
MEASURES = {
    "acc": Measure("held-out acc, %", _percent("acc")),
    "fmt": Measure("format, %", _percent("fmt")),
    "gain": Measure("gain over the start", _gain),
    "lead": Measure("lead over {reference}", _lead),
    "reward": Measure("reward, last tenth", _tail("reward"), ".3f"),
    "response_tokens": Measure("response tokens", _tail("response_tokens")),
    "think_tokens": Measure("think tokens", _tail("think_tokens")),
    "decoded_tokens": Measure(
        "decoded tokens, M",
        lambda outcome, _: outcome.steps[-1]["decoded_tokens"] / 1e6 if outcome.steps else None,
        ".2f",
    ),
    # Accuracy over the run.
    "held_out_area": Measure(
        "held-out acc, mean over the steps, %",
        _of_curve(lambda outcome: curves.area(*curves.held_out(outcome))),
    ),
    "held_out_best": Measure(
        "best held-out acc, %",
        _of_curve(lambda outcome: float(curves.held_out(outcome)[1].max())),
    ),
    "rollout_area": Measure(
        "rollout acc, mean over the steps, %",
        _of_curve(lambda outcome: curves.area(*curves.rollouts(outcome))),
    ),
    # Accuracy at the decoded tokens that every arm of the seed has reached.
    "shared_tokens": Measure(
        "shared tokens, M", lambda outcome, _: outcome.shared_tokens / 1e6, ".3f"
    ),
    "held_out_equal_tokens": Measure(
        "held-out acc at equal tokens, %", _equal_tokens(curves.held_out_at_tokens)
    ),
    "rollout_equal_tokens": Measure(
        "rollout acc at equal tokens, %", _equal_tokens(curves.rollouts_at_tokens)
    ),
    # KL, clipping, advantages.
    "kl_old": Measure("KL to π_old, mean over the steps, nats", _mean("kl_old"), ".5f"),
    "kl_ref": Measure("KL to π_ref, last tenth, nats", _kl_ref, ".4f"),
    "clip_rate_change": Measure(
        "Δ clip rate, last tenth - first, % of tokens", _change("clip_rate", 100), ".2f"
    ),
    "clip_rate_negative_answer_change": Measure(
        "Δ clip rate of negatives' answers, last tenth - first, % of tokens",
        _change("clip_rate_negative_answer", 100),
        ".2f",
    ),
    "variance_ratio": Measure("Var(A⁻)/Var(A⁺), last tenth", _tail("variance_ratio"), ".3f"),
    "variance_ratio_change": Measure(
        "Δ Var(A⁻)/Var(A⁺), last tenth - first", _change("variance_ratio"), ".3f"
    ),
    "rationale_share": Measure(
        "positive credit outside the answer, last tenth, %",
        _of_curve(lambda outcome: _tail("rationale_share")(outcome, None)),
    ),
    "a_raw_anchor": Measure("A_raw of anchors, last tenth", _tail("a_raw/anchor"), ".3f"),
    "a_raw_negative": Measure("A_raw of negatives, last tenth", _tail("a_raw/negative"), ".3f"),
    # Reflection and rescue.
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
    "kl_per_trigger": Measure("ΔKL per 1000 triggers, nats", _kl_per_trigger, ".4f"),
    # The √K' signature over the means of the steps.
    "anchor_slope": Measure("A⁺ on √K′: slope", _step_fit("anchor", "slope"), ".3f"),
    "anchor_r2": Measure("R²", _step_fit("anchor", "r2"), ".4f"),
    "negative_slope": Measure("A⁻ on 1/√K′: slope", _step_fit("negative", "slope"), ".3f"),
    "negative_r2": Measure("R²", _step_fit("negative", "r2"), ".4f"),
    "alpha": Measure("α̂", _tail("signature/alpha"), ".3f"),
    "alpha_slope": Measure("A⁺/√K′ on α̂: slope", _step_fit("alpha", "slope"), ".3f"),
    "alpha_r": Measure("r", _step_fit("alpha", "r"), ".4f"),
    # The same over all contrasted groups.
    "groups": Measure(
        "groups", lambda outcome, _: float(len(signature.sample_of(outcome).anchor)), ".0f"
    ),
    "anchor_sample_slope": Measure("A⁺ on √K′: slope", _sample_fit("anchor", "slope"), ".3f"),
    "anchor_sample_r2": Measure("R²", _sample_fit("anchor", "r2"), ".4f"),
    "negative_sample_slope": Measure("A⁻ on 1/√K′: slope", _sample_fit("negative", "slope"), ".3f"),
    "negative_sample_r2": Measure("R²", _sample_fit("negative", "r2"), ".4f"),
    "alpha_text": Measure("α̂ (K′+1)", _alpha("text"), ".3f"),
    "alpha_text_slope": Measure("A⁺/√K′ on α̂ (K′+1): slope", _sample_fit("text", "slope"), ".3f"),
    "alpha_text_r2": Measure("R²", _sample_fit("text", "r2"), ".4f"),
    "alpha_text_error": Measure("α̂ (K′+1): RMS error", _alpha_error("text"), ".4f"),
    "alpha_appendix": Measure("α̂ (K′)", _alpha("appendix"), ".3f"),
    "alpha_appendix_slope": Measure(
        "A⁺/√K′ on α̂ (K′): slope", _sample_fit("appendix", "slope"), ".3f"
    ),
    "alpha_appendix_r2": Measure("R²", _sample_fit("appendix", "r2"), ".4f"),
    "alpha_appendix_error": Measure("α̂ (K′): RMS error", _alpha_error("appendix"), ".4f"),
}

# Measures with a number, `name@number`.
MEASURES_AT: dict[str, Callable[[int], Measure]] = {
    "held_out": lambda step: Measure(
        f"held-out acc at step {step}, %",
        _of_curve(lambda outcome: curves.held_out_at(outcome, step)),
    ),
    "rollout_acc": lambda step: Measure(
        f"rollout acc at step {step}, %",
        _of_curve(lambda outcome: curves.rollouts_at(outcome, step)),
    ),
    "rescue_gain": lambda steps: Measure(
        f"rollout acc, {steps} steps after a rescue, points",
        _of_curve(
            lambda outcome: curves.gain_after_rescue(outcome, steps, curves.rollouts(outcome))
        ),
    ),
    "rescue_gain_held_out": lambda steps: Measure(
        f"held-out acc, {steps} steps after a rescue, points",
        _of_curve(
            lambda outcome: curves.gain_after_rescue(outcome, steps, curves.held_out(outcome))
        ),
    ),
    "a_raw_anchor_k": lambda count: Measure(
        f"A⁺ at K′ = {count}", _of_bucket("anchor", count), ".3f"
    ),
    "a_raw_negative_k": lambda count: Measure(
        f"A⁻ at K′ = {count}", _of_bucket("negative", count), ".3f"
    ),
}
# fmt: on
MEASURES["acc_at_50"] = dataclasses.replace(
    lead_of(MEASURES_AT["rollout_acc"](50)), label="ΔAcc@50, points"
)

# They expand to one column per evaluated benchmark and their mean, or the leads of these.
BENCHMARKS = "benchmarks"
BENCHMARK_COLUMNS = (BENCHMARKS, f"{BENCHMARKS}:lead")


def measure_named(name: str) -> Measure:
    """The measure of a name, see the module's docstring.

    Raises:
        KeyError: there is none.
    """
    base, colon, lead = name.partition(":")
    if colon:
        if lead != "lead":
            raise KeyError(name)
        return lead_of(measure_named(base))
    base, at, number = base.partition("@")
    if not at:
        return MEASURES[base]
    if not number.isdecimal() or int(number) < 1:
        raise KeyError(name)
    return MEASURES_AT[base](int(number))


def names_of_measures() -> list[str]:
    """Every name, those of MEASURES_AT with their form."""
    return [*MEASURES, *(f"{name}@<number>" for name in MEASURES_AT), "<any of these>:lead"]


def columns_of(names: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, Measure]:
    """The measures by name, those of BENCHMARK_COLUMNS expanded."""
    columns = {}
    for name in names:
        if name in BENCHMARK_COLUMNS:
            found = dict.fromkeys(
                key for outcome in outcomes for key in outcome.final if key.endswith("/acc")
            )
            of = {key: Measure(f"{key[:-4]}, %", _percent(key)) for key in found}
            if name != BENCHMARKS:
                of = {f"{key}:lead": lead_of(measure) for key, measure in of.items()}
            columns |= of
        else:
            columns[name] = measure_named(name)
    return columns
