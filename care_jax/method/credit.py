"""Who is credited for what: from scores to the advantages and weights of an update.

Here the pure functions of `select`, `advantages` and `objective`, written for one prompt, are
vmapped over the batch, once. Each objective's own mean becomes a choice of row and prompt weights
(see `batch.TrainBatch`).

Letters: B prompts, G rollouts per prompt, R = G + 1 rows where one may be reflected, T tokens.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from care_jax.batch import Rollouts, Scores
from care_jax.method import advantages, objective
from care_jax.method.select import Subgroup, select_subgroup


@flax.struct.dataclass
class Credit:
    """What each row's tokens are worth.

    Attributes:
        advantage: A of each row.
        token_advantage: a_t, zero off the sampled tokens.
        row_weight: share of the row in its prompt's loss.
        prompt_weight: what the prompt adds to the loss's denominator.
        is_trained: sampled tokens of the rows that take part.
    """

    advantage: Float[Array, "B R"]
    token_advantage: Float[Array, "B R T"]
    row_weight: Float[Array, "B R"]
    prompt_weight: Float[Array, " B"]
    is_trained: Bool[Array, "B R T"]


def select_subgroups(
    rollouts: Rollouts,
    scores: Scores,
    rngs: PRNGKeyArray,
    *,
    K: int,
    M: int,
    rule: str,
    anchor_rule: str,
) -> Subgroup:
    """Anchor and hard negatives of every prompt, from its G rollouts; a key of `rngs` for each."""
    select = functools.partial(select_subgroup, K=K, M=M, rule=rule, anchor_rule=anchor_rule)

    def one(acc, num_think, num_answer, logp, embedding, is_formatted, rng):
        return select(
            acc, num_think, num_answer, logp, embedding, is_formatted=is_formatted, rng=rng
        )

    return jax.vmap(one)(
        scores.acc,
        scores.num_think,
        scores.num_answer,
        rollouts.logp.sum(-1),
        rollouts.embedding,
        scores.fmt == 1,
        rngs,
    )


def care_credit(
    rollouts: Rollouts,
    scores: Scores,
    subgroup: Subgroup,
    has_reflection: Bool[Array, " B"],
    *,
    K: int,
    s: float,
    s_refl: float,
    delta: float,
    eps: float,
    equalize: bool,
    rescue: bool,
    rescue_scale: float,
    robust: bool,
    region_weights: bool,
    gamma_pos: float,
    gamma_neg: float,
    eps_w: float,
) -> Credit:
    """CARE: contrast inside the subgroup, credit by region, mean over its members.

    The last of the R rows is the reflected one, absent where `has_reflection` is false. R may be G
    where no prompt has one. Without `region_weights` every sampled token weighs the same.
    """
    num_rows = scores.reward.shape[1]
    reward, acc = with_reflected_slot(scores.reward, scores.acc, subgroup)
    advantage = jax.vmap(
        functools.partial(
            advantages.care_advantages,
            K=K,
            s=s,
            s_refl=s_refl,
            delta=delta,
            eps=eps,
            equalize=equalize,
            rescue=rescue,
            rescue_scale=rescue_scale,
            robust=robust,
        )
    )(reward, acc, subgroup, has_reflection)[:, :num_rows]
    is_sampled = rollouts.is_valid & ~rollouts.is_forced
    weights = _over_rows(
        functools.partial(
            objective.region_weights,
            gamma_pos=gamma_pos,
            gamma_neg=gamma_neg,
            is_uniform=not region_weights,
        )
    )(scores.is_think, scores.is_answer, is_sampled, scores.acc == 1)
    in_subgroup = advantage != 0
    num_members = in_subgroup.sum(-1, keepdims=True)
    return Credit(
        advantage=advantage,
        token_advantage=_over_rows(functools.partial(objective.token_advantages, eps_w=eps_w))(
            advantage, weights
        ),
        row_weight=in_subgroup / jnp.maximum(num_members, 1),
        prompt_weight=(num_members[:, 0] > 0).astype(jnp.float32),
        is_trained=is_sampled & in_subgroup[..., None],
    )


def care_raw_advantages(
    scores: Scores,
    subgroup: Subgroup,
    has_reflection: Bool[Array, " B"],
    *,
    delta: float,
    eps: float,
    robust: bool,
) -> advantages.RawAdvantages:
    """A_raw of every prompt's R = G + 1 rows, for the diagnostics."""
    one = functools.partial(advantages.raw_advantages, delta=delta, eps=eps, robust=robust)
    reward, acc = with_reflected_slot(scores.reward, scores.acc, subgroup)
    return jax.vmap(one)(reward, acc, subgroup, has_reflection)


def grpo_credit(rollouts: Rollouts, scores: Scores, *, eps: float, ddof: int) -> Credit:
    """GRPO: the whole group, uniform weights, sequence-mean of token means."""
    advantage = jax.vmap(functools.partial(advantages.grpo_advantages, eps=eps, ddof=ddof))(
        scores.reward
    )
    num_tokens = jnp.maximum(rollouts.is_valid.sum(-1), 1)
    return _sequence_mean(rollouts, advantage, num_tokens)


def dr_grpo_credit(rollouts: Rollouts, scores: Scores, *, max_tokens: int) -> Credit:
    """Dr. GRPO: as GRPO without σ, and a constant L in place of each row's length.

    1/G · Σᵢ 1/L · Σ_t: a row's length does not decide what its tokens weigh.

    Args:
        max_tokens: L.
    """
    advantage = jax.vmap(advantages.dr_grpo_advantages)(scores.reward)
    return _sequence_mean(rollouts, advantage, max_tokens)


def rloo_credit(rollouts: Rollouts, scores: Scores) -> Credit:
    """RLOO: 1/G · Σᵢ Aᵢ · Σ_t, the response being one action whose log-probability is the sum."""
    advantage = jax.vmap(advantages.rloo_advantages)(scores.reward)
    return _sequence_mean(rollouts, advantage, 1)


def dapo_credit(
    rollouts: Rollouts,
    scores: Scores,
    *,
    eps: float,
    ddof: int,
    max_tokens: int,
    cache_tokens: int,
) -> Credit:
    """DAPO: the mean over all tokens of the groups that are kept, 1/Σᵢ|yᵢ| · Σᵢ Σ_t (their eq. 8).

    Groups whose acc is all 0 or all 1 are dropped: they weigh 0 and their tokens do not count.

    Args:
        eps, ddof: see `advantages.grpo_advantages`.
        max_tokens, cache_tokens: see `advantages.overlong_penalty`.
    """
    num_tokens = rollouts.is_valid.sum(-1)
    penalty = advantages.overlong_penalty(
        num_tokens, max_tokens=max_tokens, cache_tokens=cache_tokens
    )
    advantage = jax.vmap(functools.partial(advantages.grpo_advantages, eps=eps, ddof=ddof))(
        scores.reward + penalty
    )
    is_kept = jax.vmap(advantages.is_mixed)(scores.acc)[:, None]
    advantage = jnp.where(is_kept, advantage, 0.0)
    return Credit(
        advantage=advantage,
        token_advantage=advantage[..., None] * rollouts.is_valid,
        row_weight=jnp.broadcast_to(is_kept, advantage.shape).astype(jnp.float32),
        prompt_weight=jnp.sum(num_tokens * is_kept, 1).astype(jnp.float32),
        is_trained=rollouts.is_valid & is_kept[..., None],
    )


def _sequence_mean(rollouts, advantage, length) -> Credit:
    """1/G · Σᵢ Aᵢ/length · Σ_t over a prompt's rows, and the mean over all prompts."""
    num_prompts, num_rows = advantage.shape
    return Credit(
        advantage=advantage,
        token_advantage=(advantage / length)[..., None] * rollouts.is_valid,
        row_weight=jnp.full((num_prompts, num_rows), 1 / num_rows),
        prompt_weight=jnp.ones(num_prompts),
        is_trained=rollouts.is_valid,
    )


def with_reflected_slot(
    reward: Float[Array, "B _"], acc: Float[Array, "B _"], subgroup: Subgroup
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Reward and acc with slot G, which is empty where nothing was reflected."""
    missing = subgroup.is_negative.shape[-1] + 1 - reward.shape[1]
    return tuple(jnp.pad(x, ((0, 0), (0, missing))) for x in (reward, acc))


def _over_rows(function):
    """vmap over prompts and their rows."""
    return jax.vmap(jax.vmap(function))
