"""Region weights and the per-token terms of the loss, for one response.

CARE weights answer tokens by 1 and the rationale of a correct row by a small γ⁺. The surrogate is
PPO's with separate lower and upper clip ranges. Terms are per token so that numerator and
denominator can be summed over microbatches and devices and divided once. T is response tokens.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Bound on log-probability differences (nats) before exp. e^20 is far beyond any clip range, so no
# meaningful ratio changes, and 0·exp(∞) cannot produce a NaN. verl uses the same bound.
MAX_LOG_RATIO = 20.0
CORRECTIONS = ("none", "truncate", "mask")  # values of rl.correction, see `correction_weight`


def region_weights(
    is_think: Bool[Array, " T"],
    is_answer: Bool[Array, " T"],
    is_response: Bool[Array, " T"],
    is_positive: Bool[Array, ""],
    *,
    gamma_pos: float | Float[Array, ""],
    gamma_neg: float = 0.0,
    gamma_share: float = 0.0,
    is_uniform: bool = False,
) -> Float[Array, " T"]:
    """The weight w_t of each token in the row's advantage (eq:token-adv).

    w = 1 in the answer;  γ⁺ in the rationale of a positive row, else γ⁻;  0 elsewhere
    w = 1 everywhere if there is no answer span, so that the policy learns from broken format

    The paper's γ⁻ is 0; in an ablation of fig:rw it is γ⁺. With a fixed γ⁺ the rationale's share of
    the credit grows with its length: with γ⁺ = 0.005 and 10 answer tokens it is 1/6 at 400
    rationale tokens and 0.5% at 10. A share ς fixes it instead:

    γ⁺ = ς / (1 - ς) · n_answer / n_think

    Args:
        is_think, is_answer: the spans, tags included; a token in both gets the answer's weight.
            `is_answer` is false everywhere if there is no well-formed answer span.
        is_response: sampled tokens. Padding and forced tokens are false and get 0.
        is_positive: acc = 1, as in alg:care; false for a pseudo-anchor.
        gamma_pos, gamma_neg: γ⁺ and γ⁻, in [0, 1].
        gamma_share: ς, in [0, 1); above 0 it replaces `gamma_pos`. n_think and n_answer count
            sampled tokens.
        is_uniform: w = 1 everywhere, regardless of the spans.
    """
    if gamma_share:
        num_think = jnp.sum(is_think & ~is_answer & is_response)
        num_answer = jnp.sum(is_answer & is_response)
        gamma_pos = gamma_share / (1 - gamma_share) * num_answer / jnp.maximum(num_think, 1)
    gamma = jnp.where(is_positive, gamma_pos, gamma_neg)
    weight = jnp.where(is_answer, 1.0, jnp.where(is_think, gamma, 0.0))
    weight = jnp.where(jnp.any(is_answer) & (not is_uniform), weight, 1.0)
    return jnp.where(is_response, weight, 0.0)


def token_advantages(
    A: Float[Array, ""], w: Float[Array, " T"], *, eps_w: float
) -> Float[Array, " T"]:
    """a_t = A·w_t / (Σ_u w_u + ε_w): the row's advantage A split by the weights (eq:token-adv).

    0 if all weights are 0, as in a row without sampled tokens, also for ε_w = 0.
    """
    return A * w / jnp.where(jnp.any(w > 0), jnp.sum(w) + eps_w, 1.0)


def clipped_surrogate(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    a: Float[Array, " T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Float[Array, " T"]:
    """min{ρ_t a_t, clip(ρ_t, 1 - low, 1 + high) a_t}, ρ_t = exp(log π_θ - log π_old) (eq:ppo).

    To be maximised. The log-ratio (nats) is clamped to ±MAX_LOG_RATIO. For a_t < 0 it is at least
    c·a_t, c = `dual_clip` (Ye et al. 2020, arXiv 1912.09729): a token that has become much more
    likely cannot dominate the update. 0: no such bound.
    """
    ratio = _ratio(logp, old_logp)
    clipped = jnp.minimum(ratio * a, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * a)
    if not dual_clip:
        return clipped
    return jnp.where(a < 0, jnp.maximum(clipped, dual_clip * a), clipped)


def sequence_log_ratio(
    logp: Float[Array, " S"],
    old_logp: Float[Array, " S"],
    is_sampled: Bool[Array, " S"],
    branch: Int[Array, " S"],
) -> Float[Array, " S"]:
    """log s = 1/|y| · Σ_t (log π_θ - log π_old): GSPO's sequence ratio, at sampled tokens.

    Zheng et al. 2025 (arXiv 2507.18071), eq. 7. Pass it to `clipped_surrogate` as `logp` with
    `old_logp` 0: then ρ_t = s, and the terms sum to min{s·A, clip(s)·A}. The gradient flows through
    the mean. verl's GSPO-token, exp(log π_θ - sg[log π_θ] + sg[log s]) at each token, is equal if A
    and the mask are the same for the whole response, as they are here.

    Args:
        logp, old_logp: as in `clipped_surrogate`, for a packed row of several responses y.
        is_sampled: sampled tokens of any y; elsewhere the result is 0.
        branch: index of the response each token belongs to, -1 outside responses.
    """
    size = branch.shape[0]
    index = jnp.where(branch < 0, size, branch)  # the extra bin collects tokens outside responses
    sums, counts = (
        jnp.zeros(size + 1).at[index].add(jnp.where(is_sampled, x, 0.0))
        for x in (logp - old_logp, jnp.ones(size))
    )
    return jnp.where(is_sampled, (sums / jnp.maximum(counts, 1))[index], 0.0)


def correction_weight(
    log_ratio: Float[Array, " T"], *, correction: str, cap: float
) -> tuple[Float[Array, " T"], Bool[Array, " T"]]:
    """v_t: weight of a token's term of the surrogate for having been drawn from μ, not from π_old.

    "truncate"  v_t = min(q_t, C)
    "mask"      v_t = q_t if 1/C ≤ q_t ≤ C, else 0,       q_t = π_old(y_t) / μ(y_t)

    μ is the distribution that the sampler drew from, temperature and nucleus applied. The minimum
    is truncated importance sampling (Ionides 2008); the mask is IcePop's (arXiv 2512.16144, eq. 1).
    v is a constant: neither probability depends on the trained parameters.

    Args:
        log_ratio: log q in nats; 0 at tokens that are not to be weighted. For one weight per
            response, the geometric mean of q, pass `sequence_log_ratio(log π_old, log μ, ...)`.
        correction: "truncate" or "mask".
        cap: C, above 1.

    Returns:
        v, and the tokens whose q the cap changed.
    """
    ratio, limit = _ratio(log_ratio, 0.0), math.log(cap)
    if correction == "truncate":
        return jnp.minimum(ratio, cap), log_ratio > limit
    is_outside = jnp.abs(log_ratio) > limit
    return jnp.where(is_outside, 0.0, ratio), is_outside


def is_clipped(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    a: Float[Array, " T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Bool[Array, " T"]:
    """Tokens whose gradient in `clipped_surrogate` is zero because of a clip."""
    ratio = _ratio(logp, old_logp)
    is_outside = ratio < 1 - clip_low
    if dual_clip:
        is_outside |= ratio > dual_clip
    return ((a > 0) & (ratio > 1 + clip_high)) | ((a < 0) & is_outside)


def k3(logp: Float[Array, " T"], ref_logp: Float[Array, " T"]) -> Float[Array, " T"]:
    """e^d - d - 1, d = log π_ref - log π_θ: the non-negative k3 estimate of KL(π_θ ‖ π_ref) (nats).

    The KL of eq:total-loss, whose estimator the paper leaves open. d is clamped to ±MAX_LOG_RATIO.
    """
    d = jnp.clip(ref_logp - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


def _ratio(logp, old_logp):
    return jnp.exp(jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))
