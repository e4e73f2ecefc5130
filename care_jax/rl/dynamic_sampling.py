"""DAPO's dynamic sampling: a step is filled from several rollout batches (Yu et al. 2025, eq. 11).

A group whose rollouts are all correct or all wrong has nothing to compare. It is replaced by a
mixed group (some correct, some wrong) of a later batch. Each process replaces its groups only by
groups that it decoded, so that no prompt, image or response crosses the network. All processes draw
until each has enough mixed groups; surplus groups are not used.

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
from care_jax.rl.rollout import Groups, PromptTable, gather_prompt_table


@dataclasses.dataclass(frozen=True)
class Draw:
    """A rollout batch and its prompts.

    Attributes:
        table: sizes and sources of all N prompts.
        examples, prompts, groups: of the B prompts of this process, in the order of `table.local`.
    """

    table: PromptTable
    examples: list[Example]
    prompts: list[TokenizedPrompt]
    groups: Groups


def is_full(draws: Sequence[Draw]) -> bool:
    """Whether every process has enough mixed groups; all processes get the same answer."""
    num_missing = len(draws[0].examples) - sum(int(_is_mixed(draw).sum()) for draw in draws)
    return max(distributed.gather_json(num_missing)) <= 0


def fill(draws: Sequence[Draw]) -> Draw:
    """The first draw, with its unmixed groups replaced by mixed groups of the later draws.

    If there are too few, unmixed groups remain; `credit.dapo_credit` gives them weight 0.
    """
    if len(draws) == 1:
        return draws[0]
    is_mixed = np.concatenate([_is_mixed(draw) for draw in draws])
    num_places = len(draws[0].examples)
    chosen = np.arange(num_places)
    spare = num_places + np.flatnonzero(is_mixed[num_places:])
    empty = np.flatnonzero(~is_mixed[:num_places])[: len(spare)]
    chosen[empty] = spare[: len(empty)]
    examples = [example for draw in draws for example in draw.examples]
    examples = [examples[place] for place in chosen]
    prompts = [prompt for draw in draws for prompt in draw.prompts]
    prompts = [prompts[place] for place in chosen]
    return Draw(
        gather_prompt_table(draws[0].table.local, examples, prompts),
        examples,
        prompts,
        Groups.concatenate([draw.groups for draw in draws], chosen),
    )


@flax.struct.dataclass
class Survey:
    """Every group that was drawn on any process, without texts and spans."""

    rollouts: Rollouts
    scores: Scores


def survey(draws: Sequence[Draw]) -> Survey:
    """Gathers all drawn groups for the metrics: those trained on were selected by their acc."""
    parts = [
        distributed.gather_rows(
            Survey(draw.groups.rollouts.without_text(), draw.groups.scores.without_spans()),
            draw.table.local,
        )
        for draw in draws
    ]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def _is_mixed(draw: Draw) -> Bool[np.ndarray, " B"]:
    return np.asarray(jax.vmap(advantages.is_mixed)(draw.groups.scores.acc))
