import functools

import jax
import numpy as np
import pytest

from care_jax.batch import Credit, Groups, Rollouts, Scores
from care_jax.method import credit, diagnostics


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


select = jax.jit(
    functools.partial(
        credit.select_subgroups,
        K=4,
        M=6,
        rule="nearest",
        anchor_rule="shortest",
        success="acc",
    )
)
CARE = credit.CareSettings(
    *(4, 1.0, 1.0, 0.1, 1e-6),  # K, s, s_refl, delta, eps
    *(True, True, 1.0, False),  # equalize, rescue, rescue_scale, robust
    *(True, 0.0, 0.0, 0.0, 1e-6),  # region_weights, gamma_pos, gamma_neg, gamma_share, eps_w
    *("prompt", "subgroup", "acc", "success"),  # mean, kl_rows, success, reflect_replaces
)
raw_advantages = jax.jit(functools.partial(credit.care_raw_advantages, settings=CARE))


def care_metrics(acc, fmt, has_reflection, advantage=None):
    """Of a batch whose advantages are the raw ones, or those given."""
    scores = scores_of(acc, fmt)
    group = jax.tree.map(lambda x: x[:, :4], scores)
    subgroup = select(
        rollouts_of((len(acc), 4)), group, jax.random.split(jax.random.key(0), len(acc))
    )
    raw = raw_advantages(scores, subgroup, np.array(has_reflection))
    subgroup, raw = jax.device_get((subgroup, raw))
    advantage = raw.value if advantage is None else np.array(advantage, np.float32)
    groups = Groups(
        scores=scores,
        subgroup=subgroup,
        has_reflection=np.array(has_reflection),
        credit=Credit(advantage, None, None, None, None),
        raw=raw,
    )
    return diagnostics.subgroup_metrics(groups) | {"skip_rate": diagnostics.skip_rate(groups)}


def test_rates_count_anchors_rescues_reflections_and_skips():
    acc = [[1, 0, 0, 0, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]]
    metrics = care_metrics(acc, np.ones((4, 5)), [True, True, False, False])
    assert metrics["anchor_rate"] == 0.5
    assert metrics["rescue_rate"] == metrics["skip_rate"] == 0.25
    assert metrics["reflect_rate"] == metrics["reflect_success"] == 0.5
    assert (metrics["negatives/2"], metrics["negatives/3"]) == (0.5, 0.25)
    # Of the two groups that were reflected: 1 and 3 of 4.
    assert metrics["reflect_first_try"] == 0.5


@pytest.mark.parametrize("reflected_slot", [[0], []])
def test_signature_is_the_root_of_the_number_of_negatives(reflected_slot):
    """Binary rewards: √3 at the anchor of three negatives, -1/√3 at each of them, α̂ = 1.

    Where nothing is ever reflected there is no slot for it.
    """
    acc = [[1, 0, 0, 0, *reflected_slot]]
    metrics = care_metrics(acc, np.ones((1, len(acc[0]))), [False])
    assert metrics["signature/anchor_3"] == pytest.approx(3**0.5, rel=1e-4)
    assert metrics["signature/negative_3"] == pytest.approx(-(3**-0.5), rel=1e-4)
    assert metrics["signature/alpha"] == pytest.approx(1)


def test_alpha_predicts_the_ratio_where_negatives_differ_in_format():
    metrics = care_metrics([[1, 0, 0, 0, 0]], [[1, 1, 0, 0, 0]], [False])
    assert metrics["signature/alpha"] < 0.999
    assert metrics["signature/ratio"] == pytest.approx(metrics["signature/alpha"], rel=1e-4)
    assert metrics["signature/alpha"] < metrics["signature/alpha_appendix"] < 1


def test_signature_leaves_out_failures_that_the_reward_does_not_put_below_the_anchor():
    """Of the three, the first is rewarded like the anchor, as a function's components may do."""
    acc, fmt = [[1, 0, 0, 0]], [[0, 10, 1, 0]]  # the reward is 0.9 acc + 0.1 fmt
    metrics = care_metrics([[*acc[0], 0]], [[*fmt[0], 0]], [False])
    assert "signature/anchor_2" in metrics and "signature/anchor_3" not in metrics
    assert metrics["signature/ratio"] == pytest.approx(metrics["signature/alpha"], rel=1e-4)


def test_the_two_formulas_of_alpha_by_hand():
    """K' = 3, Var(r⁻) = 0.06, Δ = 0.6: 1 + 4/6 and 1 + 3/6."""
    text, appendix = diagnostics.predicted_alphas(3, 0.06, 0.6)
    assert text == pytest.approx((5 / 3) ** -0.5)
    assert appendix == pytest.approx(1.5**-0.5)
    assert diagnostics.predicted_alphas(3, 0.0, 0.6) == (1.0, 1.0)


def test_the_formula_of_the_text_is_an_identity_and_that_of_the_appendix_is_not():
    """Rewards 1, 0.6, 0.3, 0: mean 0.3 and variance 0.06 of the negatives, Δ = 0.7."""
    rewards = np.array([1, 0.6, 0.3, 0])
    a_raw = (rewards - rewards.mean()) / rewards.std()
    text, appendix = diagnostics.predicted_alphas(3, 0.06, 0.7)
    assert a_raw[0] / 3**0.5 == pytest.approx(text)
    assert appendix > text + 0.02


@pytest.mark.parametrize(("spread", "tolerance"), [(0.1, 0.004), (0.2, 0.013), (0.3, 0.025)])
@pytest.mark.parametrize("num_negatives", [2, 4, 7])
def test_the_formula_of_the_appendix_is_a_mean_over_independent_negatives(
    num_negatives, spread, tolerance
):
    """prop:ksignature: Δ = 1; negatives are uniform, of standard deviation `spread`."""
    bound = 3**0.5 * spread
    negatives = np.random.default_rng(0).uniform(-bound, bound, (100_000, num_negatives))
    rewards = np.concatenate([np.ones((len(negatives), 1)), negatives], 1)
    a_raw = (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)
    text, appendix = diagnostics.predicted_alphas(num_negatives, spread**2, 1.0)
    for found in (a_raw[:, 0] / num_negatives**0.5, -a_raw[:, 1:] * num_negatives**0.5):
        assert found.mean() == pytest.approx(appendix, abs=tolerance)
        assert abs(found.mean() - appendix) < abs(found.mean() - text)


def test_a_raw_of_anchor_and_negatives_are_means_over_contrasted_groups():
    """Rewards 1 and 0.1, 0.1, 0 and of a reflected failure 0: mean .24, σ² = 0.1464.

    Two successes, a failure at 0.1 and no reflection: 1 and -1.
    """
    acc = [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]]
    fmt = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    metrics = care_metrics(acc, fmt, [True, False, False, False])
    sigma = 0.1464**0.5
    assert metrics["a_raw/anchor"] == pytest.approx((0.76 / sigma + 1) / 2, rel=1e-4)
    assert metrics["a_raw/negative"] == pytest.approx((-0.19 / sigma - 1) / 2, rel=1e-4)


def test_signature_leaves_out_reflected_and_rescued_groups():
    reflected = care_metrics([[1, 0, 0, 0, 0]], np.ones((1, 5)), [True])
    rescued = care_metrics([[0, 0, 0, 0, 0]], [[1, 0, 0, 0, 0]], [False])
    assert reflected["reflect_rate"] == rescued["rescue_rate"] == 1
    assert not any(name.startswith("signature") for name in {**reflected, **rescued})


def test_groups_whose_advantages_are_zero_are_skipped_and_count_nowhere_else():
    acc = [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]]
    advantage = np.array([[3, -1, -1, -1, 0]] + [[0] * 5] * 3)
    metrics = care_metrics(acc, np.ones((4, 5)), [False] * 4, advantage)
    assert (metrics["skip_rate"], metrics["rescue_rate"]) == (0.75, 0)
    assert metrics["negatives/3"] == 0.25


def test_variance_ratio_is_that_of_negative_to_positive_advantages():
    """Of -1, -4 and 2, 3: (9/4) / (1/4)."""
    advantage = [[2, -1, -4, 0, 3]]
    metrics = care_metrics([[1, 0, 0, 0, 1]], np.ones((1, 5)), [True], advantage)
    assert metrics["variance_ratio"] == pytest.approx(9)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_variance_ratio_of_advantages_whose_squares_leave_float32(scale):
    advantage = scale * np.array([[2.0, -1, -4, 0, 3]])
    metrics = care_metrics([[1, 0, 0, 0, 1]], np.ones((1, 5)), [True], advantage)
    assert metrics["variance_ratio"] == pytest.approx(9)


def test_undefined_metrics_are_left_out():
    metrics = care_metrics([[1, 1, 1, 1, 0]], np.ones((1, 5)), [False])
    assert metrics["skip_rate"] == 1
    assert not any(
        name.startswith(("signature", "negatives", "reflect_success")) for name in metrics
    )


def test_means_leave_the_reflected_row_out_and_split_by_source():
    """Every number of the reflected row is one that its group has nowhere else."""
    scores = scores_of([[1, 0, 0, 0, 1], [1, 1, 1, 1, 0]], [[1, 1, 1, 0, 1], [1, 1, 1, 1, 0]])
    rollouts = rollouts_of((2, 5))
    scores.num_think[:, 4], scores.num_answer[:, 4] = 30, 40
    rollouts.is_valid[:, 4, 2], rollouts.is_complete[:, 4] = False, False
    rollouts.is_complete[0, 0] = False
    groups = Groups(rollouts=rollouts, scores=scores, sources=np.array(["a", "b"], object))
    metrics = diagnostics.rollout_metrics(groups, num_rollouts=4)
    assert metrics["acc"] == pytest.approx(5 / 8)
    assert metrics["fmt"] == pytest.approx(7 / 8)
    assert metrics["reward"] == pytest.approx((0.9 * 5 + 0.1 * 7) / 8)
    assert (metrics["acc/a"], metrics["acc/b"]) == (0.25, 1.0)
    assert metrics["all_correct_rate"] == 0.5 and metrics["all_wrong_rate"] == 0
    assert (metrics["think_tokens"], metrics["answer_tokens"]) == (2, 1)
    assert (metrics["response_tokens"], metrics["truncated_rate"]) == (3, 1 / 8)


def test_what_was_not_judged_has_no_acc():
    """Row 0 of the first group; the second group was not judged at all."""
    scores = scores_of([[0, 1, 1], [0, 0, 0]], [[0, 1, 1], [0, 0, 0]])
    components = np.array([[{}, {"acc": 1}, {"acc": 1}], [{}, {}, {}]], object)
    names = np.array(["a", "b"], object)
    groups = Groups(rollouts=rollouts_of((2, 3)), scores=scores, sources=names)
    metrics = diagnostics.rollout_metrics(groups.replace(components=components), num_rollouts=3)
    assert (metrics["acc"], metrics["fmt"], metrics["reward"]) == (1, 1, 1)
    assert (metrics["all_correct_rate"], metrics["all_wrong_rate"]) == (0.5, 0)
    assert metrics["acc/a"] == 1 and "acc/b" not in metrics


def test_dapo_counts_what_was_drawn_kept_and_missing_and_what_length_cost():
    """Five groups drawn, three of them mixed; of three places one holds none, so one is unused."""
    drawn = scores_of([[1, 0], [1, 1], [0, 0], [0, 1], [1, 0]], np.ones((5, 2)))
    trained = scores_of([[1, 0], [0, 0], [0, 1]], np.ones((3, 2)))
    rollouts = rollouts_of((5, 2))
    rollouts.is_valid[0, 0, 2] = False
    limits = dict(max_tokens=4, cache_tokens=2)
    drawn, trained = Groups(rollouts=rollouts, scores=drawn), Groups(scores=trained)
    metrics = diagnostics.dapo_metrics(drawn, trained, 2, **limits)
    assert metrics == {
        "dynamic/tries": 2,
        "dynamic/kept_rate": 0.6,
        "dynamic/missing": 1,
        "dynamic/unused": 1,
        # Rows of three tokens lose a quarter, the one of two nothing.
        "overlong_penalty": pytest.approx(-0.225),
    }


def test_components_are_means_over_the_rollouts_that_have_them_on_all_processes():
    """Reflected rows, the last, are left out, and rows whose reward function failed."""
    one = np.array([[{"a": 1.0, "b": 0.5}, {}, {"a": 0.0}], [{"a": 0.0}, {"a": 0.5}, {}]], object)
    other = np.array([[{"b": 0.0}, {"c": 1.0}, {"c": 0.0}]], object)
    sums = diagnostics.component_sums([one, other], num_rollouts=2)
    assert sums == {"a": (1.5, 3), "b": (0.5, 2), "c": (1.0, 1)}
    assert diagnostics.component_means([sums, {"a": (0.5, 1)}, {}]) == {
        "reward/a": 0.5, "reward/b": 0.25, "reward/c": 1.0
    }  # fmt: skip
    assert diagnostics.component_means([diagnostics.component_sums([], 2)]) == {}


# Probabilities of the sampler and the trainer; the third token is not compared.
SAMPLED = np.array([[0.5, 0.4, 0.1, 0.2], [0.9, 0.0, 0.8, 0.5]])
TRAINED = np.array([[0.4, 0.5, 0.9, 0.3], [0.9, 0.0, 0.2, 0.6]])
IS_COMPARED = np.array([[1, 1, 0, 1], [1, 0, 1, 1]], bool)
BRANCH = np.array([[0, 0, 0, 1], [0, -1, 1, 1]])


def mismatch(**options):
    logp = (np.log(np.maximum(p, 1e-9)).astype(np.float32) for p in (SAMPLED, TRAINED))
    options = {"clip_low": 0.19, "clip_high": 0.24, **options}
    return diagnostics.mismatch_metrics(*logp, IS_COMPARED, BRANCH, **options)


def test_mismatch_by_hand():
    """Six tokens are compared, with differences of 0.1, 0.1, 0.1, 0, 0.6 and 0.1."""
    metrics = mismatch()
    ratios = np.array([0.8, 1.25, 1.5, 1, 0.25, 1.2])
    assert metrics["mismatch/kl"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)), rel=1e-5)
    assert metrics["mismatch/mean"] == pytest.approx(1 / 6)
    assert metrics["mismatch/max"] == pytest.approx(0.6)
    # Between the fifth and the sixth of the six in order, at 0.99 · 5 = 4.95.
    assert metrics["mismatch/p99"] == pytest.approx(0.1 + 0.95 * 0.5)


def test_mismatch_beyond_the_clip_range_counts_tokens_or_responses():
    """Ratios of the tokens as above; of the responses 1, 1.5, 1 and √(0.25 · 1.2)."""
    assert mismatch()["mismatch/beyond_clip"] == pytest.approx(4 / 6)
    assert mismatch(has_sequence_ratio=True)["mismatch/beyond_clip"] == pytest.approx(3 / 6)


@pytest.mark.filterwarnings("error")
def test_a_clip_range_down_to_zero_has_no_token_below_it():
    assert mismatch(clip_low=1.0)["mismatch/beyond_clip"] == pytest.approx(2 / 6)


def test_mismatch_of_no_tokens_is_left_out():
    nothing = np.zeros((2, 3))
    assert (
        diagnostics.mismatch_metrics(
            nothing, nothing, nothing > 0, BRANCH[:, :3], clip_low=0.2, clip_high=0.2
        )
        == {}
    )
