"""From the groups of a step to the batches of its updates (host).

An update's batch is padded to the buckets that hold its prompts and its longest row; what only the
trainer's forward can say, log-probabilities under the reference and under π_old, is filled in.

Letters: N prompts of a step, B prompts of this process, R rows per prompt, T response tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from care_jax import distributed, sharding
from care_jax.advantages import RawAdvantages
from care_jax.batch import Rollouts, Scores, TrainBatch
from care_jax.credit import Credit
from care_jax.prompt import TokenizedPrompt
from care_jax.rollout import Groups, Roster
from care_jax.run import Run
from care_jax.select import Subgroup
from models import backbone, lora


@dataclasses.dataclass(frozen=True)
class UpdatePrograms:
    """The compiled functions of the update; those of the rollout are `rollout.Programs`.

    Attributes:
        to_decode_layout: params -> params in the decode layout.
        credit: (rollouts, scores[, subgroup, has_reflection]) -> Credit.
        raw_advantages: (scores, subgroup, has_reflection) -> RawAdvantages.
        score: (params, batch) -> log-probabilities [B, R, T].
        update: (state, batch) -> (state, metrics).
    """

    to_decode_layout: Callable
    credit: Callable
    raw_advantages: Callable
    score: Callable
    update: Callable


def gather_groups(
    roster: Roster, groups: Groups, credited: Credit, raw: RawAdvantages | None
) -> tuple[
    Rollouts,
    Scores,
    Subgroup,
    RawAdvantages | None,
    Float[np.ndarray, "N R"],
    Bool[np.ndarray, " N"],
]:
    """What bucket sizes and metrics need of all N prompts, without the texts of the responses."""
    return distributed.gather_rows(
        (
            groups.rollouts.without_text(),
            groups.scores.without_spans(),
            groups.subgroup,
            raw,
            credited.advantage,
            groups.has_reflection,
        ),
        roster.own,
    )


def train_batch(
    run: Run,
    roster: Roster,
    records: Sequence[TokenizedPrompt],
    groups: Groups,
    credited: Credit,
    num_tokens: Int[np.ndarray, " N"],
    index: int,
) -> TrainBatch:
    """The batch of one update on the host, padded to the buckets that hold its prompts and rows.

    Args:
        run: the run.
        roster: of the step's N prompts.
        records, groups, credited: of this process's.
        num_tokens: of the longest row of each of the N.
        index: of the update in its step.
    """
    rl = run.config.rl
    whole = slice(index * rl.prompts_per_update, (index + 1) * rl.prompts_per_update)
    num_own = len(records) * rl.prompts_per_update // rl.prompts_per_step
    part = slice(index * num_own, (index + 1) * num_own)
    rollouts, scores, credited = jax.tree.map(
        lambda x: x[part], (groups.rollouts, groups.scores, credited)
    )
    longest = num_tokens[whole].max()
    length = min(bucket for bucket in rl.response_buckets if bucket >= longest)
    return TrainBatch(
        prompts=run.policy.prompts.batch(records[part], roster.sizes[whole]),
        tokens=rollouts.tokens[..., :length],
        is_valid=rollouts.is_valid[..., :length],
        token_advantage=credited.token_advantage[..., :length],
        old_logp=rollouts.logp[..., :length],
        ref_logp=np.zeros_like(rollouts.logp[..., :length]),
        row_weight=credited.row_weight,
        prompt_weight=credited.prompt_weight,
        is_trained=credited.is_trained[..., :length],
        is_answer=scores.is_answer[..., :length],
    )


def copy_reference(run: Run, params: backbone.Params) -> backbone.Params | None:
    """The reference policy of the KL term; None where there is none or adapters leave it alone."""
    if not run.objective.beta or run.config.model.lora_rank:
        return None
    if "reference" in run.config.model.offload:
        return jax.device_put(params, sharding.on_host(sharding.of(params)))
    return jax.tree.map(jnp.copy, params)


def with_logprobs(
    run: Run,
    programs: UpdatePrograms,
    batches: Sequence[TrainBatch],
    params: backbone.Params,
    reference: backbone.Params | None,
) -> list[TrainBatch]:
    """Fills in, on the host, what the sampler could not: the reference's and the trainer's own.

    The sampler's are the model's at temperature 1 whatever the sampling settings, so they serve as
    π_old unless the config asks for the trainer's numerics, or rows lost the context they had.
    """
    rl, scorers = run.config.rl, {}
    if run.objective.beta:
        if reference is None:  # adapters leave the weights they started from as they were
            reference = lora.without(params)
        elif "reference" in run.config.model.offload:
            reference = jax.device_put(reference, sharding.of(lora.without(params)))
        scorers["ref_logp"] = reference
    is_reframed = rl.objective == "care" and run.config.care.reflect_credit == "prompt_only"
    if rl.old_logp == "trainer" or is_reframed:
        scorers["old_logp"] = params
    if not scorers:
        return list(batches)

    def scored(batch, placed):
        logp = {name: programs.score(scorer, placed) for name, scorer in scorers.items()}
        return batch.replace(**distributed.fetch(logp))

    placed = sharding.put_ahead(batches, run.mesh)
    return [scored(*pair) for pair in zip(batches, placed, strict=True)]
