"""An experiment's figure, as PNG and as CSV of the plotted points.

A panel is a function that plots the arms into axes and returns the plotted points. Arms whose runs
did not log what it needs are listed in the panel, with the key to set.
"""

from __future__ import annotations

import csv
import math
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np

from experiments.sweep import curves, signature
from experiments.sweep.measures import mean_interval, measure_named
from experiments.sweep.outcome import NotLogged, Outcome

Arms = Mapping[str, Sequence[Outcome]]
Axes = matplotlib.axes.Axes
Point = dict[str, Any]  # arm, seed or None for the mean, x, y, low, high
Panel = Callable[[Axes, Arms, str], list[Point]]  # the third is the reference arm's name

_BINS = 25  # per curve, over the length of the run
_LABEL_WIDTH = 36  # characters of a line along the y axis
# Okabe-Ito, a colour-blind safe palette.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def write_figure(
    folder: pathlib.Path, arms: Arms, reference: str, panels: Sequence[str], title: str
) -> None:
    """Writes `figure.png` and `figure.csv`, panels from left to right; `reference` is an arm."""
    figure = matplotlib.figure.Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    points = []
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        points += [{"panel": name} | point for point in panel_named(name)(axes, arms, reference)]
    figure.savefig(folder / "figure.png", dpi=150)
    with (folder / "figure.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["panel", "arm", "seed", "x", "y", "low", "high"])
        writer.writeheader()
        writer.writerows(points)


def _draw_arms(axes: Axes, arms: Arms, values_of: Callable, draw: Callable) -> list[Point]:
    """Draws each arm from its outcomes; lists in the panel what was not logged.

    `values_of` maps an outcome to its value, or raises `NotLogged`; `draw` maps an arm, the values
    by seed and the style to the plotted points.
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
    axes.set_ylabel(textwrap.fill(y, _LABEL_WIDTH))
    if points:
        axes.legend(fontsize=size, frameon=False)
    return points


def _measured(name: str) -> Panel:
    """A measure of every arm: each seed as a dot, the mean with its 95% interval."""
    measure = measure_named(name)

    def panel(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        references = {outcome.seed: outcome for outcome in arms.get(reference, ())}
        rows = {arm: row for row, arm in enumerate(arms)}

        def draw(arm: str, found: dict, style: dict) -> list[Point]:
            of_seed = {seed: x for seed, x in found.items() if x is not None and math.isfinite(x)}
            if not of_seed:
                return []
            row, values = rows[arm], list(of_seed.values())
            mean, half = mean_interval(values)
            axes.plot(values, [row] * len(values), "o", alpha=0.35, markersize=4, **style)
            axes.errorbar([mean], [row], xerr=[half], fmt="D", capsize=3, markersize=5, **style)
            of_mean = _point(arm, None, mean, row, mean - half, mean + half)
            return [*(_point(arm, seed, x, row) for seed, x in of_seed.items()), of_mean]

        values_of = lambda run: measure.of(run, references.get(run.seed))  # noqa: E731
        points = _draw_arms(axes, arms, values_of, draw)
        axes.set_yticks(range(len(arms)), arms)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel(measure.label.format(reference=reference))
        return points

    return panel


def _curve(
    curve_of: Callable[[Outcome], curves.Curve], x_label: str, y_label: str, *, num_bins: int
) -> Panel:
    """A curve of every arm, mean and 95% interval over the seeds; the points include each seed's.

    y is NaN where it is undefined. Each run is averaged over `num_bins` bins of consecutive points;
    0: every point is plotted.
    """

    def panel(axes: Axes, arms: Arms, _: str) -> list[Point]:
        def draw(arm: str, found: dict[int, curves.Curve], style: dict) -> list[Point]:
            xs, ys = (zip(*each, strict=False) for each in zip(*found.values(), strict=True))
            rows = [(np.mean(x), *_interval(y)) for x, y in zip(xs, ys, strict=True)]
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
    """Means over bins of consecutive points; NaN for a bin in which y is undefined throughout."""
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
    return outcome.series("decoded_tokens") / 1e6, 100 * curves.rollouts(outcome)


def _held_out_by_tokens(outcome: Outcome) -> curves.Curve:
    x, y = curves.held_out(outcome)
    return curves.tokens_after(outcome, x) / 1e6, 100 * y


def _difference_by_step(name: str, label: str) -> Panel:
    """A metric by step, less that of the reference arm with the same seed (fig:neg_penalty)."""

    def panel(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        references = {outcome.seed: outcome for outcome in arms.get(reference, ())}

        def difference(outcome: Outcome) -> curves.Curve:
            if outcome.seed not in references:
                raise NotLogged(f"run {reference} with seed {outcome.seed} too")
            x = np.arange(len(curves.rollouts(outcome)), dtype=float)
            return x, outcome.series(name) - references[outcome.seed].series(name)

        # The reference stays, without outcomes, so that every arm has its colour of other panels.
        others = {arm: () if arm == reference else outcomes for arm, outcomes in arms.items()}
        y_label = f"{label}, less that of {reference}"
        return _curve(difference, "steps", y_label, num_bins=_BINS)(axes, others, reference)

    return panel


def _buckets(
    columns: Mapping[str, tuple[str, str]], power: float, x_label: str, y_label: str
) -> Panel:
    """Means by K' over the contrasted groups of all seeds, against K' to a power (fig:k2to7).

    The interval is Student's t over the groups, taken as independent. For a power of ±1/2 the law
    for binary rewards, y = ±x (eq:sqrtK), is drawn. `columns` maps fields of a `Sample` to a marker
    and a suffix of the arm's name.
    """

    def panel(axes: Axes, arms: Arms, _: str) -> list[Point]:
        def draw(arm: str, found: dict[int, signature.Sample], style: dict) -> list[Point]:
            points = []
            counts = np.concatenate([sample.num_negatives for sample in found.values()])
            for column, (marker, what) in columns.items():
                values = np.concatenate([getattr(sample, column) for sample in found.values()])
                rows = [(count, *_interval(values[counts == count])) for count in np.unique(counts)]
                count, mean, half = np.array(rows, float).reshape(-1, 3).T
                x, name = count**power, arm + what
                line = {"fmt": marker, "markersize": 3, "capsize": 3, "label": name}
                axes.errorbar(x, mean, yerr=half, **line, **style)
                points += _means(name, x, mean, half)
            return points

        points = _draw_arms(axes, arms, signature.sample_of, draw)
        if points and abs(power) < 1:
            ends = np.array([end(each["x"] for each in points) for end in (min, max)])
            law = np.sign(power) * ends
            axes.plot(ends, law, "--", color="#666666", linewidth=1, label="α = 1")
        return _label(axes, x_label, y_label, points, size=5 if len(columns) > 1 else 7)

    return panel


def _means(arm: str, x: np.ndarray, mean: np.ndarray, half: np.ndarray) -> list[Point]:
    columns = zip(x, mean, mean - half, mean + half, strict=True)
    return [_point(arm, None, *values) for values in columns]


def _point(arm, seed, x, y, low=math.nan, high=math.nan) -> Point:
    """A plotted point; its bounds are None, empty cells, if it has no interval."""
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
    "clip_rate_difference": _difference_by_step(
        "clip_rate_negative_answer", "clip rate of negatives' answers"
    ),
    "variance_ratio_difference": _difference_by_step("variance_ratio", "Var(A⁻)/Var(A⁺)"),
    "anchor_buckets": _buckets({"anchor": ("o-", "")}, 0.5, "√K′", "A_raw of the anchor"),
    "negative_buckets": _buckets(
        {"negative": ("o-", "")}, -0.5, "1/√K′", "mean A_raw of the negatives"
    ),
    "alpha_buckets": _buckets(
        {"ratio": ("o", " measured"), "text": ("_", " text"), "appendix": ("x", " appendix")},
        1.0,
        "K′",
        "A_raw of the anchor / √K′",
    ),
}


def panel_named(name: str) -> Panel:
    """The panel of this name in PANELS, or of the measure of this name; KeyError if neither."""
    return PANELS[name] if name in PANELS else _measured(name)
