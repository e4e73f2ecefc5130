"""The √K' signature over every contrasted group of a run, and over the means of its steps.

A_raw of an anchor is α·√K', the mean A_raw of its K' negatives -α/√K'; `predicted_alphas` in
`care_jax.method.diagnostics` has the two formulas for α.

The full sample is read from `rollouts.jsonl`, which has role, reward and A_raw of every response.
The metrics have only the means of a step, and means of 20 groups scatter less than groups do, which
raises R². Values in `rollouts.jsonl` have four significant digits. Groups with a reflected row are
left out, as in the metrics: that row changes S.
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

from care_jax.method.diagnostics import predicted_alphas
from experiments.sweep.outcome import Outcome, logged_groups

FORMULAS = ("text", "appendix")  # of the paper: with K'+1, and with K'


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
    return _read(outcome.workdir) if outcome.workdir is not None else _sample([])


@functools.cache  # measures and panels of one run ask for it in turn
def _read(workdir: pathlib.Path) -> Sample:
    found = (_values(group["responses"]) for group in logged_groups(workdir))
    return _sample([values for values in found if values is not None])


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
    gap = anchor["reward"] - float(np.mean(rewards))
    if gap <= 0:
        return None
    negative = float(np.mean([each["raw"] for each in negatives]))
    alphas = predicted_alphas(len(negatives), float(np.var(rewards)), gap)
    return len(negatives), anchor["raw"], negative, *alphas


def _sample(values: Sequence[tuple[float, ...]]) -> Sample:
    columns = np.array(values, float).reshape(-1, 5).T
    return Sample(columns[0].astype(int), *columns[1:])


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


def step_points(outcome: Outcome, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Points (x, y) of the signature, each the mean over the groups of one step.

    Args:
        outcome: of a run of CARE.
        name: as in `sample_points`, "alpha" for the formula of the text.
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
