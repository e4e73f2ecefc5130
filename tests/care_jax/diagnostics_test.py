import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax import credit, diagnostics
from care_jax.batch import Rollouts, Scores


def scores_of(acc, fmt):
    acc, fmt = np.array(acc, np.float32), np.array(fmt, np.float32)
    shape = (*acc.shape, 3)
    return Scores(
        acc=acc,
        fmt=fmt,
        reward=0.9 * acc + 0.1 * fmt,
        is_think=np.ones(shape, bool),
        is_answer=np.zeros(shape, bool),
        num_think=np.full(acc.shape, 2),
        num_answer=np.full(acc.shape, 1),
        has_answer=np.ones(acc.shape, bool),
    )


def rollouts_of(shape):
    return Rollouts(
        tokens=np.ones((*shape, 3), np.int32),
        is_valid=np.ones((*shape, 3), bool),
        is_forced=np.zeros((*shape, 3), bool),
        logp=-np.ones((*shape, 3), np.float32),
        embedding=np.ones((*shape, 2), np.float32),
        is_complete=np.ones(shape, bool),
    )


def care_metrics(acc, fmt, has_reflection):
    scores = scores_of(acc, fmt)
    on_device = jax.tree.map(jnp.asarray, scores)
    group = jax.tree.map(lambda x: x[:, :4], on_device)
    rollouts = jax.tree.map(jnp.asarray, rollouts_of((len(acc), 4)))
    subgroup = credit.select_subgroups(
        rollouts, group, jax.random.key(0), num_negatives=4, num_candidates=6, rule="nearest"
    )
    reflected = jnp.array(has_reflection)
    raw = credit.care_raw_advantages(
        on_device, subgroup, reflected, delta=0.1, eps=1e-6, robust=False
    )
    return diagnostics.subgroup_metrics(
        scores, jax.device_get(subgroup), jax.device_get(raw), raw.value, np.array(has_reflection)
    )


def test_rates_count_anchors_rescues_reflections_and_skips():
    acc = [[1, 0, 0, 0, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]]
    metrics = care_metrics(acc, np.ones((4, 5)), [True, True, False, False])
    assert metrics["anchor_rate"] == 0.5
    assert metrics["rescue_rate"] == metrics["skip_rate"] == 0.25
    assert metrics["reflect_rate"] == metrics["reflect_success"] == 0.5
    assert (metrics["negatives/2"], metrics["negatives/3"]) == (0.5, 0.25)


def test_signature_is_the_root_of_the_number_of_negatives():
    """Binary rewards: √3 at the anchor of three negatives, -1/√3 at each of them, α̂ = 1."""
    metrics = care_metrics([[1, 0, 0, 0, 0]], np.ones((1, 5)), [False])
    assert metrics["signature/anchor_3"] == pytest.approx(3**0.5, rel=1e-4)
    assert metrics["signature/negative_3"] == pytest.approx(-(3**-0.5), rel=1e-4)
    assert metrics["signature/alpha"] == pytest.approx(1)


def test_alpha_predicts_the_ratio_where_negatives_differ_in_format():
    metrics = care_metrics([[1, 0, 0, 0, 0]], [[1, 1, 0, 0, 0]], [False])
    assert metrics["signature/alpha"] < 0.999
    assert metrics["signature/ratio"] == pytest.approx(metrics["signature/alpha"], rel=1e-4)


def test_undefined_metrics_are_left_out():
    metrics = care_metrics([[1, 1, 1, 1, 0]], np.ones((1, 5)), [False])
    assert metrics["skip_rate"] == 1
    assert not any(
        name.startswith(("signature", "negatives", "reflect_success")) for name in metrics
    )


def test_means_leave_the_reflected_row_out_and_split_by_source():
    scores = scores_of([[1, 0, 0, 0, 1], [1, 1, 1, 1, 0]], np.ones((2, 5)))
    metrics = diagnostics.rollout_metrics(rollouts_of((2, 5)), scores, "ab", num_rollouts=4)
    assert metrics["acc"] == pytest.approx(5 / 8)
    assert (metrics["acc/a"], metrics["acc/b"]) == (0.25, 1.0)
    assert metrics["all_correct_rate"] == 0.5 and metrics["all_wrong_rate"] == 0
    assert metrics["response_tokens"] == 3 and metrics["truncated_rate"] == 0
