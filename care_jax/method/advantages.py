"""Computes the advantages of one prompt's rollouts, for CARE and its baselines.

CARE normalises rewards within the subgroup S of anchor, hard negatives and reflected rollout
(eq:care-zscore), scales the negatives down (eq:neg-scale), and equalises for missing negatives. If
no rollout succeeded, it uses the pseudo-rewards of a rescue (eq:pseudoreward).

Where the paper's text and alg:care disagree: a reflected *success* keeps its raw advantage (text),
since the loop of alg:care would negate it. The equaliser is √(K/K_S) with K_S counted after
reflection (alg:care), since the text's K' ignores the reflected row.

δ cancels in the normalisation: a pseudo-anchor gets A_raw = √K' for any δ (cor:rescue), up to ε.
`rescue_scale` reduces it.

The baselines use the whole group: GRPO (Shao et al. 2024, arXiv 2402.03300), DAPO (Yu et al. 2025,
arXiv 2503.14476), Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), RLOO (Ahmadian et al. 2024, arXiv
2402.14740). GSPO uses GRPO's advantages.

G is rollouts per prompt, R = G + 1 rows (row G is the reflected one), K the target number of
negatives, K' the number chosen, K_S the number in S, all with rewards below the anchor's.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from care_jax.batch import HostOrDevice, RawAdvantages, Subgroup

# Values of care.reflect_replaces: which reflected rows take the place of the hard negative in S.
REPLACES = ("success", "always")
# The trimmed mean drops ⌊n / TRIM_ONE_IN⌋ of n rows at each end: none below five rows.
TRIM_ONE_IN = 5


def raw_advantages(
    reward: Float[Array, " R"],
    acc: Float[Array, " R"],
    subgroup: Subgroup,
    has_reflection: Bool[Array, ""],
    *,
    delta: float,
    eps: float,
    robust: bool = False,
    reflect_replaces: str = "success",
) -> RawAdvantages:
    """The members of S, and A_raw = (r - μ_S) / (σ_S + ε) with the population σ (eq:care-zscore).

    A reflected success replaces the hard negative in S. A reflected failure is added to S, or
    replaces it too with `reflect_replaces` "always", as in the released code. A reflected row with
    0 < acc < 1 is left out; alg:care adds it as a failure. A rescue ignores the
    reflected row and uses the rewards δ (pseudo-anchor) and -δ/K' (negatives, eq:pseudoreward).
    A failure with a reward not below the anchor's, which graded rewards allow, is left out too.

    Args: see `care_advantages`.
    """
    row = jnp.arange(reward.shape[0])
    is_anchor = (row == subgroup.anchor) & subgroup.has_update
    is_negative = jnp.pad(subgroup.is_negative, (0, 1)) & subgroup.has_update

    can_reflect = has_reflection & subgroup.has_update & ~subgroup.is_rescue
    is_reflected = (row == row.shape[0] - 1) & can_reflect
    is_repair = is_reflected & (acc >= 1)
    is_failed_repair = is_reflected & (acc <= 0)
    replacing = is_repair if reflect_replaces == "success" else is_repair | is_failed_repair
    is_replaced = (row == subgroup.hard_negative) & jnp.any(replacing)

    num_chosen = jnp.maximum(jnp.sum(is_negative), 1)  # K'
    pseudo_reward = jnp.where(is_anchor, delta, -delta / num_chosen)
    reward = jnp.where(subgroup.is_rescue, pseudo_reward, reward)

    is_positive = is_anchor | is_repair
    is_below = reward < jnp.max(reward, where=is_anchor, initial=-jnp.inf)
    is_negative = ((is_negative & ~is_replaced) | is_failed_repair) & is_below
    return RawAdvantages(
        value=_normalize(reward, is_positive | is_negative, eps=eps, robust=robust),
        is_positive=is_positive,
        is_negative=is_negative,
        is_reflected=is_repair | is_failed_repair,
    )


def care_advantages(
    reward: Float[Array, " R"],
    acc: Float[Array, " R"],
    subgroup: Subgroup,
    has_reflection: Bool[Array, ""],
    *,
    K: int,
    s: float,
    s_refl: float,
    delta: float,
    eps: float,
    equalize: bool = True,
    rescue: bool = True,
    robust: bool = False,
    rescue_scale: float = 1.0,
    reflect_replaces: str = "success",
) -> Float[Array, " R"]:
    """The advantage of each row, exactly 0 for rows outside the update.

    A = A_raw             anchor, reflected success
    A = -s·|A_raw|        hard negatives                                        (eq:neg-scale)
    A = -s_refl·|A_raw|   reflected failure
    A ← √(K/K_S)·A        if 0 < K_S < K; no change if K_S = K + 1 (after a reflected failure)
    A = 0                 if K_S = 0

    Args:
        reward: r of the G rollouts and, in row G, of the reflected one.
        acc: correctness in [0, 1], same layout.
        subgroup: anchor and negatives among the G rollouts.
        has_reflection: there is a reflected row G.
        K: target number of negatives.
        s, s_refl: scales of negatives and of a reflected failure.
        delta: δ of the pseudo-rewards, > 0.
        eps: ε added to σ (eq:sigma-s).
        equalize: apply the factor √(K/K_S).
        rescue: train on groups in which no rollout succeeded; if false they get 0.
        robust: trimmed mean and median absolute deviation as μ and σ.
        rescue_scale: multiplies the advantages of a rescued group.
        reflect_replaces: one of REPLACES, see `raw_advantages`.
    """
    options = {"delta": delta, "eps": eps, "robust": robust, "reflect_replaces": reflect_replaces}
    raw = raw_advantages(reward, acc, subgroup, has_reflection, **options)
    scale = jnp.where(raw.is_reflected, s_refl, s)
    advantage = jnp.where(raw.is_negative, -scale * jnp.abs(raw.value), raw.value)

    num_negatives = jnp.sum(raw.is_negative)  # K_S
    if equalize:
        advantage *= jnp.sqrt(jnp.maximum(K / jnp.maximum(num_negatives, 1), 1.0))
    advantage *= jnp.where(subgroup.is_rescue, rescue_scale if rescue else 0.0, 1.0)
    return jnp.where(num_negatives > 0, advantage, 0.0)


def grpo_advantages(
    reward: Float[Array, " G"], is_in: Bool[Array, " G"], *, eps: float, ddof: int = 0
) -> Float[Array, " G"]:
    """A = (r - μ) / (σ + ε) over the group's judged rows, `is_in`; 0 if their rewards are equal.

    `ddof` is 0 for the population σ, 1 for the sample σ, as in EasyR1, verl and TRL.
    """
    return _normalize(reward, is_in, eps=eps, ddof=ddof)


def dr_grpo_advantages(reward: Float[Array, " G"], is_in: Bool[Array, " G"]) -> Float[Array, " G"]:
    """A = r - μ over the group's judged rows, `is_in`; exactly 0 if their rewards are equal.

    Dividing by σ would weight prompts by their difficulty.
    """
    center, has_spread = _center(reward.astype(jnp.float32), is_in)
    return jnp.where(is_in & has_spread, reward.astype(jnp.float32) - center, 0.0)


def rloo_advantages(reward: Float[Array, " G"], is_in: Bool[Array, " G"]) -> Float[Array, " G"]:
    """Aᵢ = rᵢ - 1/(n-1) · Σ_{j≠i} rⱼ = n/(n-1) · (rᵢ - μ) over n judged rows, `is_in`.

    The leave-one-out baseline does not depend on rᵢ, so the gradient is unbiased. 0 if all rewards
    are equal.
    """
    number = jnp.sum(is_in)
    return number / jnp.maximum(number - 1, 1) * dr_grpo_advantages(reward, is_in)


def overlong_penalty(
    num_tokens: Int[HostOrDevice, "*B"], *, max_tokens: int, cache_tokens: int
) -> Float[Array, "*B"]:
    """DAPO's soft overlong punishment R, added to the reward of each response y (their eq. 13).

    R = 0                                    |y| ≤ L_max - L_cache
    R = ((L_max - L_cache) - |y|)/2L_cache   up to -1/2 at L_max

    Half of theirs, as rewards are 0 to 1 here and ±1 there: at L_max it is half of a right answer.
    |y| = `num_tokens` (without the prompt), L_max = `max_tokens`, L_cache = `cache_tokens`. With
    `cache_tokens` 0 there is no penalty.
    """
    if not cache_tokens:
        return jnp.zeros(num_tokens.shape)
    return -0.5 * jnp.clip((num_tokens - (max_tokens - cache_tokens)) / cache_tokens, 0.0, 1.0)


def is_mixed(acc: Float[Array, " G"]) -> Bool[Array, ""]:
    """Whether the group has a success and a failure: DAPO drops all others.

    Tested on acc, not on the reward, which also varies with the format in an all-wrong group.
    """
    return (acc.max() >= 1) & (acc.min() <= 0)


def _normalize(reward, is_in, *, eps, robust=False, ddof=0):
    """(r - μ) / (σ + ε) over the rows in `is_in`; 0 elsewhere, and 0 if all rewards are equal.

    Equality is tested on the rewards: in floating point the σ of equal rewards is about 1e-8, and
    ε = 1e-6 is too small to hide that.
    """
    reward = reward.astype(jnp.float32)
    number = jnp.sum(is_in)
    center, has_spread = _center(reward, is_in)
    variance = jnp.sum((reward - center) ** 2, where=is_in) / jnp.maximum(number - ddof, 1)
    spread = jnp.sqrt(variance)
    if robust:
        robust_center, robust_spread = _robust_moments(reward, is_in)
        # If more than half of S has the same reward, the median absolute deviation is 0 and we use
        # the plain moments. Binary rewards with K' ≥ 2 always do so, unless a reflected success
        # splits S into two and two.
        is_defined = robust_spread > 0
        center = jnp.where(is_defined, robust_center, center)
        spread = jnp.where(is_defined, robust_spread, spread)
    # In float32 the square of a small difference is 0, and ε may be.
    is_defined = is_in & has_spread & (spread + eps > 0)
    return jnp.where(is_defined, (reward - center) / (spread + eps), 0.0)


def _center(reward, is_in):
    """The mean of the rows in `is_in`, and whether they differ."""
    center = jnp.sum(reward, where=is_in) / jnp.maximum(jnp.sum(is_in), 1)
    highest = jnp.max(reward, where=is_in, initial=-jnp.inf)
    return center, highest > jnp.min(reward, where=is_in, initial=jnp.inf)


def _robust_moments(reward, is_in):
    """Mean without the ⌊n/TRIM_ONE_IN⌋ highest and lowest of n rows; median of |r - median(r)|."""
    number = jnp.sum(is_in)
    rank = jnp.arange(reward.shape[0])
    num_trimmed = number // TRIM_ONE_IN
    is_kept = (rank >= num_trimmed) & (rank < number - num_trimmed)
    ordered = jnp.sort(jnp.where(is_in, reward, jnp.inf))
    mean = jnp.sum(ordered, where=is_kept) / jnp.maximum(jnp.sum(is_kept), 1)
    deviation = jnp.abs(reward - _median(reward, is_in))
    return mean, _median(deviation, is_in)


def _median(x, is_in):
    number = jnp.maximum(jnp.sum(is_in), 1)
    ordered = jnp.sort(jnp.where(is_in, x, jnp.inf))
    return (ordered[(number - 1) // 2] + ordered[number // 2]) / 2
