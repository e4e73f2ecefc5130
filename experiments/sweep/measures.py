"""Measures of a finished trial by name, and their mean and interval over seeds.

A measure is None if it is undefined for a trial: there is no gain without an evaluation before RL,
and the reference has no lead over itself. It raises `NotLogged` if the run did not log what it
needs, `NoReference` if the reference has no run of the seed. `<measure>:lead` is the difference to
the reference arm of the same seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.stats

from experiments.sweep import curves
from experiments.sweep.outcome import NoReference, Outcome
from experiments.sweep.signature import alpha_error, mean_alpha, r2, sample_of, sample_points, slope

_TAIL = 0.1  # share of the steps, at the end, over which a fluctuating metric is averaged

_Of = Callable[[Outcome, Outcome | None], float | None]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A column of the table."""

    label: str  # with the unit; {reference} is replaced by the reference arm's name
    of: _Of  # an outcome, and the reference arm's of the same seed -> value; raises `NotLogged`
    format: str = ".1f"


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% interval, Student's t over seeds; NaN for a single seed."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    quantile = scipy.stats.t.ppf(0.975, len(values) - 1)
    return mean, float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def lead_of(measure: Measure) -> Measure:
    """The difference of a measure to the reference arm with the same seed."""

    def difference(ours: Outcome, theirs: Outcome) -> float | None:
        one, other = (measure.of(each, theirs) for each in (ours, theirs))
        return None if one is None or other is None else one - other

    label = f"{measure.label}: lead over {{reference}}"
    return Measure(label, _over_reference(difference), measure.format)


def _over_reference(difference: Callable[[Outcome, Outcome], float | None]) -> _Of:
    """A comparison with the reference arm; None for the reference itself."""

    def of(ours: Outcome, theirs: Outcome | None) -> float | None:
        if theirs is None:
            raise NoReference("run the arm that leads are over with the same seeds")
        return None if theirs.arm == ours.arm else difference(ours, theirs)

    return of


def _percent(fraction: Callable[[Outcome], float | None]) -> _Of:
    def of(outcome: Outcome, _) -> float | None:
        value = fraction(outcome)
        return None if value is None else 100 * value

    return of


def _final(name: str) -> _Of:
    return _percent(lambda outcome: outcome.final.get(name))


def _points(metrics: Mapping[str, float], others: Mapping[str, float]) -> float | None:
    """Difference in percentage points of held-out accuracy, or of the benchmark mean."""
    name = curves.acc_name(metrics)
    return 100 * (metrics[name] - others[name]) if name in metrics and name in others else None


def _tail_mean(name: str, share: float = _TAIL) -> _Of:
    """Mean over the last tenth of the steps, where a metric is defined; None if nowhere."""

    def of(outcome: Outcome, _) -> float | None:
        values = outcome.series(name)[-max(1, round(share * len(outcome.steps))) :]
        return float(np.nanmean(values)) if np.isfinite(values).any() else None

    return of


def _rise(name: str) -> _Of:
    """In points from the first tenth of the steps to the last; None where it is never defined."""

    def rise(outcome: Outcome) -> float | None:
        values, count = outcome.series(name), max(1, round(_TAIL * len(outcome.steps)))
        parts = values[:count], values[-count:]
        if not all(np.isfinite(part).any() for part in parts):
            return None
        return float(np.nanmean(parts[1]) - np.nanmean(parts[0]))

    return _percent(rise)


def _over_reflections(name: str) -> _Of:
    """Mean in percent over all reflections of a run, equally weighted."""

    def mean(outcome: Outcome) -> float | None:
        values, rates = outcome.series(name), outcome.series("reflect_rate")
        is_logged = np.isfinite(values)
        if not is_logged.any():
            return None
        return np.average(values[is_logged], weights=rates[is_logged])

    return _percent(mean)


def _kl_per_trigger(ours: Outcome, theirs: Outcome) -> float | None:
    """KL of a run minus that of the reference arm, per 1000 rescued groups (ΔKL in fig:rescue).

    With β > 0 it is the KL to the reference policy, averaged over the end of the run. Otherwise it
    is the KL from the sampling policy, summed over the steps.
    """
    if not ours.steps or not ours.num_triggers[-1] > 0:
        return None
    if np.isfinite(ours.series("kl_ref")).all():
        one, other = (_tail_mean("kl_ref")(each, None) for each in (ours, theirs))
    else:
        one, other = (float(each.series("kl_old").sum()) for each in (ours, theirs))
    if one is None or other is None:  # the reference arm has β = 0
        return None
    return 1000 * (one - other) / float(ours.num_triggers[-1])


def _equal_tokens(accuracy: Callable[[Outcome, float], float]) -> _Of:
    """An accuracy in percent, at the decoded tokens that all arms of the seed have reached."""

    def at_shared(outcome: Outcome) -> float | None:
        tokens = outcome.shared_tokens
        return accuracy(outcome, tokens) if tokens > 0 else None  # None for NaN too

    return _percent(at_shared)


def _over_groups(name: str, statistic: Callable) -> _Of:
    return lambda run, _: statistic(*sample_points(run, name))


# fmt: off
MEASURES = {
    "acc": Measure("held-out acc, %", _final("acc")),
    "gain": Measure("gain over the start", lambda run, _: _points(run.final, run.start)),
    "start": Measure(
        "held-out acc before RL, %",
        _percent(lambda run: run.start.get(curves.acc_name(run.start)))),
    "lead": Measure("lead over {reference}",
                    _over_reference(lambda ours, theirs: _points(ours.final, theirs.final))),
    "response_tokens": Measure("response tokens", _tail_mean("response_tokens")),
    "think_tokens": Measure("think tokens", _tail_mean("think_tokens")),
    "grad_clipped": Measure(
        "share of updates with clipped gradients", _tail_mean("grad_clipped", share=1), ".2f"),
    "clip_rate": Measure(
        "clipped answer tokens of negatives, %",
        _percent(lambda run: _tail_mean("clip_rate_negative_answer", share=1)(run, None)), ".2f"),
    "variance_ratio": Measure(
        "Var(A⁻)/Var(A⁺)", _tail_mean("variance_ratio", share=1), ".3f"),
    "kl": Measure("KL to the reference, nats", _tail_mean("kl_ref"), ".3f"),
    "a_raw_anchor": Measure("A_raw of the anchor", _tail_mean("a_raw/anchor"), ".3f"),
    "decoded_tokens": Measure(
        "decoded tokens, M",
        lambda run, _: run.steps[-1]["decoded_tokens"] / 1e6 if run.steps else None, ".2f"),
    "held_out_area": Measure(
        "held-out acc, mean over the steps, %", _percent(curves.held_out_area)),
    # Accuracy at the decoded tokens that every arm of the seed has reached.
    "shared_tokens": Measure("shared tokens, M", lambda run, _: run.shared_tokens / 1e6, ".3f"),
    "held_out_equal_tokens": Measure(
        "held-out acc at equal tokens, %", _equal_tokens(curves.held_out_at_tokens)),
    "rollout_equal_tokens": Measure(
        "rollout acc at equal tokens, %", _equal_tokens(curves.rollouts_at_tokens)),
    # Reflection and rescue.
    "reflect_success": Measure(
        "reflections that succeed, %", _over_reflections("reflect_success")),
    "reflect_first_try": Measure(
        "first tries of the same groups, %", _over_reflections("reflect_first_try")),
    "reflect_rise": Measure("rise of the share of reflected groups", _rise("reflect_rate")),
    "triggers": Measure(
        "rescued groups",
        lambda run, _: float(run.num_triggers[-1]) if run.steps else None, ".0f"),
    "rescue_gain@50": Measure(
        "ΔAcc@50: rollout acc, 50 steps after an all-failed group, points",
        _percent(lambda run: curves.gain_after("all_wrong_rate", run, 50))),
    "reflect_gain@300": Measure(
        "rollout acc, 300 steps after a repair, points",
        _percent(lambda run: curves.gain_after("reflect_rate", run, 300))),
    "acc_at_50": dataclasses.replace(
        lead_of(Measure("", _percent(lambda run: curves.rollouts_at(run, 50)))),
        label="rollout acc at step 50: lead over {reference}"),
    "kl_per_trigger": Measure(
        "ΔKL per 1000 triggers, nats", _over_reference(_kl_per_trigger), ".4f"),
    # The √K' signature over all contrasted groups.
    "groups": Measure("groups", lambda run, _: float(len(sample_of(run).anchor)), ".0f"),
    "anchor_sample_slope": Measure("A⁺ on √K′: slope", _over_groups("anchor", slope), ".3f"),
    "anchor_sample_r2": Measure("R²", _over_groups("anchor", r2), ".4f"),
    "negative_sample_slope": Measure("A⁻ on 1/√K′: slope", _over_groups("negative", slope), ".3f"),
    "negative_sample_r2": Measure("R²", _over_groups("negative", r2), ".4f"),
    "alpha_text": Measure("α̂ (K′+1)", _over_groups("text", mean_alpha), ".3f"),
    "alpha_text_slope": Measure("A⁺/√K′ on α̂ (K′+1): slope", _over_groups("text", slope), ".3f"),
    "alpha_text_r2": Measure("R²", _over_groups("text", r2), ".4f"),
    "alpha_text_error": Measure("α̂ (K′+1): RMS error", _over_groups("text", alpha_error), ".4f"),
    "alpha_appendix": Measure("α̂ (K′)", _over_groups("appendix", mean_alpha), ".3f"),
    "alpha_appendix_slope": Measure(
        "A⁺/√K′ on α̂ (K′): slope", _over_groups("appendix", slope), ".3f"),
    "alpha_appendix_r2": Measure("R²", _over_groups("appendix", r2), ".4f"),
    "alpha_appendix_error": Measure(
        "α̂ (K′): RMS error", _over_groups("appendix", alpha_error), ".4f"),
}
# fmt: on

# These expand to a column per evaluated benchmark and their mean, or to the leads of these.
BENCHMARKS = "benchmarks"
BENCHMARK_COLUMNS = (BENCHMARKS, f"{BENCHMARKS}:lead")
NAMES = (*MEASURES, "<any of these>:lead")  # of measures, for messages


def measure_named(name: str) -> Measure:
    """The measure of a name, with or without `:lead`; KeyError if there is none."""
    base, colon, lead = name.partition(":")
    if colon and lead != "lead":
        raise KeyError(name)
    return lead_of(MEASURES[base]) if colon else MEASURES[base]


def columns_of(names: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, Measure]:
    """The measures by name, BENCHMARK_COLUMNS expanded."""
    found = dict.fromkeys(key for each in outcomes for key in each.final if key.endswith("/acc"))
    benchmarks = {key: Measure(f"{key[:-4]}, %", _final(key)) for key in found}
    leads = {f"{key}:lead": lead_of(measure) for key, measure in benchmarks.items()}
    columns = {}
    for name in names:
        if name in BENCHMARK_COLUMNS:
            columns |= benchmarks if name == BENCHMARKS else leads
        else:
            columns[name] = measure_named(name)
    return columns
