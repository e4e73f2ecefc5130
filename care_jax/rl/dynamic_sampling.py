"""DAPO's dynamic sampling: a step is filled from several rollout batches (Yu et al. 2025, eq. 11).

A group whose rollouts are all correct or all wrong is replaced by a mixed group of a later batch.
Each process fills its prompts of the step with groups that it decoded, so that only numbers are
gathered. All processes draw until each has enough mixed groups; surplus groups are discarded.

Letters: B prompts of this process, G rollouts per prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int

from care_jax.batch import Example, Groups
from care_jax.data.pipeline import Batches
from care_jax.devices import distributed, streams
from care_jax.method import advantages
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.rewards.verifier import Verifier
from care_jax.rl.rollout import CarriedOver, asked, roll_out
from care_jax.rl.rollout_programs import RolloutPrograms
from care_jax.run.run import Run
from models import backbone

_MOST_STEPS = 2**24  # a bound of rl.num_steps, which may grow


def draw_groups(
    run: Run,
    programs: RolloutPrograms,
    params: backbone.Params,
    batches: Batches,
    first: tuple[int, list[Example], list[TokenizedPrompt]],
    index: Int[np.ndarray, " B"],
    verifier: Verifier,
    carried: CarriedOver | None = None,
) -> tuple[list[Groups], CarriedOver | None]:
    """The rollout batches of a step: one, or with DAPO as many as fill it with mixed groups.

    Draw t of step s uses batch s + t·2^24 of the stream and the random key of that number, which no
    other draw or step uses.

    Args:
        params: in the decode layout.
        first: the step, and the examples and tokenised prompts of its first draw.
        index: of this process's prompts in a batch.
        carried: see `roll_out`; each draw carries over to the next.

    Returns:
        the batches, and what the last one carries over.
    """
    carried = carried and carried.copy()  # the caller's, if the step is broken off

    def draw(number: int, examples: list[Example], prompts: list[TokenizedPrompt]) -> Groups:
        rng = streams.key_of(run.config.seed, number)
        positions = None if carried is None else batches.positions(number)
        groups = asked(index, examples, prompts, positions)
        return roll_out(run, programs, params, rng, groups, verifier, carried)

    draws = [draw(*first)]
    while len(draws) < run.objective.max_tries and not is_full(draws):
        number = first[0] + len(draws) * _MOST_STEPS
        draws.append(draw(number, *batches.batch(number)))
    return draws, carried


def is_full(draws: Sequence[Groups]) -> bool:
    """Whether every process has enough mixed groups; all processes get the same answer.

    A process without any verdict counts as full: while its reward function fails, more draws do not
    help.
    """
    num_missing = 0
    if any(groups.is_judged.any() for groups in draws):
        num_missing = len(draws[0].index) - sum(int(_is_mixed(groups).sum()) for groups in draws)
    return max(distributed.gather_json(num_missing)) <= 0


def choose_mixed(draws: Sequence[Groups]) -> Groups:
    """The first draw, with its unmixed groups replaced by mixed groups of the later draws.

    If there are too few, unmixed groups remain; `credit.dapo_credit` gives them weight 0.
    """
    if len(draws) == 1:
        return draws[0]
    num_prompts = len(draws[0].index)
    drawn = Groups.concatenate(draws)
    is_mixed = _is_mixed(drawn)
    chosen = np.arange(num_prompts)
    spare = num_prompts + np.flatnonzero(is_mixed[num_prompts:])
    replaced = np.flatnonzero(~is_mixed[:num_prompts])[: len(spare)]
    chosen[replaced] = spare[: len(replaced)]
    return dataclasses.replace(drawn.take(chosen), index=draws[0].index)


def _is_mixed(groups: Groups) -> Bool[np.ndarray, " B"]:
    return np.asarray(jax.vmap(advantages.is_mixed)(groups.trained_scores.acc))
