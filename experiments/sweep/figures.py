"""An experiment's figure, as PNG and as CSV of the plotted points.

A panel is a function that plots the arms into axes and returns the plotted points. An arm that
lacks the rows for it is named in the panel, with the key to set.
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np

from experiments.sweep import curves, signature
from experiments.sweep.measures import mean_interval, measure_named, names_of_measures
from experiments.sweep.outcome import NotLogged, Outcome
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


def _draw_arms(axes: Axes, arms: Arms, values_of: Callable, draw: Callable) -> list[Point]:
    """Draws each arm by the values of its outcomes; says in the panel what arms lack.

    Args:
        axes: of the panel.
        arms: outcomes by arm.
        values_of: maps an outcome to its value; raises `NotLogged` where it lacks rows.
        draw: maps arm, value by seed, and the style (color) to the plotted points.
    """
    points, lacking = [], {}
    for index, (arm, outcomes) in enumerate(arms.items()):
        found = {}
        for outcome in outcomes:
            try:
                found[outcome.seed] = values_of(outcome)
            except NotLogged as message:
                lacking[arm] = f"{arm} not logged: {message}"
        if found:
            points += draw(arm, found, {"color": _COLORS[index % len(_COLORS)]})
    place = {"transform": axes.transAxes, "wrap": True}
    axes.text(0.02, 0.02, "\n".join(lacking.values()), fontsize=6, color="#AA0000", **place)
    return points


def _label(axes: Axes, x: str, y: str, points: list[Point], size: int = 7) -> list[Point]:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if points:
        axes.legend(fontsize=size, frameon=False)
    return points


def _measured(name: str) -> Panel:
    """A measure of every arm: each seed as a dot, the mean with its 95% interval."""
    measure = measure_named(name)

    def panel(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        references = {outcome.seed: outcome for outcome in arms.get(reference, ())}
        rows = {arm: row for row, arm in enumerate(arms)}

        def value(outcome: Outcome) -> float | None:
            found = value_of(measure, outcome, references)
            if isinstance(found, NotLogged):
                raise found
            return found

        def draw(arm: str, found: dict, style: dict) -> list[Point]:
            of_seed = {seed: value for seed, value in found.items() if value is not None}
            if not of_seed:
                return []
            row, values = rows[arm], list(of_seed.values())
            mean, half = mean_interval(values)
            axes.plot(values, [row] * len(values), "o", alpha=0.35, markersize=4, **style)
            axes.errorbar([mean], [row], xerr=[half], fmt="D", capsize=3, markersize=5, **style)
            of_mean = _point(arm, None, mean, row, mean - half, mean + half)
            return [*(_point(arm, seed, x, row) for seed, x in of_seed.items()), of_mean]

        points = _draw_arms(axes, arms, value, draw)
        axes.set_yticks(range(len(arms)), arms)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_xlabel(measure.label.format(reference=reference))
        return points

    return panel


def _curve(
    curve_of: Callable[[Outcome], curves.Curve], x_label: str, y_label: str, *, num_bins: int
) -> Panel:
    """A curve of every arm, mean and 95% interval over the seeds; the points have each seed's too.

    Args:
        curve_of: (x, y) of a run; y may be NaN where it is undefined.
        x_label, y_label: of the axes.
        num_bins: of neighbouring points of a run, each plotted as its mean; 0: every point.
    """

    def panel(axes: Axes, arms: Arms, _: str) -> list[Point]:
        def draw(arm: str, found: dict[int, curves.Curve], style: dict) -> list[Point]:
            shortest = min(len(x) for x, _ in found.values())
            xs, ys = np.transpose(
                [(x[:shortest], y[:shortest]) for x, y in found.values()], (1, 2, 0)
            )
            rows = [(x.mean(), *_interval(y)) for x, y in zip(xs, ys, strict=True)]
            rows = [row for row in rows if math.isfinite(row[1])]
            if not rows:
                return []
            x, mean, half = np.array(rows).T
            axes.plot(x, mean, label=arm, linewidth=1.4, **style)
            axes.fill_between(x, mean - half, mean + half, alpha=0.12, linewidth=0, **style)
            of_seeds = [
                _point(arm, seed, *values)
                for seed, curve in found.items()
                for values in zip(*curve, strict=True)
                if math.isfinite(values[1])
            ]
            return of_seeds + _means(arm, x, mean, half)

        points = _draw_arms(axes, arms, lambda run: _binned(*curve_of(run), num_bins), draw)
        return _label(axes, x_label, y_label, points)

    return panel


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


def _reward_by_step(outcome: Outcome) -> curves.Curve:
    return np.arange(len(curves.rollouts(outcome)), dtype=float), outcome.series("reward")


def _rollouts_by_tokens(outcome: Outcome) -> curves.Curve:
    acc = curves.rollouts(outcome)
    return outcome.series("decoded_tokens") / 1e6, 100 * acc


def _held_out_by_tokens(outcome: Outcome) -> curves.Curve:
    x, y = curves.held_out(outcome)
    return curves.tokens_after(outcome, x) / 1e6, 100 * y


def _by_count(found: Mapping[int, signature.Sample], name: str) -> tuple[np.ndarray, ...]:
    """(K', mean, half-width of its interval) over the groups of all seeds, for each K'.

    The interval is Student's t over the groups, which it takes as independent.
    """
    counts = np.concatenate([sample.num_negatives for sample in found.values()])
    values = np.concatenate([getattr(sample, name) for sample in found.values()])
    rows = [(count, *_interval(values[counts == count])) for count in np.unique(counts)]
    return tuple(np.array(rows, float).reshape(-1, 3).T)


def _buckets(name: str, sign: int, x_label: str, y_label: str) -> Panel:
    """A_raw by K' over all contrasted groups of all seeds, with the law for binary rewards.

    Args:
        name: "anchor" or "negative".
        sign: ±1; the law is sign · √K'^sign.
        x_label, y_label: of the axes.
    """

    def panel(axes: Axes, arms: Arms, _: str) -> list[Point]:
        def draw(arm: str, found: dict, style: dict) -> list[Point]:
            count, mean, half = _by_count(found, name)
            x, style = count ** (sign / 2), style | {"label": arm, "capsize": 3, "markersize": 3}
            axes.errorbar(x, mean, yerr=half, fmt="o-", **style)
            return _means(arm, x, mean, half)

        points = _draw_arms(axes, arms, signature.sample_of, draw)
        if points:
            ends = np.array([end(each["x"] for each in points) for end in (min, max)])
            axes.plot(ends, sign * ends, "--", color="#666666", linewidth=1, label="α = 1")
        return _label(axes, x_label, y_label, points)

    return panel


def _alpha_buckets(axes: Axes, arms: Arms, _: str) -> list[Point]:
    """A_raw/√K' of anchors by K', measured with its interval, and both formulas' means.

    The arm of a point is followed by what it is: measured, text or appendix.
    """

    def draw(arm: str, found: dict, style: dict) -> list[Point]:
        points = []
        for what, marker in (("ratio", "o"), *zip(signature.FORMULAS, ("_", "x"), strict=True)):
            count, mean, half = _by_count(found, what)
            name = f"{arm} {'measured' if what == 'ratio' else what}"
            axes.errorbar(count, mean, yerr=half, fmt=marker, capsize=3, label=name, **style)
            points += _means(name, count.astype(int), mean, half)
        return points

    points = _draw_arms(axes, arms, signature.sample_of, draw)
    return _label(axes, "K′", "A_raw of the anchor / √K′", points, size=5)


def _means(arm: str, x: np.ndarray, mean: np.ndarray, half: np.ndarray) -> list[Point]:
    columns = zip(x, mean, mean - half, mean + half, strict=True)
    return [_point(arm, None, *values) for values in columns]


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
    "reward_by_step": _curve(_reward_by_step, "steps", "reward of rollouts", num_bins=_BINS),
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
    return [*PANELS, *names_of_measures()]
