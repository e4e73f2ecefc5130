"""The compiled functions of RL: every `jax.jit` of rollouts and updates, and their static sizes.

Each is compiled once per shape that occurs.

Letters: B prompts of a rollout batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from care_jax.batch import Rollouts
from care_jax.decoding import reflection
from care_jax.decoding.programs import DecodePrograms, DecodingAttention, compile_decoding
from care_jax.decoding.queue import DecodeQueue
from care_jax.decoding.schedule import Sizes
from care_jax.devices import sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.learning.logprobs import score_rows
from care_jax.learning.train_step import TrainState, map_microbatches, train_step
from care_jax.method import credit
from care_jax.method.select import Subgroup
from care_jax.run.run import Run, compile_to_decode_layout
from models.attention.mask import AttentionImpl

Decode = Callable[..., Iterator[tuple[list[int], Rollouts]]]


@dataclasses.dataclass(frozen=True)
class RolloutPrograms:
    """The compiled functions of a rollout, see `compile_rollout`.

    Attributes:
        decode: (params, rng, requests) -> indices of requests with G rollouts of each, in order of
            completion; see `decoding.queue.DecodeQueue.decode`.
        reflect: likewise, with one rollout per request, which starts with the request's context.
        select: (rollouts, scores, rng, places [B]) -> Subgroup.
    """

    decode: Decode
    reflect: Decode
    select: Callable[..., Subgroup]


@dataclasses.dataclass(frozen=True)
class UpdatePrograms:
    """The compiled functions of the update; those of the rollout are `RolloutPrograms`.

    Attributes:
        to_decode_layout: params -> params in the decode layout.
        credit: (rollouts, scores[, subgroup, has_reflection]) -> Credit.
        raw_advantages: (scores, subgroup, has_reflection) -> RawAdvantages; None if the objective
            has none.
        score: (params, batch) -> log-probabilities at the tokens of the batch's rows.
        nll: (params, batch) -> mean of -log π over the tokens that are trained on.
        update: (state, batch) -> (state, metrics).
    """

    to_decode_layout: Callable
    credit: Callable
    raw_advantages: Callable | None
    score: Callable
    nll: Callable
    update: Callable


def compile_decoder(
    run: Run,
    *,
    temperature: float,
    top_p: float,
    stops: bool = True,
    attention: DecodingAttention | None = None,
) -> DecodePrograms:
    """`compile_decoding` for the run's policy, devices and dtype.

    Args:
        run: the run.
        temperature, top_p, stops: see `compile_decoding`.
        attention: None for the device's, without comparing it with XLA.
    """
    rules, model = run.config.decode_sharding_rules, run.config.model
    if attention is None:
        impl = sharding.attention_impl(model.attention, rules, run.mesh)
        attention = DecodingAttention(impl, impl)
    return compile_decoding(
        run.policy.config,
        run.mesh,
        rules,
        dtype=jnp.dtype(model.compute_dtype),
        closing_tag=run.policy.closing_tag,
        temperature=temperature,
        top_p=top_p,
        stops=stops,
        attention=attention,
    )


def context_tokens(run: Run) -> int:
    """Maximum number of forced tokens of a reflected row.

    Without a tokenizer (programs are only compiled), four bytes of the cue count as one token.
    """
    care, tokenizer = run.config.care, run.policy.tokenizer
    if care.reflect_mode == "resample":
        return 0
    cue = reflection.cue_text(care.cue, care.reflect_mode, seed=run.config.seed)
    if tokenizer is None:
        return care.max_context + math.ceil(len(cue.encode()) / 4)
    return care.max_context + len(tokenizer.encode(cue, add_special_tokens=False) if cue else ())


def rollout_sizes(run: Run) -> tuple[Sizes, Sizes]:
    """Sizes of the first decode, and of the reflected one.

    A reflected prompt has one row and takes less than half the memory, so more of them are decoded
    at a time.
    """
    rl, shards = run.config.rl, sharding.num_shards(run.decode_batch_sharding)
    tries = Sizes(
        num_slots=rl.decode_prompts,
        num_rows=min(rl.decode_rows, rl.num_rollouts),
        num_rollouts=rl.num_rollouts,
        max_tokens=rl.max_response_tokens,
        context_tokens=0,
        num_shards=shards,
        period=rl.prompts_per_update,
    )
    repairs = dataclasses.replace(
        tries,
        num_slots=min(rl.decode_prompts * max(tries.num_rows // 2, 1), rl.prompts_per_step),
        num_rows=1,
        num_rollouts=1,
        context_tokens=context_tokens(run),
    )
    return tries, repairs


def compile_rollout(
    run: Run, clock: DeviceClock, attention: DecodingAttention | None = None
) -> RolloutPrograms:
    """The jitted functions of a rollout, each compiled once per shape that occurs.

    Args:
        run: the run.
        clock: told of what runs.
        attention: see `compile_decoder`.
    """
    rl, care = run.config.rl, run.config.care
    programs = compile_decoder(run, temperature=rl.temperature, top_p=rl.top_p, attention=attention)
    first, second = (
        DecodeQueue(programs, run.policy.prompts, sizes, clock) for sizes in rollout_sizes(run)
    )

    def select(rollouts, scores, rng, places):
        return credit.select_subgroups(
            rollouts,
            scores,
            jax.vmap(jax.random.fold_in, (None, 0))(rng, places),
            K=care.K,
            M=care.M,
            rule=care.rule,
            anchor_rule=care.anchor_rule,
        )

    return RolloutPrograms(decode=first.decode, reflect=second.decode, select=jax.jit(select))


def compile_update(
    run: Run,
    adamw: optax.GradientTransformation,
    state_shardings: TrainState,
    attention: AttentionImpl | None = None,
) -> UpdatePrograms:
    """The jitted functions of an update, each compiled once per shape of rows that occurs.

    Args:
        run: the run.
        adamw: its optimizer.
        state_shardings: of the state before and after an update.
        attention: the attention implementation; None: that of `model.attention`, unchecked.
    """
    rl, model, objective = run.config.rl, run.config.model, run.objective
    config, dtype = run.policy.config, jnp.dtype(model.compute_dtype)
    if attention is None:
        rules = run.config.sharding_rules
        attention = sharding.attention_impl(model.attention, rules, run.mesh)
    scoring: dict[str, Any] = dict(
        dtype=dtype,
        chunk=run.chunk_of_row(rl.microbatch_size),
        remat=model.remat,
        attention=attention,
    )

    def score(params, batch):
        def one(batch):
            return score_rows(params, batch.rows, config, **scoring)[0]

        return map_microbatches(one, batch, rl.microbatch_size)

    def update(state, batch):
        return train_step(
            state,
            batch,
            config,
            adamw,
            microbatch_size=rl.microbatch_size,
            beta=objective.beta,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            has_sequence_ratio=objective.has_sequence_ratio,
            partition=run.partition,
            skip_nonfinite=rl.max_skipped > 0,
            **scoring,
        )

    def mean_nll(logp, is_trained):
        return -jnp.where(is_trained, logp, 0.0).sum() / jnp.maximum(is_trained.sum(), 1)

    def nll(params, batch):
        return mean_nll_program(score_program(params, batch), batch.is_trained)

    score_program = jax.jit(run.placed(score), out_shardings=run.train_batch_sharding)
    mean_nll_program = jax.jit(mean_nll, out_shardings=sharding.replicated(run.mesh))
    return UpdatePrograms(
        to_decode_layout=compile_to_decode_layout(run),
        credit=jax.jit(objective.credit),
        raw_advantages=objective.raw_advantages and jax.jit(objective.raw_advantages),
        score=score_program,
        nll=nll,
        update=jax.jit(run.placed(update), donate_argnums=0, out_shardings=(state_shardings, None)),
    )
