"""The √K' signature over every contrasted group of a run.

A_raw of an anchor is α·√K', the mean A_raw of its K' negatives -α/√K'. α is predicted by the
formulas of the paper's text and appendix; `care_jax.method.diagnostics` says which one holds:

    α̂ = (1 + (K'+1)·Var(r⁻)/Δ²)^(-1/2)   text (eq:sqrtK-cont),  Δ = r⁺ - mean(r⁻)
    α̂ = (1 + K'·Var(r⁻)/Δ²)^(-1/2)       appendix (prop:ksignature)

The groups are read from `rollouts.jsonl`, with role, reward and A_raw of every response to four
significant digits. Metrics are means over a step, which scatter less than groups and so have a
higher R². Groups with a reflected row are left out, as in the metrics, because it changes S.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float, Int

from experiments.sweep.outcome import Outcome, logged_groups


class Sample(NamedTuple):
    """The contrasted groups of a run."""

    num_negatives: Int[np.ndarray, " N"]  # K'
    anchor: Float[np.ndarray, " N"]  # A_raw of the anchor
    negative: Float[np.ndarray, " N"]  # mean A_raw of the negatives
    text: Float[np.ndarray, " N"]  # α̂ by the formula of the text
    appendix: Float[np.ndarray, " N"]  # α̂ by the formula of the appendix
    ratio: Float[np.ndarray, " N"]  # A_raw/√K' of the anchor, which α̂ predicts


def sample_of(outcome: Outcome) -> Sample:
    """The groups with Δ > 0 that are neither rescued nor reflected.

    Raises:
        NotLogged: the run kept no rollouts, or has dropped those of its first steps.
    """
    return _read(outcome.workdir)


@functools.cache  # every measure and panel reads it
def _read(workdir: pathlib.Path) -> Sample:
    found = [_values(group["responses"]) for group in logged_groups(workdir)]
    columns = np.array([values for values in found if values], float).reshape(-1, 5).T
    return Sample(columns[0].astype(int), *columns[1:], ratio=columns[1] / np.sqrt(columns[0]))


def _values(responses: Sequence[dict[str, Any]]) -> tuple[float, ...] | None:
    """The fields of a `Sample` except `ratio`, for one group; None if it is not in the sample."""
    anchors, negatives, reflected = (
        [response for response in responses if response["role"] == role]
        for role in ("anchor", "hard negative", "reflected")
    )
    if not anchors or not negatives or reflected:
        return None
    rewards, count = [each["reward"] for each in negatives], len(negatives)
    gap = anchors[0]["reward"] - float(np.mean(rewards))
    if gap <= 0:
        return None
    spread = float(np.var(rewards)) / gap**2
    alphas = (1 + (count + 1) * spread) ** -0.5, (1 + count * spread) ** -0.5
    return count, anchors[0]["raw"], float(np.mean([each["raw"] for each in negatives])), *alphas


def sample_points(outcome: Outcome, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Points (x, y) of the signature, one for each contrasted group.

    "anchor": (√K', A_raw of the anchor); "negative": (1/√K', mean A_raw of the negatives); "text",
    "appendix": (α̂ by that formula, A_raw/√K' of the anchor).
    """
    sample = sample_of(outcome)
    root = np.sqrt(sample.num_negatives)
    signed = {"anchor": (root, sample.anchor), "negative": (1 / root, sample.negative)}
    return signed[name] if name in signed else (getattr(sample, name), sample.ratio)


def slope(x: np.ndarray, y: np.ndarray) -> float | None:
    """Slope of ordinary least squares; None under 3 points or for constant x."""
    return float(scipy.stats.linregress(x, y).slope) if _has_line(x) else None


def r2(x: np.ndarray, y: np.ndarray) -> float | None:
    """R² of ordinary least squares; None under 3 points or for constant x."""
    return float(scipy.stats.linregress(x, y).rvalue) ** 2 if _has_line(x) else None


def _has_line(x: np.ndarray) -> bool:
    return len(x) >= 3 and np.ptp(x) >= 1e-6


def mean_alpha(predicted: np.ndarray, _) -> float | None:
    """Mean of α̂ over the contrasted groups."""
    return float(predicted.mean()) if len(predicted) else None


def alpha_error(predicted: np.ndarray, ratio: np.ndarray) -> float | None:
    """Root mean square of A_raw/√K' - α̂ over the contrasted groups."""
    return float(np.sqrt(((ratio - predicted) ** 2).mean())) if len(ratio) else None
