"""Selects the anchor and its hard negatives among the rollouts of one prompt.

P = {acc = 1}, F = {acc = 0}; a response with 0 < acc < 1 is in neither. The anchor is the shortest
success (sec:anchor-formation), or a random one (fig:anchor-ablation). Its hard negatives are
failures with a similar rationale: by default a diverse subset of the nearest ones, chosen by
farthest-first traversal (sec:hybrid). If P = ∅, the failure with the highest log-probability is the
pseudo-anchor (rescue). We follow alg:care in this condition; that of sec:rescue, max r close to
zero, fails for well-formatted failures.

Departures: anchor and pseudo-anchor are well-formed if possible, since a correct response without a
rationale has length 0 and the summed log-probability favours short, malformed responses. The paper
counts the pseudo-anchor in K' = min(K, |F|); we do not, so that eq:pseudoreward sums to zero.

G is rollouts per prompt, K the target number of negatives, M the number of candidates, D model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from care_jax.batch import Subgroup

RULES = ("nearest", "nearest_diverse", "mixed", "farthest", "random")
ANCHOR_RULES = ("shortest", "random")


def select_subgroup(
    acc: Float[Array, " G"],
    num_think: Int[Array, " G"],
    num_answer: Int[Array, " G"],
    logp: Float[Array, " G"],
    embedding: Float[Array, "G D"],
    *,
    K: int,
    M: int,
    rule: str = "nearest_diverse",
    anchor_rule: str = "shortest",
    is_formatted: Bool[Array, " G"] | None = None,
    rng: PRNGKeyArray | None = None,
) -> Subgroup:
    """Chooses the anchor and up to K hard negatives; ties go to the smaller index.

    anchor = argmin over P of (num_think, num_answer, index), or uniform over P with the anchor rule
    `random`;  in a rescue (P = ∅, |F| ≥ 2) argmax over F of logp.  P and F are restricted to their
    well-formed responses, if any, for this choice.  dᵢ = 1 - hᵢ·h₊, hᵢ of unit length (eq:cosdist).
    K' = min(K, |F \\ {anchor}|).

    Rules: `nearest`, the K' with the smallest d; `nearest_diverse`, farthest-first among the M
    nearest, starting from the nearest; `mixed`, the ⌈K'/2⌉ nearest and the ⌊K'/2⌋ farthest;
    `farthest`, the K' with the largest d; `random`, uniform without replacement. The paper compares
    them in fig:selection_side_by_side.

    Args:
        acc: correctness in [0, 1].
        num_think, num_answer: tokens between the tags.
        logp: log-probability of the whole response under the sampling policy (nats).
        embedding: embedding of each rationale; its norm does not matter.
        K: target number of negatives.
        M: candidates of `nearest_diverse`, at least K.
        rule: one of RULES.
        anchor_rule: one of ANCHOR_RULES.
        is_formatted: well-formed responses, preferred as anchor and pseudo-anchor; None means all.
        rng: key for the `random` rules, one per prompt.

    Raises:
        ValueError: unknown rule, `random` without rng, K < 1 or M < K.
    """
    for name, chosen, known in (("rule", rule, RULES), ("anchor_rule", anchor_rule, ANCHOR_RULES)):
        if chosen not in known:
            raise ValueError(f"unknown {name} {chosen!r}; choose one of {', '.join(known)}")
        if chosen == "random" and rng is None:
            raise ValueError(f"{name} 'random' needs a key, got rng=None; pass one per prompt")
    if K < 1:
        raise ValueError(f"K {K} negatives must be at least 1; set K to 1 or more")
    if rule == "nearest_diverse" and M < K:
        raise ValueError(f"M {M} candidates must hold K {K} negatives; set M to at least {K}")

    is_success, is_failure = acc >= 1, acc <= 0
    has_anchor = jnp.any(is_success)
    is_rescue = ~has_anchor & (jnp.sum(is_failure) >= 2)

    if is_formatted is None:
        is_formatted = jnp.ones(acc.shape, bool)
    order = num_answer, num_think
    if anchor_rule == "random":
        # Split only here: with `shortest`, the random negatives use the key unsplit.
        assert rng is not None  # refused above
        anchor_rng, rng = jax.random.split(rng)
        order = (jax.random.uniform(anchor_rng, acc.shape),)
    anchor = jnp.where(
        has_anchor,
        jnp.lexsort((*order, ~is_formatted, ~is_success))[0],
        jnp.lexsort((-logp, ~is_formatted, ~is_failure))[0],
    )
    is_eligible = is_failure & (jnp.arange(acc.shape[0]) != anchor)
    num_negatives = jnp.minimum(K, jnp.sum(is_eligible))  # K'

    distance = _cosine_distance(embedding)
    to_anchor = distance[anchor]
    is_negative = _choose(
        to_anchor, distance, is_eligible, num_negatives, K=K, M=M, rule=rule, rng=rng
    )
    return Subgroup(
        anchor=anchor,
        is_negative=is_negative,
        hard_negative=jnp.argmin(jnp.where(is_negative, to_anchor, jnp.inf)),
        is_rescue=is_rescue,
        has_update=num_negatives > 0,
    )


def _choose(to_anchor, distance, is_eligible, num_negatives, *, K, M, rule, rng):
    """Mask of the negatives chosen by one rule."""
    match rule:
        case "nearest":
            return _least(to_anchor, is_eligible, num_negatives)
        case "farthest":
            return _least(-to_anchor, is_eligible, num_negatives)
        case "random":
            return _least(jax.random.uniform(rng, to_anchor.shape), is_eligible, num_negatives)
        case "mixed":
            num_far = num_negatives // 2
            is_near = _least(to_anchor, is_eligible, num_negatives - num_far)
            return is_near | _least(-to_anchor, is_eligible & ~is_near, num_far)
        case _:  # nearest_diverse
            is_candidate = _least(to_anchor, is_eligible, M)
            return _farthest_first(to_anchor, distance, is_candidate, num_negatives, K=K)


def _farthest_first(to_anchor, distance, is_candidate, num_negatives, *, K):
    """Starts with the nearest candidate, then adds the one farthest from the chosen set."""
    index = jnp.arange(to_anchor.shape[0])
    is_chosen = _least(to_anchor, is_candidate, jnp.minimum(1, num_negatives))
    for num_chosen in range(1, min(K, len(index) - 1)):  # the anchor is no candidate
        to_chosen = jnp.min(jnp.where(is_chosen, distance, jnp.inf), axis=1)
        farthest = jnp.argmax(jnp.where(is_candidate & ~is_chosen, to_chosen, -jnp.inf))
        is_chosen |= (index == farthest) & (num_chosen < num_negatives)
    return is_chosen


def _least(score, is_eligible, number):
    """Mask of the `number` eligible entries with the lowest score, ties by index."""
    rank = jnp.argsort(jnp.lexsort((score, ~is_eligible)))
    return is_eligible & (rank < number)


def _cosine_distance(embedding):
    """1 - hᵢ·hⱼ of unit vectors; float32 at any matmul precision. Zero vectors give 1."""
    h = embedding.astype(jnp.float32)
    h *= jax.lax.rsqrt(jnp.maximum(jnp.sum(h * h, axis=1, keepdims=True), 1e-12))
    return 1 - jnp.einsum("GD,ND->GN", h, h, precision="highest")
