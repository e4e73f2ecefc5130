"""An experiment's figure, as PNG and as CSV of the plotted points.

A panel is a function that plots the arms into axes and returns the plotted points. An arm that
lacks the rows for it is named in the panel, with the key to set.
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np

from experiments.sweep import curves, signature
from experiments.sweep.measures import mean_interval, measure_named, names_of_measures
from experiments.sweep.outcome import NotLogged, Outcome
from experiments.sweep.signature import FORMULAS, fit
from experiments.sweep.tables import value_of

Arms = Mapping[str, Sequence[Outcome]]
Axes = matplotlib.axes.Axes
Point = dict[str, Any]  # arm, seed or None for the mean, x, y, low, high
Panel = Callable[[Axes, Arms, str], list[Point]]  # the third is the reference arm's name

_BINS = 25  # per curve, over the length of the run
# The Okabe-Ito palette, which colour-blind readers can distinguish.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def write_figure(
    folder: pathlib.Path, arms: Arms, reference: str, panels: Sequence[str], title: str
) -> None:
    """Writes `figure.png` and `figure.csv`.

    Args:
        folder: for both.
        arms: outcomes by arm.
        reference: the arm that is subtracted in differences.
        panels: names of PANELS or of measures, from left to right.
        title: above them.
    """
    figure = matplotlib.figure.Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    points = []
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        drawn = panel_named(name)(axes, arms, reference)
        points += [{"panel": name} | point for point in drawn]
    figure.savefig(folder / "figure.png", dpi=150)
    with (folder / "figure.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["panel", "arm", "seed", "x", "y", "low", "high"])
        writer.writeheader()
        writer.writerows(points)


def _colored(arms: Arms) -> Iterator[tuple[str, Sequence[Outcome], str]]:
    for index, (arm, outcomes) in enumerate(arms.items()):
        yield arm, outcomes, _COLORS[index % len(_COLORS)]


def _tell(axes: Axes, lacking: Mapping[str, NotLogged]) -> None:
    """Says in the panel what arms lack."""
    lines = [f"{arm} not logged: {message}" for arm, message in lacking.items()]
    axes.text(
        0.02,
        0.02,
        "\n".join(lines),
        transform=axes.transAxes,
        fontsize=6,
        color="#AA0000",
        wrap=True,
    )


def _measured(name: str) -> Panel:
    """A measure of every arm: each seed as a dot, the mean with its 95% interval."""
    measure = measure_named(name)

    def draw(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        points, lacking = [], {}
        references = {outcome.seed: outcome for outcome in arms.get(reference, ())}
        for row, (arm, outcomes, color) in enumerate(_colored(arms)):
            of_seed = {outcome.seed: value_of(measure, outcome, references) for outcome in outcomes}
            for each in of_seed.values():
                if isinstance(each, NotLogged):
                    lacking[arm] = each
            of_seed = {seed: each for seed, each in of_seed.items() if isinstance(each, float)}
            if not of_seed:
                continue
            values = list(of_seed.values())
            mean, half = mean_interval(values)
            axes.plot(values, [row] * len(values), "o", color=color, alpha=0.35, markersize=4)
            axes.errorbar([mean], [row], xerr=[half], fmt="D", color=color, capsize=3, markersize=5)
            points += [_point(arm, seed, value, row) for seed, value in of_seed.items()]
            points.append(_point(arm, None, mean, row, mean - half, mean + half))
        axes.set_yticks(range(len(arms)), arms)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_xlabel(measure.label.format(reference=reference))
        _tell(axes, lacking)
        return points

    return draw


def _curve(
    curve_of: Callable[[Outcome], curves.Curve], x_label: str, y_label: str, *, num_bins: int
) -> Panel:
    """A curve of every arm, mean and 95% interval over the seeds; the points have each seed's too.

    Args:
        curve_of: (x, y) of a run; y may be NaN where it is undefined.
        x_label, y_label: of the axes.
        num_bins: of neighbouring points of a run, each plotted as its mean; 0: every point.
    """

    def draw(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        points, lacking = [], {}
        for arm, outcomes, color in _colored(arms):
            found: dict[int, curves.Curve] = {}
            for outcome in outcomes:
                try:
                    found[outcome.seed] = _binned(*curve_of(outcome), num_bins)
                except NotLogged as message:
                    lacking[arm] = message
            shortest = min((len(x) for x, _ in found.values()), default=0)
            rows = [
                (
                    np.mean([x[i] for x, _ in found.values()]),
                    *_interval(y[i] for _, y in found.values()),
                )
                for i in range(shortest)
            ]
            rows = [row for row in rows if math.isfinite(row[1])]
            if not rows:
                continue
            x, mean, half = np.array(rows).T
            axes.plot(x, mean, color=color, label=arm, linewidth=1.4)
            axes.fill_between(x, mean - half, mean + half, color=color, alpha=0.12, linewidth=0)
            points += [
                _point(arm, seed, *values)
                for seed, curve in found.items()
                for values in zip(*curve, strict=True)
                if math.isfinite(values[1])
            ]
            points += _means(arm, x, mean, half)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if points:
            axes.legend(fontsize=7, frameon=False)
        _tell(axes, lacking)
        return points

    return draw


def _binned(x: np.ndarray, y: np.ndarray, num_bins: int) -> curves.Curve:
    """Means of consecutive points; NaN for a bin in which y is nowhere defined."""
    if not num_bins:
        return x, y
    bins = np.array_split(np.arange(len(x)), min(num_bins, len(x)))
    defined = [each[np.isfinite(y[each])] for each in bins]
    return (
        np.array([x[each].mean() for each in bins]),
        np.array([y[each].mean() if len(each) else math.nan for each in defined]),
    )


def _interval(values: Iterable[float]) -> tuple[float, float]:
    """Mean and half-width of the 95% interval over the finite values; NaN where undefined."""
    values = [value for value in values if math.isfinite(value)]
    return mean_interval(values) if values else (math.nan, math.nan)


def _by_step(metric: str, y_label: str, *, scale: float = 1.0) -> Panel:
    """A metric against the steps done before its rollouts."""

    def curve_of(outcome: Outcome) -> curves.Curve:
        steps, _ = curves.rollouts(outcome)  # raises NotLogged for a run without RL
        return steps, scale * (outcome.kl_ref() if metric == "kl_ref" else outcome.series(metric))

    return _curve(curve_of, "steps", y_label, num_bins=_BINS)


def _rollouts_by_tokens(outcome: Outcome) -> curves.Curve:
    _, acc = curves.rollouts(outcome)
    return outcome.series("decoded_tokens") / 1e6, 100 * acc


def _held_out_by_step(outcome: Outcome) -> curves.Curve:
    x, y = curves.held_out(outcome)
    return x, 100 * y


def _held_out_by_tokens(outcome: Outcome) -> curves.Curve:
    x, y = curves.held_out(outcome)
    return curves.tokens_after(outcome, x) / 1e6, 100 * y


def _signature(name: str, x_label: str, y_label: str) -> Panel:
    """Step means of the √K' signature, with one least-squares line per arm."""

    def draw(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        points = []
        for arm, outcomes, color in _colored(arms):
            pairs = [signature.step_points(outcome, name) for outcome in outcomes]
            x, y = (np.concatenate(each) for each in zip(*pairs, strict=True))
            line = fit(x, y)
            label = arm
            if line is not None:
                slope, intercept, r = line
                ends = np.array([x.min(), x.max()])
                axes.plot(ends, intercept + slope * ends, color=color, linewidth=1)
                label = f"{arm}: {slope:.3f}x {intercept:+.3f}, r {r:.4f}"
            axes.plot(x, y, ".", color=color, alpha=0.3, markersize=3, label=label)
            points += [
                _point(arm, outcome.seed, *values)
                for outcome, pair in zip(outcomes, pairs, strict=True)
                for values in zip(*pair, strict=True)
            ]
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.locator_params(axis="x", nbins=5)  # the labels of α̂ are long
        axes.legend(fontsize=7, frameon=False)
        return points

    return draw


def _buckets(name: str, sign: int, x_label: str, y_label: str) -> Panel:
    """A_raw by K' over all contrasted groups of all seeds, with the law for binary rewards.

    The interval is Student's t over the groups, which it takes as independent.

    Args:
        name: "anchor" or "negative".
        sign: ±1; the law is sign · √K'^sign.
        x_label, y_label: of the axes.
    """

    def draw(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        points, lacking = [], {}
        for arm, outcomes, color in _colored(arms):
            try:
                samples = [signature.sample_of(outcome) for outcome in outcomes]
            except NotLogged as message:
                lacking[arm] = message
                continue
            counts = np.concatenate([sample.num_negatives for sample in samples])
            values = np.concatenate([getattr(sample, name) for sample in samples])
            x, mean, half = _by_count(counts, values)
            x = x ** (sign / 2)
            axes.errorbar(
                x, mean, yerr=half, fmt="o-", color=color, capsize=3, markersize=3, label=arm
            )
            points += _means(arm, x, mean, half)
        if points:
            ends = np.array([min(each["x"] for each in points), max(each["x"] for each in points)])
            axes.plot(ends, sign * ends, "--", color="#666666", linewidth=1, label="α = 1")
            axes.legend(fontsize=7, frameon=False)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _tell(axes, lacking)
        return points

    return draw


def _alpha_buckets(axes: Axes, arms: Arms, reference: str) -> list[Point]:
    """A_raw/√K' of anchors by K', measured with its interval, and both formulas' means.

    The arm of a point is followed by what it is: measured, text or appendix.
    """
    points, lacking = [], {}
    for arm, outcomes, color in _colored(arms):
        try:
            samples = [signature.sample_of(outcome) for outcome in outcomes]
        except NotLogged as message:
            lacking[arm] = message
            continue
        counts = np.concatenate([sample.num_negatives for sample in samples])
        for what, marker in (("ratio", "o"), *zip(FORMULAS, ("_", "x"), strict=True)):
            values = np.concatenate([getattr(sample, what) for sample in samples])
            name = f"{arm} {'measured' if what == 'ratio' else what}"
            x, mean, half = _by_count(counts, values)
            axes.errorbar(x, mean, yerr=half, fmt=marker, color=color, capsize=3, label=name)
            points += _means(name, x.astype(int), mean, half)
    axes.set_xlabel("K′")
    axes.set_ylabel("A_raw of the anchor / √K′")
    if points:
        axes.legend(fontsize=5, frameon=False)
    _tell(axes, lacking)
    return points


def _by_count(counts: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """(K', mean, half-width of its interval) of the groups' values, for each K'."""
    rows = [(count, *_interval(values[counts == count])) for count in np.unique(counts)]
    return tuple(np.array(rows, float).reshape(-1, 3).T)


def _means(arm: str, x: np.ndarray, mean: np.ndarray, half: np.ndarray) -> list[Point]:
    return [
        _point(arm, None, *values) for values in zip(x, mean, mean - half, mean + half, strict=True)
    ]


def _point(arm, seed, x, y, low=math.nan, high=math.nan) -> Point:
    """A plotted point; its bounds are None, an empty cell, if it has no interval."""
    low, high = (None if math.isnan(bound) else bound for bound in (low, high))
    return {"arm": arm, "seed": seed, "x": x, "y": y, "low": low, "high": high}


PANELS: dict[str, Panel] = {
    "accuracy": _measured("acc"),
    "by_tokens": _curve(
        _rollouts_by_tokens, "decoded tokens, M", "acc of rollouts, %", num_bins=_BINS
    ),
    "held_out_by_tokens": _curve(
        _held_out_by_tokens, "decoded tokens, M", "held-out acc, %", num_bins=0
    ),
    "held_out_by_step": _curve(_held_out_by_step, "steps", "held-out acc, %", num_bins=0),
    "rollout_acc_by_step": _by_step("acc", "acc of rollouts, %", scale=100),
    "reward_by_step": _by_step("reward", "reward of rollouts"),
    "kl_old_by_step": _by_step("kl_old", "KL to π_old, nats"),
    "kl_ref_by_step": _by_step("kl_ref", "KL to π_ref, nats"),
    "clip_rate_by_step": _by_step("clip_rate", "clip rate, % of tokens", scale=100),
    "variance_ratio_by_step": _by_step("variance_ratio", "Var(A⁻)/Var(A⁺)"),
    "think_tokens_by_step": _by_step("think_tokens", "think tokens"),
    "a_raw_anchor_by_step": _by_step("a_raw/anchor", "A_raw of anchors"),
    "a_raw_negative_by_step": _by_step("a_raw/negative", "A_raw of negatives"),
    "anchor": _signature("anchor", "√K′", "A_raw of the anchor"),
    "negative": _signature("negative", "1/√K′", "mean A_raw of the negatives"),
    "alpha": _signature("alpha", "α̂", "A_raw of the anchor / √K′"),
    "anchor_buckets": _buckets("anchor", 1, "√K′", "A_raw of the anchor"),
    "negative_buckets": _buckets("negative", -1, "1/√K′", "mean A_raw of the negatives"),
    "alpha_buckets": _alpha_buckets,
}


def panel_named(name: str) -> Panel:
    """The panel of a name of PANELS, or else of a measure.

    Raises:
        KeyError: there is neither.
    """
    return PANELS[name] if name in PANELS else _measured(name)


def names_of_panels() -> list[str]:
    """Every name: of PANELS, and of measures."""
    return list(dict.fromkeys([*PANELS, *names_of_measures()]))
