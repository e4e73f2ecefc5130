import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax.batch import Rollouts, Scores
from care_jax.method import credit

B, G, T, D = 3, 4, 6, 5
CARE = credit.CareSettings(
    K=2,
    s=0.5,
    s_refl=0.25,
    delta=0.1,
    eps=1e-6,
    equalize=True,
    rescue=True,
    rescue_scale=1.0,
    robust=False,
    region_weights=True,
    gamma_pos=0.005,
    gamma_neg=0.0,
    gamma_share=0.0,
    eps_w=1e-6,
    mean="prompt",
    kl_rows="subgroup",
    success="acc",
    reflect_replaces="success",
)


def rows(num_rows, acc, num_tokens=T):
    """Responses of four rationale and two answer tokens."""
    rng = np.random.default_rng(0)
    acc = jnp.asarray(acc, jnp.float32)
    shape = (len(acc), num_rows, num_tokens)
    is_valid = jnp.broadcast_to(jnp.arange(num_tokens) < T, shape)
    is_think = jnp.broadcast_to(jnp.arange(num_tokens) < 4, shape)
    rollouts = Rollouts(
        tokens=jnp.ones(shape, jnp.int32),
        is_valid=is_valid,
        is_forced=jnp.zeros(shape, bool),
        logp=-jnp.ones(shape) * is_valid,
        embedding=jnp.asarray(rng.normal(size=(len(acc), num_rows, D)), jnp.float32),
        is_complete=jnp.ones(shape[:2], bool),
    )
    ones = jnp.ones(shape[:2])
    scores = Scores(
        acc=acc,
        fmt=ones,
        reward=0.9 * acc + 0.1 * ones,
        is_think=is_think,
        is_answer=is_valid & ~is_think,
        num_think=jnp.full(shape[:2], 2),
        num_answer=jnp.full(shape[:2], 1),
        has_answer=ones > 0,
    )
    return rollouts, scores


@functools.partial(jax.jit, static_argnames=("rule", "anchor_rule", "success"))
def select(rollouts, scores, rule="nearest", seed=0, anchor_rule="shortest", success="acc"):
    return credit.select_subgroups(
        rollouts,
        scores,
        jax.random.split(jax.random.key(seed), len(scores.acc)),
        K=2,
        M=3,
        rule=rule,
        anchor_rule=anchor_rule,
        success=success,
    )


ACC = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


def test_subgroups_are_selected_by_what_belongs_to_each_prompt():
    """Anchors: fewest rationale tokens, then answer's; in a rescue the well-formed likeliest."""
    rollouts, scores = rows(G, [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    lengths = jnp.array([6, 4, 6, 6])
    logp = jnp.array([-0.1, -0.5, -0.4, -1.0])[:, None] * (jnp.arange(T) < lengths[:, None])
    rollouts = rollouts.replace(
        is_valid=rollouts.is_valid & (jnp.arange(T) < lengths[:, None]),
        logp=jnp.broadcast_to(logp, rollouts.logp.shape),
    )
    scores = scores.replace(
        num_think=scores.num_think.at[0].set(jnp.array([5, 4, 1, 1])),
        num_answer=scores.num_answer.at[0].set(jnp.array([1, 2, 1, 1])),
        fmt=scores.fmt.at[1, 0].set(0),
    )
    subgroup = select(rollouts, scores)
    # Summed log-probabilities are -0.6, -2, -2.4, -6; row 0 of prompt 1 is malformed.
    np.testing.assert_array_equal(subgroup.anchor, [1, 1, 0])
    np.testing.assert_array_equal(subgroup.is_rescue, [False, True, True])


@pytest.mark.parametrize(
    ("rule", "expected"), [("nearest", [1, 2]), ("nearest_diverse", [1, 3]), ("farthest", [2, 3])]
)
def test_negatives_are_selected_by_the_rule_and_the_embeddings(rule, expected):
    """The anchor stands at 0 degrees, the failures at 10, 20 and 60."""
    rollouts, scores = rows(G, [[1, 0, 0, 0]] * B)
    angle = np.deg2rad([0, 10, 20, 60])
    circle = np.pad(np.stack([np.cos(angle), np.sin(angle)], 1), ((0, 0), (0, D - 2)))
    rollouts = rollouts.replace(embedding=jnp.broadcast_to(circle, (B, G, D)))
    subgroup = select(rollouts, scores, rule)
    for mask in np.asarray(subgroup.is_negative):
        assert np.flatnonzero(mask).tolist() == expected


def test_random_negatives_are_drawn_for_each_prompt_anew():
    rollouts, scores = rows(G, [[1, 0, 0, 0]] * B)
    picks = [np.asarray(select(rollouts, scores, "random", seed).is_negative) for seed in range(4)]
    assert any((pick[0] != pick[1]).any() or (pick[0] != pick[2]).any() for pick in picks)


def test_random_anchors_are_drawn_for_each_prompt_anew():
    rollouts, scores = rows(G, [[1, 1, 1, 0]] * B)
    picks = [np.asarray(select(rollouts, scores, "nearest", s, "random").anchor) for s in range(9)]
    assert any(len(set(pick.tolist())) > 1 for pick in picks)
    assert set(np.ravel(picks).tolist()) == {0, 1, 2}
    np.testing.assert_array_equal(select(rollouts, scores).anchor, 0)


@pytest.mark.parametrize("jit", [False, True])
def test_care_weights_members_equally_and_leaves_out_prompts_without_update(jit):
    rollouts, scores = rows(G, ACC)
    subgroup = select(rollouts, scores)
    care = functools.partial(credit.care_credit, settings=CARE)
    out = (jax.jit(care) if jit else care)(rollouts, scores, subgroup, jnp.zeros(B, bool))
    np.testing.assert_array_equal(out.prompt_weight, [1, 1, 0])
    np.testing.assert_array_equal(subgroup.is_rescue, [False, True, False])
    root = np.sqrt(2)
    np.testing.assert_allclose(out.advantage[0, 0], root, rtol=1e-4)
    negatives = out.advantage[0][np.asarray(subgroup.is_negative[0])]
    np.testing.assert_allclose(negatives, [-0.5 / root] * 2, rtol=1e-4)
    np.testing.assert_allclose(out.row_weight.sum(-1), [1, 1, 0])
    np.testing.assert_array_equal(out.row_weight[2], 0)
    np.testing.assert_array_equal(out.is_trained.any(-1), np.asarray(out.advantage) != 0)


@pytest.mark.parametrize(("mean", "ratio"), [("batch", 1), ("prompt", 3 / 2)])
def test_a_mean_over_the_batch_gives_prompts_with_one_and_two_failures_equal_credit(mean, ratio):
    """With s = 1. A prompt with one failure has two members, the other three."""
    rollouts, scores = rows(G, [[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]])
    settings = dataclasses.replace(CARE, s=1.0, mean=mean)
    out = credit.care_credit(
        rollouts, scores, select(rollouts, scores), jnp.zeros(B, bool), settings
    )
    one, two, none = (jnp.abs(out.advantage) * out.row_weight).sum(-1)
    assert one / two == pytest.approx(ratio, rel=1e-4) and none == 0
    expected = [2, 3, 0] if mean == "batch" else [1, 1, 0]
    np.testing.assert_array_equal(out.prompt_weight, expected)


@pytest.mark.parametrize("kl_rows", ["subgroup", "all"])
def test_the_kl_is_of_the_subgroup_or_of_all_rows(kl_rows):
    rollouts, scores = rows(G, ACC, num_tokens=T + 1)
    settings = dataclasses.replace(CARE, kl_rows=kl_rows)
    out = credit.care_credit(
        rollouts, scores, select(rollouts, scores), jnp.zeros(B, bool), settings
    )
    is_member = (out.advantage != 0)[..., None] | (kl_rows == "all")
    np.testing.assert_array_equal(out.is_trained, rollouts.is_valid & is_member)
    assert not bool((out.advantage != 0).all())


def test_a_mean_over_tokens_counts_all_rows():
    """Of each prompt, also of one without an update; not what was forced, nor padding."""
    rollouts, scores = rows(G, ACC, num_tokens=T + 1)
    rollouts = rollouts.replace(is_forced=rollouts.is_forced.at[0, 3, :2].set(True))
    arguments = rollouts, scores, select(rollouts, scores), jnp.zeros(B, bool)
    settings = dataclasses.replace(CARE, mean="tokens", kl_rows="all")
    out, by_prompt = (credit.care_credit(*arguments, each) for each in (settings, CARE))
    np.testing.assert_array_equal(out.prompt_weight, [G * T - 2, G * T, G * T])
    np.testing.assert_array_equal(out.token_advantage, by_prompt.token_advantage)
    np.testing.assert_array_equal(out.row_weight, out.advantage != 0)


def test_a_wrong_answer_in_the_right_format_may_be_a_success():
    """Prompt 1 has no right answer; its last row alone is malformed, and its only failure."""
    rollouts, scores = rows(G, [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    scores = scores.replace(reward=scores.reward.at[1, 3].set(0.0))
    assert select(rollouts, scores).is_rescue.tolist() == [False, True, False]
    subgroup = select(rollouts, scores, success="reward")
    np.testing.assert_array_equal(subgroup.is_rescue, [False] * B)
    np.testing.assert_array_equal(subgroup.has_update, [False, True, False])
    settings = dataclasses.replace(CARE, success="reward")
    none = jnp.zeros(B, bool)
    out = credit.care_credit(rollouts, scores, subgroup, none, settings)
    assert out.advantage[1, subgroup.anchor[1]] > 0 > out.advantage[1, 3]
    assert out.token_advantage[1, subgroup.anchor[1], 0] > 0  # γ⁺, as in a right row
    raw = credit.care_raw_advantages(scores, subgroup, none, settings)
    np.testing.assert_array_equal(raw.is_positive[1, :G], np.arange(G) == subgroup.anchor[1])


@pytest.mark.parametrize("success", ["acc", "reward"])
def test_what_was_not_judged_is_neither_a_success_nor_a_failure(success):
    """Row 1, whose acc is 1/2; `reward` > 0 holds for it."""
    rollouts, scores = rows(G, [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]])
    scores = scores.replace(acc=scores.acc.at[:, 1].set(0.5), reward=scores.acc.at[:, 1].set(0.5))
    subgroup = select(rollouts, scores, success=success)
    assert not (subgroup.anchor == 1).any() and not subgroup.is_negative[:, 1].any()
    settings = dataclasses.replace(CARE, success=success, mean="tokens", kl_rows="all")
    out = credit.care_credit(rollouts, scores, subgroup, jnp.zeros(B, bool), settings)
    assert not out.is_trained[:, 1].any() and not out.advantage[:, 1].any()
    np.testing.assert_array_equal(out.prompt_weight, [(G - 1) * T] * B)


@pytest.mark.parametrize(("success", "has_positive"), [("acc", False), ("reward", True)])
def test_a_wrong_repair_in_the_right_format_is_a_failure_or_a_success(success, has_positive):
    rollouts, scores = rows(G + 1, [[1, 0, 0, 0, 0]] * B)
    scores = scores.replace(reward=scores.reward.at[:, 1:G].set(0.0))
    group = jax.tree.map(lambda x: x[:, :G], (rollouts, scores))
    subgroup = select(*group, success=success)
    settings = dataclasses.replace(CARE, success=success)
    raw = credit.care_raw_advantages(scores, subgroup, jnp.ones(B, bool), settings)
    np.testing.assert_array_equal(raw.is_positive[:, -1], has_positive)
    np.testing.assert_array_equal(raw.is_negative[:, -1], not has_positive)


def test_care_credit_of_a_row_is_its_advantage_shared_by_region():
    rollouts, scores = rows(G, ACC)
    subgroup = select(rollouts, scores)
    out = credit.care_credit(rollouts, scores, subgroup, jnp.zeros(B, bool), CARE)
    np.testing.assert_allclose(out.token_advantage.sum(-1), out.advantage, rtol=1e-5)
    total = 4 * 0.005 + 2
    np.testing.assert_allclose(
        out.token_advantage[0, 0],
        np.array([0.005] * 4 + [1] * 2) / total * float(out.advantage[0, 0]),
        rtol=1e-5,
    )
    negative = int(subgroup.hard_negative[0])
    np.testing.assert_array_equal(out.token_advantage[0, negative, :4], 0)


@pytest.mark.parametrize(
    ("changes", "right", "wrong"),  # weights of the four rationale tokens
    [
        ({}, 0.005, 0),
        ({"gamma_pos": 0.0}, 0, 0),
        ({"gamma_neg": 0.01}, 0.005, 0.01),
        ({"gamma_share": 0.2}, 0.125, 0),  # 4 · 0.125 of 2.5
        ({"region_weights": False}, 1, 1),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_rows_share_out_their_advantage_by_the_weights_that_were_chosen(jit, changes, right, wrong):
    """Of an anchor, and of two wrong rows; the advantages are the same under all of them."""
    rollouts, scores = rows(G, ACC)
    subgroup = select(rollouts, scores)
    settings = dataclasses.replace(CARE, **changes)
    care = functools.partial(credit.care_credit, settings=settings)
    out = (jax.jit(care) if jit else care)(rollouts, scores, subgroup, jnp.zeros(B, bool))
    first, second = np.flatnonzero(subgroup.is_negative[0])
    A, root = np.zeros(G), 2**0.5
    A[[0, first, second]] = root, -0.5 / root, -0.5 / root
    for row, think in ((0, right), (first, wrong), (second, wrong)):
        expected = A[row] * np.array([think] * 4 + [1] * 2) / (4 * think + 2)
        np.testing.assert_allclose(out.token_advantage[0, row], expected, rtol=1e-4)


def test_forced_tokens_of_a_reflected_row_get_no_credit():
    rollouts, scores = rows(G + 1, [[1, 0, 0, 0, 1], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
    rollouts = rollouts.replace(is_forced=rollouts.is_forced.at[:, -1, :3].set(True))
    group = jax.tree.map(lambda x: x[:, :G], (rollouts, scores))
    subgroup = select(*group)
    has_reflection = jnp.array([True, True, False])
    out = credit.care_credit(rollouts, scores, subgroup, has_reflection, CARE)
    np.testing.assert_array_equal(out.token_advantage[:, -1, :3], 0)
    assert not out.is_trained[:, -1, :3].any()
    np.testing.assert_allclose(out.token_advantage.sum(-1), out.advantage, rtol=1e-4)
    assert out.advantage[0, -1] > 0 > out.advantage[1, -1]
    assert out.advantage[2, -1] == 0 and not out.is_trained[2, -1].any()
    np.testing.assert_array_equal(out.advantage[0, subgroup.hard_negative[0]], 0)
    # A failed repair joins three others of the anchor's group, with half a negative's scale.
    negative = int(subgroup.hard_negative[1])
    np.testing.assert_allclose(
        out.advantage[1, jnp.array([0, negative, -1])],
        [3**0.5, -0.5 / 3**0.5, -0.25 / 3**0.5],
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    ("changes", "anchors"),
    [
        ({}, [2**0.5, 2**0.5, 2**0.5]),
        ({"equalize": False}, [2**0.5, 2**0.5, 1]),
        ({"rescue": False}, [2**0.5, 0, 2**0.5]),
        ({"rescue_scale": 0.3}, [2**0.5, 0.3 * 2**0.5, 2**0.5]),
        # Of rewards 1, 0.1 and 0: the mean is 1.1/3, the median deviation 0.1.
        ({"robust": True}, [(1 - 1.1 / 3) / 0.1, 2**0.5, 2**0.5]),
    ],
)
def test_anchors_are_pushed_as_the_objectives_options_say(changes, anchors):
    """Of two negatives, of a rescue's two, and of the only one there is."""
    rollouts, scores = rows(G, [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    subgroup = select(rollouts, scores)
    if "robust" in changes:
        first = int(jnp.argmax(subgroup.is_negative[0]))
        scores = scores.replace(reward=scores.reward.at[0, first].set(0))
    settings = dataclasses.replace(CARE, **changes)
    care = jax.jit(functools.partial(credit.care_credit, settings=settings))
    out = care(rollouts, scores, subgroup, jnp.zeros(B, bool))
    advantage = np.take_along_axis(np.asarray(out.advantage), subgroup.anchor[:, None], 1)[:, 0]
    np.testing.assert_allclose(advantage, anchors, rtol=1e-4)
    np.testing.assert_array_equal(out.prompt_weight, np.array(anchors) != 0)
    raw = jax.jit(functools.partial(credit.care_raw_advantages, settings=settings))
    value = np.asarray(raw(scores, subgroup, jnp.zeros(B, bool)).value)
    value = np.take_along_axis(value, subgroup.anchor[:, None], 1)[:, 0]
    np.testing.assert_allclose(value, [anchors[0], 2**0.5, 1], rtol=1e-4)


def test_rows_without_a_reflected_slot_get_what_an_empty_slot_gives():
    rollouts, scores = rows(G + 1, np.pad(np.array(ACC), ((0, 0), (0, 1))))
    group = jax.tree.map(lambda x: x[:, :G], (rollouts, scores))
    subgroup = select(*group)
    none = jnp.zeros(B, bool)
    with_slot = credit.care_credit(rollouts, scores, subgroup, none, CARE)
    without = credit.care_credit(*group, subgroup, none, CARE)
    np.testing.assert_array_equal(with_slot.advantage[:, :G], without.advantage)
    np.testing.assert_array_equal(with_slot.token_advantage[:, :G], without.token_advantage)


def test_padding_changes_no_credit():
    subgroup = select(*rows(G, ACC))
    none = jnp.zeros(B, bool)
    short = credit.care_credit(*rows(G, ACC), subgroup, none, CARE)
    long = credit.care_credit(*rows(G, ACC, T + 3), subgroup, none, CARE)
    np.testing.assert_allclose(long.token_advantage[..., :T], short.token_advantage)
    np.testing.assert_array_equal(long.token_advantage[..., T:], 0)


def test_grpo_is_the_sequence_mean_of_token_means():
    rollouts, scores = rows(G, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    is_short = jnp.arange(T) < jnp.array([2, 6, 3, 6])[:, None]
    rollouts = rollouts.replace(is_valid=rollouts.is_valid & is_short)
    out = credit.grpo_credit(rollouts, scores, eps=1e-6, ddof=0)
    np.testing.assert_allclose(out.advantage[0], np.array([3, -1, -1, -1]) / 3**0.5, rtol=1e-4)
    np.testing.assert_allclose(out.advantage[1], [1, 1, -1, -1], rtol=1e-4)
    np.testing.assert_array_equal(out.advantage[2], 0)
    np.testing.assert_array_equal(out.token_advantage, out.advantage[..., None] * rollouts.is_valid)
    np.testing.assert_allclose(out.row_weight, np.tile([1 / 8, 1 / 24, 1 / 12, 1 / 24], (3, 1)))
    np.testing.assert_array_equal(out.prompt_weight, 1)
    np.testing.assert_array_equal(out.is_trained, rollouts.is_valid)
    # The sample's σ of 1, 0, 0, 0 is 1/2.
    sample = credit.grpo_credit(rollouts, scores, eps=1e-6, ddof=1)
    np.testing.assert_allclose(sample.advantage[0], [1.5, -0.5, -0.5, -0.5], rtol=1e-4)


# Rows of 2, 6, 3 and 6 tokens.
LENGTHS = np.array([2, 6, 3, 6])
MIXED = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def uneven():
    rollouts, scores = rows(G, MIXED)
    is_short = jnp.arange(T) < LENGTHS[:, None]
    return rollouts.replace(is_valid=rollouts.is_valid & is_short), scores


def loss_gradient(out):
    """-dL/d logp at ratio 1: Σ over prompts of row weight · a_t, over the summed prompt weights."""
    terms = np.asarray(out.row_weight)[..., None] * np.asarray(out.token_advantage)
    return terms / float(out.prompt_weight.sum())


def test_dr_grpo_divides_every_row_by_the_same_length():
    rollouts, scores = uneven()
    out = credit.dr_grpo_credit(rollouts, scores, max_tokens=10)
    # r = 1 and 0.1 three times: μ = 0.325.
    np.testing.assert_allclose(out.advantage[0], [0.675, -0.225, -0.225, -0.225], rtol=1e-5)
    gradient = loss_gradient(out)
    np.testing.assert_allclose(gradient[0, 0, :2], 0.675 / 10 / 4 / 3, rtol=1e-5)
    np.testing.assert_allclose(gradient[0, 1, :6], -0.225 / 10 / 4 / 3, rtol=1e-5)
    np.testing.assert_array_equal(out.is_trained, rollouts.is_valid)


def test_rloo_sums_a_rows_tokens():
    rollouts, scores = uneven()
    out = credit.rloo_credit(rollouts, scores)
    np.testing.assert_allclose(out.advantage[0], [0.9, -0.3, -0.3, -0.3], rtol=1e-5)
    gradient = loss_gradient(out)
    np.testing.assert_allclose(gradient[0, 0, :2], 0.9 / 4 / 3, rtol=1e-5)
    np.testing.assert_allclose(gradient[0, 1, :6], -0.3 / 4 / 3, rtol=1e-5)
    np.testing.assert_array_equal(gradient[2], 0)


DAPO = dict(eps=0.0, ddof=0, max_tokens=8, cache_tokens=0)


def test_dapo_is_the_token_mean_over_the_groups_that_are_kept():
    """Two of three are mixed; each has 17 tokens, and every token the same share."""
    rollouts, scores = uneven()
    out = credit.dapo_credit(rollouts, scores, **DAPO)
    np.testing.assert_array_equal(out.prompt_weight, [17, 17, 0])
    gradient = loss_gradient(out)
    np.testing.assert_allclose(gradient[0, 0, :2], 3**0.5 / 34, rtol=1e-5)
    np.testing.assert_allclose(gradient[0, 1, :6], -(3**-0.5) / 34, rtol=1e-5)
    np.testing.assert_allclose(gradient[1, 1, :6], 1 / 34, rtol=1e-5)
    assert not out.is_trained[2].any() and out.is_trained[:2].sum() == 34


def test_dapo_drops_by_correctness_and_not_by_reward():
    """All wrong though formats differ, and all right though lengths are punished."""
    rollouts, scores = uneven()
    acc = jnp.array([[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], jnp.float32)
    reward = 0.9 * acc + 0.1 * jnp.array([1, 0, 1, 0])
    scores = scores.replace(acc=acc, reward=reward)
    out = credit.dapo_credit(rollouts, scores, **DAPO | {"cache_tokens": 4})
    np.testing.assert_array_equal(out.prompt_weight, [0, 0, 17])
    assert not out.advantage[:2].any() and not out.row_weight[:2].any()


def test_dapo_punishes_the_last_tokens_of_the_budget():
    """Of 8 tokens the last 4: a row of 6 loses a quarter; lengths are 2, 6, 3, 6."""
    rollouts, scores = uneven()
    out = credit.dapo_credit(rollouts, scores, **DAPO | {"cache_tokens": 4})
    reward = np.array([1, 0.1 - 0.25, 0.1, 0.1 - 0.25])
    expected = (reward - reward.mean()) / reward.std()
    np.testing.assert_allclose(out.advantage[0], expected, rtol=1e-5)


CREDITS = (
    functools.partial(credit.grpo_credit, eps=1e-6, ddof=0),
    functools.partial(credit.dapo_credit, eps=1e-6, ddof=1, max_tokens=8, cache_tokens=4),
    functools.partial(credit.dr_grpo_credit, max_tokens=8),
    credit.rloo_credit,
)


def test_rows_without_an_advantage_are_not_computed_without_a_kl_term():
    """The second group has equal rewards."""
    rollouts, scores = rows(G, [[1, 0, 0, 1], [1, 1, 1, 1]])
    whole = credit.grpo_credit(rollouts, scores, eps=1e-6, ddof=1)
    assert whole.is_trained.any((1, 2)).all()
    used = credit.with_gradient(whole)
    np.testing.assert_array_equal(used.is_trained.any((1, 2)), [True, False])
    np.testing.assert_array_equal(used.prompt_weight, [1, 1])


@pytest.mark.parametrize("function", CREDITS)
def test_responses_that_were_not_judged_are_as_if_not_sampled(function):
    """A baseline's credit of three judged rows of four is that of a group of three."""
    rollouts, scores = uneven()
    hidden = scores.replace(  # as `Groups.trained_scores` has it
        acc=scores.acc.at[:, 2].set(0.5), reward=scores.reward.at[:, 2].set(0.7)
    )
    found, others = function(rollouts, hidden), jnp.array([0, 1, 3])
    alone = function(*jax.tree.map(lambda x: x[:, others], (rollouts, scores)))
    for name in ("advantage", "token_advantage", "row_weight", "is_trained"):
        kept, want = getattr(found, name), getattr(alone, name)
        np.testing.assert_allclose(kept[:, others], want, rtol=1e-5, atol=1e-7)
        assert not kept[:, 2].any()
    np.testing.assert_allclose(found.prompt_weight, alone.prompt_weight)


@pytest.mark.parametrize("function", CREDITS)
def test_groups_without_a_verdict_have_no_weight(function):
    rollouts, scores = uneven()
    unknown = jnp.full_like(scores.acc, 0.5)
    found = function(rollouts, scores.replace(acc=unknown, reward=unknown))
    assert not any(leaf.any() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("function", CREDITS)
def test_baselines_follow_their_rows_and_ignore_padding_and_compilation(function):
    rollouts, scores = uneven()
    plain = function(rollouts, scores)
    assert np.abs(plain.token_advantage).sum() > 0

    def close(got, want):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)

    close(jax.jit(function)(rollouts, scores), plain)
    order = jnp.array([2, 0, 3, 1])
    got = function(*jax.tree.map(lambda x: x[:, order], (rollouts, scores)))
    weight = plain.prompt_weight
    want = jax.tree.map(lambda x: x[:, order], plain.replace(prompt_weight=None))
    close(got, want.replace(prompt_weight=weight))
    pad = ((0, 0), (0, 0), (0, 3))
    got = function(rollouts.replace(is_valid=jnp.pad(rollouts.is_valid, pad)), scores)
    close(got.token_advantage, jnp.pad(plain.token_advantage, pad))
    close(got.prompt_weight, weight)
