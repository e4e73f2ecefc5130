"""Where in a response the advantage lands, and the loss's terms per token, for one response.

CARE puts a row's credit on its answer and, faintly, on the rationale of a correct row; the
surrogate is PPO's with its own bound on either side. The terms are per token so that numerator and
denominator can be summed over microbatches and devices and divided once. T is response tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Bound on differences of log-probabilities (nats) before exp: e^20 is far beyond any clip range, so
# no number that counts is changed, but 0·exp(∞) cannot make a NaN. verl has the same.
MAX_LOG_RATIO = 20.0


def region_weights(
    is_think: Bool[Array, " T"],
    is_answer: Bool[Array, " T"],
    is_response: Bool[Array, " T"],
    is_positive: Bool[Array, ""],
    *,
    gamma_pos: float,
    gamma_neg: float = 0.0,
    is_uniform: bool = False,
) -> Float[Array, " T"]:
    """The weight of each token in its row's credit.

    w = 1 in the answer;  γ⁺ in the rationale of a positive row, γ⁻ in that of another;  0 elsewhere
    w = 1 everywhere where there is no answer, so that broken format is learned from

    The paper's γ⁻ is 0.

    Args:
        is_think, is_answer: the spans, tags included; a token in both is the answer's. No answer
            token says that the response has no well-formed answer.
        is_response: tokens that were sampled: padding and forced tokens are false and get 0.
        is_positive: the verifier accepted this row (acc = 1).
        gamma_pos, gamma_neg: γ⁺ and γ⁻, in [0, 1].
        is_uniform: w = 1 everywhere, whatever the regions.
    """
    gamma = jnp.where(is_positive, gamma_pos, gamma_neg)
    weight = jnp.where(is_answer, 1.0, jnp.where(is_think, gamma, 0.0))
    weight = jnp.where(jnp.any(is_answer) & (not is_uniform), weight, 1.0)
    return jnp.where(is_response, weight, 0.0)


def token_advantages(
    A: Float[Array, ""], w: Float[Array, " T"], *, eps_w: float
) -> Float[Array, " T"]:
    """a_t = A·w_t / (Σ_u w_u + ε_w): the row's advantage A shared out by the weights."""
    return A * w / (jnp.sum(w) + eps_w)


def clipped_surrogate(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    a: Float[Array, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, " T"]:
    """min{ρ_t a_t, clip(ρ_t, 1 - low, 1 + high) a_t}, ρ_t = exp(log π_θ - log π_old).

    To be maximised. The log-ratio is held within ±MAX_LOG_RATIO.

    Args:
        logp: under the policy that is trained (nats).
        old_logp: under the policy that sampled (nats); a constant.
        a: token advantages; a constant.
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
    """
    ratio = _ratio(logp, old_logp)
    return jnp.minimum(ratio * a, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * a)


def sequence_log_ratio(
    logp: Float[Array, " S"],
    old_logp: Float[Array, " S"],
    is_sampled: Bool[Array, " S"],
    branch: Int[Array, " S"],
) -> Float[Array, " S"]:
    """log s = 1/|y| · Σ_t (log π_θ - log π_old): GSPO's one ratio, at every sampled token (eq. 7).

    Given to `clipped_surrogate` as `logp`, with 0 as `old_logp`, ρ_t becomes s, and its terms sum
    to min{s·A, clip(s)·A}. The gradient goes through the mean, as in the paper (Zheng et al. 2025,
    arXiv 2507.18071); GSPO-token, exp(log π_θ - sg[log π_θ] + sg[log s]) at each token, is what
    verl has: both are equal where A and mask are those of the whole response, as they are here.

    Args:
        logp, old_logp: see `clipped_surrogate`; of a row of several responses y.
        is_sampled: tokens of some y; elsewhere the result is 0.
        branch: number of the response that each token belongs to, -1 off responses.
    """
    size = branch.shape[0]
    place = jnp.where(branch < 0, size, branch)  # the last sum takes what belongs to none
    sums, counts = (
        jnp.zeros(size + 1).at[place].add(jnp.where(is_sampled, x, 0.0))
        for x in (logp - old_logp, jnp.ones(size))
    )
    return jnp.where(is_sampled, (sums / jnp.maximum(counts, 1))[place], 0.0)


def is_clipped(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    a: Float[Array, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Bool[Array, " T"]:
    """The tokens of `clipped_surrogate` that the clip keeps from moving on (no gradient)."""
    ratio = _ratio(logp, old_logp)
    return ((a > 0) & (ratio > 1 + clip_high)) | ((a < 0) & (ratio < 1 - clip_low))


def k3(logp: Float[Array, " T"], ref_logp: Float[Array, " T"]) -> Float[Array, " T"]:
    """e^d - d - 1, d = log π_ref - log π_θ: a non-negative estimate of KL(π_θ ‖ π_ref) (nats).

    d is held within ±MAX_LOG_RATIO.
    """
    d = jnp.clip(ref_logp - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


def _ratio(logp, old_logp):
    return jnp.exp(jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))
