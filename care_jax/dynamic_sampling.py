"""DAPO's dynamic sampling: a step is filled from several rollout batches (Yu et al. 2025, eq. 11).

A group in which all rollouts are right, or all wrong, has nothing to compare; its place goes to a
mixed group of a later batch. Places keep their processes: what a process drew fills its own places
and nobody else's, so that no prompt, image or response crosses the network. All processes draw
until each of them is full; what one has left over is not used.

Letters: N prompts of a step, B prompts of this process, G rollouts per prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool

from care_jax.batch import Example, Rollouts, Scores
from care_jax.devices import distributed
from care_jax.method import advantages
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.rollout import Groups, Roster


@dataclasses.dataclass(frozen=True)
class Draw:
    """A rollout batch and its prompts.

    Attributes:
        roster: of all N prompts.
        examples, records, groups: of this process's B, in the order of `roster.own`.
    """

    roster: Roster
    examples: list[Example]
    records: list[TokenizedPrompt]
    groups: Groups


def is_full(draws: Sequence[Draw]) -> bool:
    """Whether every process has drawn a mixed group for each of its places; all hear the same."""
    num_missing = len(draws[0].examples) - sum(int(_is_mixed(draw).sum()) for draw in draws)
    return max(distributed.gather_json(num_missing)) <= 0


def fill(draws: Sequence[Draw]) -> Draw:
    """The first draw, its unmixed groups replaced by mixed ones of the others as far as they go.

    What is still unmixed stays in its place; `credit.dapo_credit` gives it the weight 0.
    """
    if len(draws) == 1:
        return draws[0]
    is_mixed = np.concatenate([_is_mixed(draw) for draw in draws])
    num_places = len(draws[0].examples)
    chosen = np.arange(num_places)
    spare = num_places + np.flatnonzero(is_mixed[num_places:])
    empty = np.flatnonzero(~is_mixed[:num_places])[: len(spare)]
    chosen[empty] = spare[: len(empty)]
    examples, records = (
        [rows[place] for place in chosen]
        for rows in (
            [example for draw in draws for example in draw.examples],
            [record for draw in draws for record in draw.records],
        )
    )
    return Draw(
        Roster.call(draws[0].roster.own, examples, records),
        examples,
        records,
        Groups.concatenate([draw.groups for draw in draws], chosen),
    )


@flax.struct.dataclass
class Survey:
    """Every group that was drawn, on all processes, without texts and spans."""

    rollouts: Rollouts
    scores: Scores


def survey(draws: Sequence[Draw]) -> Survey:
    """What the policy does: the groups that are trained on were chosen by their acc."""
    parts = [
        distributed.gather_rows(
            Survey(draw.groups.rollouts.without_text(), draw.groups.scores.without_spans()),
            draw.roster.own,
        )
        for draw in draws
    ]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def _is_mixed(draw: Draw) -> Bool[np.ndarray, " B"]:
    return np.asarray(jax.vmap(advantages.is_mixed)(draw.groups.scores.acc))
