"""The √K' signature over every contrasted group of a run.

A_raw of an anchor is α·√K', the mean A_raw of its K' negatives -α/√K'. α is predicted by the
formula of the paper's text and by its appendix's; `care_jax.method.diagnostics` says which holds:

    text      α̂ = (1 + (K'+1)·Var(r⁻)/Δ²)^(-1/2)
    appendix  α̂ = (1 + K'·Var(r⁻)/Δ²)^(-1/2),       Δ = r⁺ - mean(r⁻)

The groups are read from `rollouts.jsonl`, which has role, reward and A_raw of every response, with
four significant digits. The metrics have only the means of a step, which scatter less than groups
do and so have a higher R². Groups with a reflected row are left out, as in the metrics: that row
changes S.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Float, Int

from experiments.sweep.outcome import Outcome, logged_groups

FORMULAS = ("text", "appendix")


@dataclasses.dataclass(frozen=True)
class Sample:
    """The contrasted groups of a run.

    Attributes:
        num_negatives: K'.
        anchor: A_raw of the anchor.
        negative: mean A_raw of the negatives.
        text, appendix: α̂ by the formula of the paper's text, and of its appendix.
    """

    num_negatives: Int[np.ndarray, " N"]
    anchor: Float[np.ndarray, " N"]
    negative: Float[np.ndarray, " N"]
    text: Float[np.ndarray, " N"]
    appendix: Float[np.ndarray, " N"]

    @property
    def ratio(self) -> Float[np.ndarray, " N"]:
        """A_raw/√K' of the anchor, which α̂ predicts."""
        return self.anchor / np.sqrt(self.num_negatives)


def sample_of(outcome: Outcome) -> Sample:
    """The groups with a successful anchor, a higher reward than their negatives' and no repair.

    Raises:
        NotLogged: the run kept no rollouts, or has dropped those of its first steps.
    """
    return _read(outcome.workdir)


@functools.cache  # measures and panels of one run ask for it in turn
def _read(workdir: pathlib.Path) -> Sample:
    found = [_values(group["responses"]) for group in logged_groups(workdir)]
    columns = np.array([values for values in found if values], float).reshape(-1, 5).T
    return Sample(columns[0].astype(int), *columns[1:])


def _values(responses: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | None:
    """The fields of a `Sample` for one group; None if it is no contrasted one."""
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for response in responses:
        by_role.setdefault(response["role"], []).append(response)
    negatives = by_role.get("hard negative", [])
    if "anchor" not in by_role or "reflected" in by_role or not negatives:
        return None
    (anchor,) = by_role["anchor"]
    rewards = [each["reward"] for each in negatives]
    gap, count = anchor["reward"] - float(np.mean(rewards)), len(negatives)
    if gap <= 0:
        return None
    spread = float(np.var(rewards)) / gap**2
    alphas = (1 + (count + 1) * spread) ** -0.5, (1 + count * spread) ** -0.5
    return count, anchor["raw"], float(np.mean([each["raw"] for each in negatives])), *alphas


def sample_points(outcome: Outcome, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Points (x, y) of the signature, one for each contrasted group.

    Args:
        outcome: of a run of CARE.
        name: "anchor", (√K', A_raw of the anchor); "negative", (1/√K', mean A_raw of the
            negatives); one of FORMULAS, (α̂, A_raw/√K' of the anchor).
    """
    sample = sample_of(outcome)
    root = np.sqrt(sample.num_negatives)
    if name == "anchor":
        return root, sample.anchor
    if name == "negative":
        return 1 / root, sample.negative
    return getattr(sample, name), sample.ratio


def fit(x: np.ndarray, y: np.ndarray) -> tuple[float | None, float | None]:
    """(slope, R²) of ordinary least squares; None under 3 points or for constant x."""
    if len(x) < 3 or np.ptp(x) < 1e-6:
        return None, None
    line = scipy.stats.linregress(x, y)
    return float(line.slope), float(line.rvalue) ** 2
