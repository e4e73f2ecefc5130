"""An experiment's figure, as PNG and as CSV of the plotted points.

A panel is a function that plots the arms into axes and returns the plotted points.
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np

from care_jax.sweep.measures import MEASURES, Outcome, fit, mean_interval, signature_points
from care_jax.sweep.tables import values_of

Arms = Mapping[str, Sequence[Outcome]]
Axes = matplotlib.axes.Axes
Point = dict[str, Any]  # arm, seed or None for the mean, x, y, low, high

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
        panels: names of PANELS, from left to right.
        title: above them.
    """
    figure = matplotlib.figure.Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    points = []
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        points += [{"panel": name} | point for point in PANELS[name](axes, arms, reference)]
    figure.savefig(folder / "figure.png", dpi=150)
    with (folder / "figure.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["panel", "arm", "seed", "x", "y", "low", "high"])
        writer.writeheader()
        writer.writerows(points)


def _colored(arms: Arms) -> Iterator[tuple[str, Sequence[Outcome], str]]:
    for index, (arm, outcomes) in enumerate(arms.items()):
        yield arm, outcomes, _COLORS[index % len(_COLORS)]


def _measured(name: str) -> Callable[[Axes, Arms, str], list[Point]]:
    """A measure of every arm: each seed as a dot, the mean with its 95% interval."""

    def draw(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        measure, points = MEASURES[name], []
        references = {outcome.seed: outcome for outcome in arms.get(reference, ())}
        for row, (arm, outcomes, color) in enumerate(_colored(arms)):
            of_seed = [
                (outcome.seed, value)
                for outcome in outcomes
                for value in values_of(measure, [outcome], references)  # empty if undefined
            ]
            if not of_seed:
                continue
            values = [value for _, value in of_seed]
            mean, half = mean_interval(values)
            half = 0.0 if math.isnan(half) else half
            axes.plot(values, [row] * len(values), "o", color=color, alpha=0.35, markersize=4)
            axes.errorbar([mean], [row], xerr=[half], fmt="D", color=color, capsize=3, markersize=5)
            points += [_point(arm, seed, value, row) for seed, value in of_seed]
            points.append(_point(arm, None, mean, row, mean - half, mean + half))
        axes.set_yticks(range(len(arms)), arms)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_xlabel(measure.label.format(reference=reference))
        return points

    return draw


def _by_tokens(axes: Axes, arms: Arms, reference: str) -> list[Point]:
    """Rollout accuracy against tokens decoded so far; mean and interval over seeds."""
    points = []
    for arm, outcomes, color in _colored(arms):
        curves = []
        for outcome in outcomes:
            bins = np.array_split(np.arange(len(outcome.steps)), min(_BINS, len(outcome.steps)))
            tokens, acc = outcome.series("decoded_tokens"), outcome.series("acc")
            curves.append([(tokens[each].mean() / 1e6, 100 * acc[each].mean()) for each in bins])
        shortest = min(map(len, curves))
        curves = np.array([curve[:shortest] for curve in curves])  # [seeds, bins, 2]
        x = curves[..., 0].mean(0)
        mean, half = np.array([mean_interval(column) for column in curves[..., 1].T]).T
        half = np.nan_to_num(half)
        axes.plot(x, mean, color=color, label=arm, linewidth=1.4)
        axes.fill_between(x, mean - half, mean + half, color=color, alpha=0.12, linewidth=0)
        points += [
            _point(arm, None, *values)
            for values in zip(x, mean, mean - half, mean + half, strict=True)
        ]
    axes.set_xlabel("decoded tokens, M")
    axes.set_ylabel("acc of rollouts, %")
    axes.legend(fontsize=7, frameon=False)
    return points


def _signature(name: str, x_label: str, y_label: str) -> Callable[[Axes, Arms, str], list[Point]]:
    """Step means of the √K' signature, with one least-squares line per arm."""

    def draw(axes: Axes, arms: Arms, reference: str) -> list[Point]:
        points = []
        for arm, outcomes, color in _colored(arms):
            pairs = [signature_points(outcome, name) for outcome in outcomes]
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


def _point(arm, seed, x, y, low=None, high=None) -> Point:
    return {"arm": arm, "seed": seed, "x": x, "y": y, "low": low, "high": high}


PANELS = {
    "accuracy": _measured("acc"),
    "acc_at_50": _measured("acc_at_50"),
    "kl_per_trigger": _measured("kl_per_trigger"),
    "by_tokens": _by_tokens,
    "anchor": _signature("anchor", "√K′", "A_raw of the anchor"),
    "negative": _signature("negative", "1/√K′", "mean A_raw of the negatives"),
    "alpha": _signature("alpha", "α̂", "A_raw of the anchor / √K′"),
}
