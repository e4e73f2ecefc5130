"""Metrics of one step's groups, from host copies of its rollouts.

Tokens, log-probabilities, embeddings and span masks of the groups are not read and may be None. A
metric that is undefined at a step (for example without any reflection) is left out.

Letters: B prompts, G rollouts per prompt, R = G + 1 rows, T tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from care_jax.batch import Groups
from care_jax.method import advantages
from care_jax.method.objective import MAX_LOG_RATIO


def rollout_metrics(groups: Groups, num_rollouts: int) -> dict[str, float]:
    """Means over the G rollouts of all prompts, without reflected rows.

    Lengths are in tokens. `acc/<source>` is the mean acc of each data source in the batch. Rollouts
    that were not judged have no acc, fmt and reward.
    """
    rollouts, scores, sources = groups.rollouts, groups.scores, groups.sources
    acc, is_judged = scores.acc[:, :num_rollouts], groups.is_judged[:, :num_rollouts]
    is_any, metrics = is_judged.any(1), {}
    if is_any.any():
        metrics = {
            name: getattr(scores, name)[:, :num_rollouts][is_judged].mean()
            for name in ("reward", "acc", "fmt")
        }
    metrics |= {
        "all_correct_rate": (((acc == 1) | ~is_judged).all(1) & is_any).mean(),
        "all_wrong_rate": (((acc == 0) | ~is_judged).all(1) & is_any).mean(),
        "think_tokens": scores.num_think[:, :num_rollouts].mean(),
        "answer_tokens": scores.num_answer[:, :num_rollouts].mean(),
        "response_tokens": rollouts.is_valid[:, :num_rollouts].sum(-1).mean(),
        "truncated_rate": 1 - rollouts.is_complete[:, :num_rollouts].mean(),
    }
    if len(set(sources)) > 1:
        for source in sorted(set(sources[is_any])):
            metrics[f"acc/{source}"] = acc[is_judged & (sources == source)[:, None]].mean()
    return {name: float(value) for name, value in metrics.items()}


def component_sums(
    components: Sequence[np.ndarray | None], num_rollouts: int
) -> dict[str, tuple[float, int]]:
    """Sum and number of each component over the G rollouts of this process's prompts.

    `components` are [B R] dicts by name, as a reward function returned them, empty where it failed;
    None without one.
    """
    values = defaultdict(list)
    for group in components:
        for row in () if group is None else group[:, :num_rollouts].flat:
            for name, value in row.items():
                values[name].append(value)
    return {name: (float(sum(found)), len(found)) for name, found in values.items()}


def component_means(sums: Sequence[Mapping[str, Sequence[float | int]]]) -> dict[str, float]:
    """`reward/<name>`, the mean of each component over the rows that have it, on all processes."""
    names = sorted({name for part in sums for name in part})
    totals = {name: np.sum([part[name] for part in sums if name in part], 0) for name in names}
    return {f"reward/{name}": float(total / count) for name, (total, count) in totals.items()}


def dapo_metrics(
    drawn: Groups, trained: Groups, num_draws: int, *, max_tokens: int, cache_tokens: int
) -> dict[str, float]:
    """DAPO's diagnostics, from all groups of `num_draws` rollout batches and those trained on.

    For the other arguments see `advantages.overlong_penalty`.
    """
    is_mixed = jax.vmap(advantages.is_mixed)
    num_kept, num_trained = (
        int(is_mixed(each.trained_scores.acc).sum()) for each in (drawn, trained)
    )
    penalty = advantages.overlong_penalty(
        drawn.rollouts.is_valid.sum(-1), max_tokens=max_tokens, cache_tokens=cache_tokens
    )
    return {
        "dynamic/tries": float(num_draws),
        "dynamic/kept_rate": num_kept / len(drawn.scores.acc),
        "dynamic/missing": float(len(trained.scores.acc) - num_trained),
        "dynamic/unused": float(num_kept - num_trained),
        "overlong_penalty": float(penalty.mean()),
    }


def mismatch_metrics(
    sampler_logp: Float[np.ndarray, "B S"],
    trainer_logp: Float[np.ndarray, "B S"],
    is_compared: Bool[np.ndarray, "B S"],
    branch: Int[np.ndarray, "B S"],
    *,
    clip_low: float,
    clip_high: float,
    has_sequence_ratio: bool = False,
) -> dict[str, float]:
    """What the trainer's forward says of sampled tokens, against what the sampler reported.

    `mismatch/kl` is the mean of e^d - d - 1, d = log π_trainer - log π_sampler: the k3 estimate of
    KL(π_sampler ‖ π_trainer) in nats, for tokens drawn at temperature 1 and top-p 1. `mean`, `p99`
    and `max` are of |π_trainer - π_sampler|. `beyond_clip` is the share of tokens whose ratio e^d,
    or with `has_sequence_ratio` that of their response, is outside the clip range.

    Args:
        sampler_logp, trainer_logp: at temperature 1, in nats; of B packed rows of S tokens.
        is_compared, branch: see `batch.TrainBatch` and `batch.TreeRows`.

    Returns:
        the metrics; none if no token is compared.
    """
    if not is_compared.any():
        return {}
    sampler, trainer = (x[is_compared].astype(np.float64) for x in (sampler_logp, trainer_logp))
    change, log_ratio = np.abs(np.exp(trainer) - np.exp(sampler)), trainer - sampler
    d = np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if has_sequence_ratio:
        response = np.arange(len(branch))[:, None] * branch.shape[1] + branch
        _, response = np.unique(response[is_compared], return_inverse=True)
        log_ratio = (np.bincount(response, log_ratio) / np.bincount(response))[response]
    lowest = np.log1p(-clip_low) if clip_low < 1 else -np.inf
    is_beyond = (log_ratio < lowest) | (log_ratio > np.log1p(clip_high))
    metrics = {
        "kl": np.mean(np.expm1(d) - d),
        "mean": change.mean(),
        "p99": np.quantile(change, 0.99),
        "max": change.max(),
        "beyond_clip": is_beyond.mean(),
    }
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


def predicted_alphas(num_negatives: int, variance: float, gap: float) -> tuple[float, float]:
    """α̂ of A_raw = α·√K' at an anchor, by eq:sqrtK-cont and by prop:ksignature, which differ.

    text      α̂ = (1 + (K'+1)·Var(r⁻)/Δ²)^(-1/2)    (eq:sqrtK-cont)
    appendix  α̂ = (1 + K'·Var(r⁻)/Δ²)^(-1/2)        (prop:ksignature),  Δ = r⁺ - mean(r⁻)

    Both are logged. With population variance and ε = 0 the text's is an identity, because
    μ_S = mean(r⁻) + Δ/(K'+1) and σ_S² = K'/(K'+1)·(Var(r⁻) + Δ²/(K'+1)). The appendix's is larger
    if Var(r⁻) > 0. Neither holds under `care.robust`. Requires K' ≥ 1 and Δ > 0.
    """
    spread = variance / gap**2
    return (1 + (num_negatives + 1) * spread) ** -0.5, (1 + num_negatives * spread) ** -0.5


def skip_rate(groups: Groups) -> float:
    """The share of prompts that give no update: every advantage is 0."""
    return float(np.mean(~(groups.credit.advantage != 0).any(1)))


def subgroup_metrics(groups: Groups) -> dict[str, float]:
    """CARE's diagnostics.

    `reflect_success` is the mean acc of the reflected rows. `reflect_first_try` is the mean acc of
    the G rollouts of the same groups. These groups are selected for having both outcomes, which
    biases it towards one half: fresh rollouts do better where most succeed, worse where few do.
    `care.reflect_mode = "resample"` measures fresh rollouts.

    `a_raw/anchor` and `a_raw/negative` are means of A_raw, before any scaling, over groups with a
    successful anchor; the negatives include a reflected failure. `variance_ratio` is R of
    fig:neg_penalty, within the step.

    `signature/*` is the √K' signature, over groups with a successful anchor and no reflected row in
    S. For binary rewards A_raw is √K' at the anchor and -1/√K' at its K' negatives (eq:sqrtK). If
    the negatives' rewards differ, the anchor's A_raw falls to α·√K', see `predicted_alphas`.
    """
    scores, subgroup, has_reflection = groups.scores, groups.subgroup, groups.has_reflection
    raw, advantage = groups.raw, groups.credit.advantage
    assert raw is not None  # CARE's groups have it
    has_update = (advantage != 0).any(1)
    num_negatives = raw.is_negative.sum(1)
    metrics = {
        "anchor_rate": np.mean(subgroup.has_update & ~subgroup.is_rescue),
        "rescue_rate": np.mean(has_update & subgroup.is_rescue),
        "reflect_rate": has_reflection.mean(),
    }
    if has_reflection.any():
        tries, is_judged = scores.acc[has_reflection], groups.is_judged[has_reflection]
        metrics["reflect_success"] = tries[:, -1].mean()
        metrics["reflect_first_try"] = tries[:, :-1][is_judged[:, :-1]].mean()
    for count in range(1, int(num_negatives[has_update].max(initial=0)) + 1):
        metrics[f"negatives/{count}"] = np.mean(has_update & (num_negatives == count))

    advantage = advantage.astype(np.float64)  # the square of a small float32 may be 0
    negatives = advantage[advantage < 0]
    positives = advantage[advantage > 0]
    if len(negatives) > 1 and len(positives) > 1 and np.ptp(positives) > 0:
        metrics["variance_ratio"] = negatives.var() / positives.var()

    is_contrasted = subgroup.has_update & ~subgroup.is_rescue & (num_negatives > 0)
    if is_contrasted.any():
        value, is_negative = raw.value[is_contrasted], raw.is_negative[is_contrasted]
        anchor = np.take_along_axis(value, subgroup.anchor[is_contrasted, None], 1)
        metrics["a_raw/anchor"] = anchor.mean()
        metrics["a_raw/negative"] = np.mean((value * is_negative).sum(1) / is_negative.sum(1))
    metrics |= {f"signature/{name}": value for name, value in _signature(groups).items()}
    return {name: float(value) for name, value in metrics.items()}


def _signature(groups: Groups) -> dict[str, float]:
    """`signature/*` of `subgroup_metrics`, by the name after the slash."""
    scores, subgroup, raw = groups.scores, groups.subgroup, groups.raw
    assert raw is not None
    signature = defaultdict(list)
    plain = subgroup.has_update & ~subgroup.is_rescue & ~raw.is_reflected.any(1)
    for group in np.flatnonzero(plain):
        anchor, negative = subgroup.anchor[group], np.flatnonzero(raw.is_negative[group])
        count, value, reward = len(negative), raw.value[group], scores.reward[group]
        if not count:
            continue
        gap = reward[anchor] - reward[negative].mean()
        if gap <= 0:
            continue
        text, appendix = predicted_alphas(count, float(reward[negative].var()), float(gap))
        signature["ratio"].append(value[anchor] / np.sqrt(count))
        signature["alpha"].append(text)
        signature["alpha_appendix"].append(appendix)
        signature[f"anchor_{count}"].append(value[anchor])
        signature[f"negative_{count}"].append(value[negative].mean())
    return {name: float(np.mean(values)) for name, values in signature.items()}
