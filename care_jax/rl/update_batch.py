"""Builds the packed batches of a step's updates from its groups (host).

A tree is a prompt with the responses that are trained on; the trees of an update are packed into
rows. Other responses are not packed, nor prompts left without any. `put_scored` adds the
log-probabilities that need the trainer's forward pass: under the reference and under π_old. A batch
is laid out while the devices work on the one before.

Letters: N prompts of an update, B those of this process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from care_jax.batch import Groups, TrainBatch
from care_jax.devices import distributed, sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.packing.layout import at_rows, at_tokens, lay_out
from care_jax.packing.plan import RowPlan, plan_rows
from care_jax.packing.trees import TreeSizes
from care_jax.run.run import Run
from models import backbone, lora


def train_batch(run: Run, groups: Groups, everyone: Groups) -> tuple[TrainBatch, RowPlan]:
    """This process's batch of one update, on the host, and the plan of the packing.

    `groups` are its B prompts, with credit; `everyone` is from `gather_groups`. Prompts and
    responses that its rows need and another process decoded are fetched from there.
    """
    rl, credit = run.config.rl, everyone.credit
    plan = plan_rows(
        TreeSizes(*everyone.sizes.T, branches=everyone.num_trained),
        row_tokens=rl.row_tokens,
        row_patches=rl.row_patches,
        microbatch_size=rl.microbatch_size,
        row_lengths=rl.row_lengths,
        owner=sharding.owners(rl.prompts_per_update, run.decode_batch_sharding),
        num_processes=jax.process_count(),
        process=jax.process_index(),
    )
    decoded = {
        "prompts": groups.prompts,
        "tokens": groups.rollouts.tokens,
        "logp": groups.rollouts.logp,
        "token_advantage": groups.credit.token_advantage,
        "is_answer": groups.scores.is_answer,
    }
    if run.objective.correction != "none":
        decoded["drawn_logp"] = groups.rollouts.with_drawn_logp().drawn_logp
    if groups.rollouts.routes is not None:
        decoded["routes"] = groups.rollouts.routes
    if rl.carry_over:
        age = groups.rollouts.age
        assert age is not None  # as the decode queue gives it
        # A rollout with older tokens has gone on with the KV cache of older weights.
        decoded["is_fresh"] = np.broadcast_to(age.max(-1, keepdims=True) == 0, age.shape)
    found = distributed.exchange_rows(
        decoded,
        np.searchsorted(everyone.index, groups.index),
        len(everyone.index),
        moved=plan.moved,
        wanted=plan.trees,
    )
    prompts = {tree: found["prompts"][tree] for tree in plan.trees}
    is_compared = credit.is_trained
    if run.objective.drops_context:  # the last row was sampled in another context
        is_compared = (
            is_compared & (np.arange(is_compared.shape[1]) < run.config.rl.num_rollouts)[:, None]
        )
    batch = TrainBatch(
        rows=lay_out(prompts, found["tokens"], plan, run.policy.prompts),
        token_advantage=at_tokens(found["token_advantage"], plan),
        old_logp=at_tokens(found["logp"], plan),
        ref_logp=np.zeros((len(plan.rows), plan.row_tokens), np.float32),
        row_weight=at_tokens(credit.row_weight, plan),
        is_trained=at_tokens(credit.is_trained, plan),
        is_compared=at_tokens(is_compared, plan),
        is_answer=at_tokens(found["is_answer"], plan),
        prompt_weight=at_rows(_with_weight_of_all(credit.prompt_weight, plan.sizes), plan),
        drawn_logp=at_tokens(found["drawn_logp"], plan) if "drawn_logp" in found else None,
        is_fresh=at_tokens(found["is_fresh"], plan) if "is_fresh" in found else None,
        routes=at_tokens(found["routes"], plan, fill=-1) if "routes" in found else None,
    )
    return batch, plan


def _with_weight_of_all(
    weight: Float[np.ndarray, " N"], sizes: TreeSizes
) -> Float[np.ndarray, " N"]:
    """Weights of the packed prompts that add up to those of all, the loss's denominator."""
    is_packed = sizes.branches.any(1)
    packed = weight[is_packed].sum()
    return weight * (weight.sum() / packed) if packed else weight


def copy_reference(run: Run, params: backbone.Params) -> backbone.Params | None:
    """The reference policy of the KL term; None if β = 0, or if LoRA keeps its weights frozen."""
    if not run.has_reference_copy:
        return None
    reference = as_reference(run, params)
    if "reference" in run.config.model.offload:
        return jax.device_put(reference, sharding.on_host(sharding.of(reference)))
    return reference


def as_reference(run: Run, params: backbone.Params) -> backbone.Params:
    """A copy whose decoder is of `model.compute_dtype`, in which alone its weights are read.

    The vision encoder reads some of its own in float32.
    """
    dtypes = {"text": run.config.model.compute_dtype}
    return {
        name: jax.tree.map(functools.partial(jnp.array, dtype=dtypes.get(name), copy=True), part)
        for name, part in params.items()
    }


def put_scored(
    run: Run,
    score: Callable,
    packed: Iterable[tuple[TrainBatch, RowPlan]],
    params: backbone.Params,
    reference: backbone.Params | None,
    clock: DeviceClock,
) -> Iterator[tuple[TrainBatch, RowPlan, TrainBatch | None]]:
    """Puts batches on the devices, with log-probabilities under the reference and under π_old.

    The sampler records log-probabilities at temperature 1 for all sampling settings, which serve as
    π_old. The trainer recomputes them if rl.old_logp = "trainer"; else only those of reflected rows
    trained without the context they were sampled with. All batches are scored before the first is
    yielded.

    Each batch is laid out and put while the devices work on the one before. They hold two at most,
    if the caller takes a batch only after they are done with the one before the last.

    Args:
        score: of `stages.rl.UpdatePrograms`; `clock` measures it.
        packed: from `train_batch`.
        params: before the first update.
        reference: from `copy_reference`.

    Yields:
        the batch on the host, its plan, and the batch on the devices, None if it is empty.
    """

    def put(batch: TrainBatch, plan: RowPlan) -> TrainBatch | None:
        return None if plan.is_empty else sharding.put_batch(batch, run.train_batch_sharding)

    scorers = _scorers(run, params, reference)
    if not scorers:
        for batch, plan in packed:
            yield batch, plan, put(batch, plan)
        return
    found, logps = [], []
    for batch, plan in packed:
        jax.block_until_ready(logps[-2:-1])  # their batch is then freed
        placed = put(batch, plan)
        found.append((batch, plan))
        logps.append({})
        if placed is not None:
            logps[-1] = {name: score(scorer, placed) for name, scorer in scorers.items()}
            clock.watch(logps[-1])
        del placed
    del scorers, params, reference
    for number, ((batch, plan), logp) in enumerate(zip(found, logps, strict=True)):
        jax.block_until_ready(logps[-2:-1] if number == 0 else logps)
        placed = put(batch, plan)
        if placed and "old_logp" in logp and run.config.rl.old_logp == "sampler":
            logp["old_logp"] = jnp.where(placed.is_compared, placed.old_logp, logp["old_logp"])
        yield batch, plan, placed and dataclasses.replace(placed, **logp)


def with_logprobs(batch: TrainBatch, on_devices: TrainBatch) -> TrainBatch:
    """The batch on the host with the log-probabilities of the one on the devices."""
    ref_logp, old_logp = distributed.fetch((on_devices.ref_logp, on_devices.old_logp))
    return dataclasses.replace(batch, ref_logp=ref_logp, old_logp=old_logp)


def _scorers(
    run: Run, params: backbone.Params, reference: backbone.Params | None
) -> dict[str, backbone.Params]:
    """The parameters that give each of the log-probabilities to compute, by its field."""
    scorers = {}
    if run.objective.beta:
        if reference is None:  # LoRA: the frozen weights are the reference
            reference = lora.without(params)
        elif "reference" in run.config.model.offload:
            reference = jax.device_put(reference, sharding.of(lora.without(params)))
        scorers["ref_logp"] = reference
    if run.has_trainer_logp:
        scorers["old_logp"] = params
    return scorers
