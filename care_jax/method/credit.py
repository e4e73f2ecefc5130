"""Computes each objective's token advantages and loss weights from a batch's scores.

The pure functions of `select`, `advantages` and `objective` are written for one prompt or response
and vmapped here. Row and prompt weights express how an objective averages its loss, see
`batch.TrainBatch`.

Letters: B prompts, G rollouts per prompt, R rows (G + 1 with a reflected slot), T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from care_jax.batch import Credit, HostOrDevice, RawAdvantages, Rollouts, Scores, Subgroup
from care_jax.method import advantages, objective
from care_jax.method.select import select_subgroup

MEANS = ("prompt", "batch", "tokens")  # values of care.mean, see `care_credit`
SUCCESSES = ("acc", "reward")  # of care.success, see `success_of`
KL_ROWS = ("subgroup", "all")  # of care.kl_rows: the rows whose KL to the reference is counted


@dataclasses.dataclass(frozen=True)
class CareSettings:
    """CARE's settings; see `advantages.care_advantages` and `objective.region_weights`."""

    K: int
    s: float
    s_refl: float
    delta: float
    eps: float
    equalize: bool
    rescue: bool
    rescue_scale: float
    robust: bool
    region_weights: bool  # weight tokens by their span; if false all sampled tokens have weight 1
    gamma_pos: float
    gamma_neg: float
    gamma_share: float
    eps_w: float  # ε_w of `objective.token_advantages`
    mean: str  # one of MEANS
    kl_rows: str  # one of KL_ROWS
    success: str  # one of SUCCESSES
    reflect_replaces: str  # one of advantages.REPLACES

    def only(self, *names: str) -> dict[str, Any]:
        """Some of the settings, as keyword arguments."""
        return {name: getattr(self, name) for name in names}


def select_subgroups(
    rollouts: Rollouts,
    scores: Scores,
    rngs: Key[Array, " B"],
    *,
    K: int,
    M: int,
    rule: str,
    anchor_rule: str,
    success: str,
) -> Subgroup:
    """Anchor and hard negatives of each prompt, from its G rollouts; `rngs`: one key per prompt."""
    select = functools.partial(select_subgroup, K=K, M=M, rule=rule, anchor_rule=anchor_rule)
    lengths = scores.num_think, scores.num_answer
    rows = success_of(scores, success), *lengths, rollouts.logp.sum(-1), rollouts.embedding

    def one(rows, is_formatted, rng):
        return select(*rows, is_formatted=is_formatted, rng=rng)

    return jax.vmap(one)(rows, scores.fmt == 1, rngs)


def success_of(scores: Scores, rule: str) -> Float[HostOrDevice, "B R"]:
    """1 for a success, 0 for a failure: acc, or by `reward` whether the reward is above 0.

    By the latter, the released code's rule, a wrong answer in the right format is a success. What
    was not judged (`Groups.trained_scores`) is neither.
    """
    if rule == "acc":
        return scores.acc
    return jnp.where(is_judged(scores), (scores.reward > 0).astype(jnp.float32), scores.acc)


def is_judged(scores: Scores) -> Bool[HostOrDevice, "B R"]:
    """False where `Groups.trained_scores` has neither a success nor a failure."""
    return (scores.acc == 0) | (scores.acc == 1)


def care_credit(
    rollouts: Rollouts,
    scores: Scores,
    subgroup: Subgroup,
    has_reflection: Bool[Array, " B"],
    settings: CareSettings,
) -> Credit:
    """CARE: advantages within the subgroup, region weights, mean over S* = {A ≠ 0} (eq:ppo).

    Slot G is the reflected row, unused where `has_reflection` is false. R may be G if no prompt
    has a reflected row.

    Means: "prompt", over each prompt's S*, then over prompts; "batch", over the rows of all S*;
    "tokens", over the sampled tokens of all rows, in S* or not, as in the released code.
    sqrt(K / K') gives every prompt's rows the same Σ|A|, which the last two keep; the first divides
    it by |S*| again.
    """
    num_rows = scores.reward.shape[1]
    success = success_of(scores, settings.success)
    reward, acc = with_reflected_slot(scores.reward, success, subgroup)
    names = ("K", "s", "s_refl", "delta", "eps", "equalize", "rescue", "rescue_scale", "robust")
    names += ("reflect_replaces",)
    advantages_of = functools.partial(advantages.care_advantages, **settings.only(*names))
    advantage = jax.vmap(advantages_of)(reward, acc, subgroup, has_reflection)[:, :num_rows]
    is_sampled = rollouts.is_valid & ~rollouts.is_forced
    weights_of = functools.partial(
        objective.region_weights,
        is_uniform=not settings.region_weights,
        **settings.only("gamma_pos", "gamma_neg", "gamma_share"),
    )
    spans = scores.is_think, scores.is_answer, is_sampled
    weights = _over_rows(weights_of)(*spans, success == 1)
    shared_out = functools.partial(objective.token_advantages, eps_w=settings.eps_w)
    in_subgroup = advantage != 0
    is_trained = is_sampled & is_judged(scores)[..., None]
    row_weight, prompt_weight = _mean_weights(
        settings.mean, in_subgroup, num_tokens=is_trained.sum((1, 2))
    )
    if settings.kl_rows == "subgroup":
        is_trained = is_trained & in_subgroup[..., None]
    return Credit(
        advantage=advantage,
        token_advantage=_over_rows(shared_out)(advantage, weights),
        row_weight=row_weight,
        prompt_weight=prompt_weight,
        is_trained=is_trained,
    )


def _mean_weights(
    mean: str, in_subgroup: Bool[Array, "B R"], *, num_tokens: Int[Array, " B"]
) -> tuple[Float[Array, "B R"], Float[Array, " B"]]:
    """Row and prompt weights of one of MEANS, see `care_credit`; `num_tokens`: sampled ones."""
    members = in_subgroup.astype(jnp.float32)
    num_members = members.sum(-1)
    if mean == "prompt":
        prompt_weight = (num_members > 0).astype(jnp.float32)
        return members / jnp.maximum(num_members, 1)[:, None], prompt_weight
    return members, num_members if mean == "batch" else num_tokens.astype(jnp.float32)


def care_raw_advantages(
    scores: Scores, subgroup: Subgroup, has_reflection: Bool[Array, " B"], settings: CareSettings
) -> RawAdvantages:
    """A_raw of every prompt's R = G + 1 rows, for the diagnostics."""
    names = ("delta", "eps", "robust", "reflect_replaces")
    one = functools.partial(advantages.raw_advantages, **settings.only(*names))
    success = success_of(scores, settings.success)
    reward, acc = with_reflected_slot(scores.reward, success, subgroup)
    return jax.vmap(one)(reward, acc, subgroup, has_reflection)


def grpo_credit(rollouts: Rollouts, scores: Scores, *, eps: float, ddof: int) -> Credit:
    """GRPO: the whole group, uniform token weights, mean over sequences of token means."""
    advantages_of = functools.partial(advantages.grpo_advantages, eps=eps, ddof=ddof)
    num_tokens = jnp.maximum(rollouts.is_valid.sum(-1), 1)
    return _sequence_mean(rollouts, scores, advantages_of, num_tokens)


def dr_grpo_credit(rollouts: Rollouts, scores: Scores, *, max_tokens: int) -> Credit:
    """Dr. GRPO: 1/G · Σᵢ Aᵢ/L · Σ_t, without σ and with L = `max_tokens` for every row's length.

    A token's weight does not depend on the length of its row.
    """
    return _sequence_mean(rollouts, scores, advantages.dr_grpo_advantages, max_tokens)


def rloo_credit(rollouts: Rollouts, scores: Scores) -> Credit:
    """RLOO: 1/G · Σᵢ Aᵢ · Σ_t. A response is one action: its token log-probabilities are summed."""
    return _sequence_mean(rollouts, scores, advantages.rloo_advantages, 1)


def dapo_credit(
    rollouts: Rollouts, scores: Scores, *, eps: float, ddof: int, max_tokens: int, cache_tokens: int
) -> Credit:
    """DAPO: mean over all tokens of the kept groups, 1/Σᵢ|yᵢ| · Σᵢ Σ_t (their eq. 8).

    Groups whose acc is all 0 or all 1 are dropped: weight 0, and no tokens in the denominator. For
    the arguments see `advantages.grpo_advantages` and `advantages.overlong_penalty`.
    """
    num_tokens = rollouts.is_valid.sum(-1)
    penalty = advantages.overlong_penalty(
        num_tokens, max_tokens=max_tokens, cache_tokens=cache_tokens
    )
    advantages_of = functools.partial(advantages.grpo_advantages, eps=eps, ddof=ddof)
    advantage = jax.vmap(advantages_of)(scores.reward + penalty, is_judged(scores))
    is_kept = jax.vmap(advantages.is_mixed)(scores.acc)[:, None] & is_judged(scores)
    advantage = jnp.where(is_kept, advantage, 0.0)
    return Credit(
        advantage=advantage,
        token_advantage=advantage[..., None] * rollouts.is_valid,
        row_weight=is_kept.astype(jnp.float32),
        prompt_weight=jnp.sum(num_tokens * is_kept, 1).astype(jnp.float32),
        is_trained=rollouts.is_valid & is_kept[..., None],
    )


def _sequence_mean(rollouts, scores, advantages_of, length) -> Credit:
    """1/G · Σᵢ 1/length · Σ_t over a prompt's G judged rows, then the mean over all prompts."""
    is_in = is_judged(scores)
    advantage = jax.vmap(advantages_of)(scores.reward, is_in)
    num_rows = jnp.maximum(is_in.sum(1, keepdims=True), 1)
    return Credit(
        advantage=advantage,
        token_advantage=advantage[..., None] * rollouts.is_valid,
        row_weight=jnp.where(is_in, 1 / (num_rows * length), 0.0).astype(jnp.float32),
        prompt_weight=is_in.any(1).astype(jnp.float32),
        is_trained=rollouts.is_valid & is_in[..., None],
    )


def with_gradient(credit: Credit) -> Credit:
    """The credit without training on rows whose advantage is 0, for a loss without a KL term.

    They stay in its denominator, but have no gradient and need not be computed.
    """
    is_trained = credit.is_trained & (credit.advantage != 0)[..., None]
    return dataclasses.replace(credit, is_trained=is_trained)


def with_reflected_slot(
    reward: Float[Array, "B _"], acc: Float[Array, "B _"], subgroup: Subgroup
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Reward and acc with row G, zero-padded if the batch has no reflected rows."""
    missing = subgroup.is_negative.shape[-1] + 1 - reward.shape[1]
    reward, acc = (jnp.pad(x, ((0, 0), (0, missing))) for x in (reward, acc))
    return reward, acc


def _over_rows(function: Callable[..., Array]) -> Callable[..., Array]:
    """vmap over prompts, then rows."""
    return jax.vmap(jax.vmap(function))
