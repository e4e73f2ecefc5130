"""From the groups of a step to the batches of its updates (host).

A tree is a prompt with the responses that are trained on; the trees of an update are packed into
rows. Responses without credit are left out, and so are prompts without any such response.
Log-probabilities that need the trainer's forward pass, under the reference and under π_old, are
filled in.

Letters: N prompts of a step, B prompts of this process, R responses per prompt, T response tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from care_jax.batch import Rollouts, Scores, TrainBatch
from care_jax.devices import distributed, sharding
from care_jax.method.advantages import RawAdvantages
from care_jax.method.credit import Credit
from care_jax.method.select import Subgroup
from care_jax.packing.layout import at_rows, lay_out, place
from care_jax.packing.plan import RowPlan, TreeSizes, plan_rows
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.rl.programs import UpdatePrograms
from care_jax.rl.rollout import Groups, PromptTable
from care_jax.run.run import Run
from models import backbone, lora


@flax.struct.dataclass
class Gathered:
    """What packing and metrics need from all N prompts of a step, as numpy arrays.

    Attributes:
        rollouts: without texts.
        scores: without spans.
        subgroup, raw: anchor and negatives, and A_raw; `raw` is None for the baselines.
        advantage: of every response.
        has_reflection: the last response is a reflected one.
        num_tokens: tokens of each response that is trained on, 0 for the others.
    """

    rollouts: Rollouts
    scores: Scores
    subgroup: Subgroup
    raw: RawAdvantages | None
    advantage: Float[np.ndarray, "N R"]
    has_reflection: Bool[np.ndarray, " N"]
    num_tokens: Int[np.ndarray, "N R"]


def gather_groups(
    table: PromptTable, groups: Groups, credited: Credit, raw: RawAdvantages | None
) -> Gathered:
    """Gathers the groups of all processes."""
    num_tokens = groups.rollouts.is_valid.sum(-1) * credited.is_trained.any(-1)
    local = Gathered(
        rollouts=groups.rollouts.without_text(),
        scores=groups.scores.without_spans(),
        subgroup=groups.subgroup,
        raw=raw,
        advantage=credited.advantage,
        has_reflection=groups.has_reflection,
        num_tokens=num_tokens.astype(np.int32),
    )
    return distributed.gather_rows(local, table.local)


def train_batch(
    run: Run,
    table: PromptTable,
    prompts: Sequence[TokenizedPrompt],
    groups: Groups,
    credited: Credit,
    num_tokens: Int[np.ndarray, "N R"],
    index: int,
) -> tuple[TrainBatch, RowPlan]:
    """This process's batch of one update, on the host, and the plan of the packing.

    Args:
        run: the run.
        table: of the step's N prompts.
        prompts, groups, credited: of this process's prompts.
        num_tokens: tokens of each response that is trained on, 0 for the others.
        index: of the update in its step.
    """
    rl = run.config.rl
    whole = slice(index * rl.prompts_per_update, (index + 1) * rl.prompts_per_update)
    num_local = len(prompts) * rl.prompts_per_update // rl.prompts_per_step
    part = slice(index * num_local, (index + 1) * num_local)
    rollouts, scores, credited = jax.tree.map(
        lambda x: x[part], (groups.rollouts, groups.scores, credited)
    )
    plan = plan_rows(
        TreeSizes(*table.sizes[whole].T, branches=num_tokens[whole]),
        row_tokens=rl.row_tokens,
        row_patches=rl.row_patches,
        microbatch_size=rl.microbatch_size,
        owner=sharding.owners(rl.prompts_per_update, run.decode_batch_sharding),
        num_processes=jax.process_count(),
        process=jax.process_index(),
    )

    def at_tokens(values):
        return place(np.asarray(values), plan)

    batch = TrainBatch(
        rows=lay_out(prompts[part], rollouts.tokens, plan, run.policy.config),
        token_advantage=at_tokens(credited.token_advantage),
        old_logp=at_tokens(rollouts.logp),
        ref_logp=np.zeros((len(plan.rows), plan.row_tokens), np.float32),
        row_weight=at_tokens(credited.row_weight),
        is_trained=at_tokens(credited.is_trained),
        is_answer=at_tokens(scores.is_answer),
        prompt_weight=at_rows(credited.prompt_weight, plan),
    )
    return batch, plan


def copy_reference(run: Run, params: backbone.Params) -> backbone.Params | None:
    """The reference policy of the KL term; None if β = 0, or if LoRA keeps its weights frozen."""
    if not run.has_reference_copy:
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
    """Fills in, on the host, log-probabilities under the reference and, if needed, under π_old.

    The sampler records log-probabilities at temperature 1 for all sampling settings, so they serve
    as π_old. The trainer recomputes them if rl.old_logp = "trainer", or if reflected rows are
    trained without the context they were sampled with.
    """
    scorers = {}
    if run.objective.beta:
        if reference is None:  # LoRA: the frozen weights are the reference
            reference = lora.without(params)
        elif "reference" in run.config.model.offload:
            reference = jax.device_put(reference, sharding.of(lora.without(params)))
        scorers["ref_logp"] = reference
    if run.has_trainer_logp:
        scorers["old_logp"] = params
    if not scorers:
        return list(batches)

    def scored(batch, placed):
        logp = {name: programs.score(scorer, placed) for name, scorer in scorers.items()}
        return dataclasses.replace(batch, **distributed.fetch(logp))

    placed = sharding.put_ahead(batches, run.train_batch_sharding)
    return [scored(*pair) for pair in zip(batches, placed, strict=True)]
