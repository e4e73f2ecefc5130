"""Advantages by hand: four rollouts of one prompt and, in slot 4, the reflected one."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.method import advantages as baselines
from care_jax.method.advantages import (
    care_advantages,
    is_mixed,
    overlong_penalty,
    raw_advantages,
)
from care_jax.method.select import Subgroup


def _of_all_judged(function):
    return lambda reward, **options: function(reward, jnp.ones(reward.shape, bool), **options)


grpo_advantages = _of_all_judged(baselines.grpo_advantages)
dr_grpo_advantages = _of_all_judged(baselines.dr_grpo_advantages)
rloo_advantages = _of_all_judged(baselines.rloo_advantages)

SETTINGS = dict(K=4, s=0.5, s_refl=0.25, delta=0.1, eps=1e-6)


def subgroup_of(G, anchor, negatives, hard_negative=0, *, is_rescue=False, has_update=True):
    return Subgroup(
        anchor=jnp.array(anchor),
        is_negative=jnp.isin(jnp.arange(G), jnp.array(negatives, int)),
        hard_negative=jnp.array(hard_negative),
        is_rescue=jnp.array(is_rescue),
        has_update=jnp.array(has_update),
    )


def advantages(reward, subgroup, *, reflected=None, acc=None, **kwargs):
    """`reward` of the rollouts; `reflected`: reward (and acc) of the reflected row."""
    reward = [*reward, 0.0 if reflected is None else reflected]
    return care_advantages(
        jnp.array(reward, jnp.float32),
        jnp.array(reward if acc is None else acc, jnp.float32),
        subgroup,
        jnp.array(reflected is not None),
        **{**SETTINGS, **kwargs},
    )


@pytest.mark.parametrize("num_negatives", [1, 2, 3, 4])
def test_binary_rewards_give_root_of_the_number_of_negatives(num_negatives):
    G = num_negatives + 1
    reward = jnp.zeros(G + 1).at[0].set(1)
    subgroup = subgroup_of(G, 0, range(1, G), 1)
    raw = raw_advantages(reward, reward, subgroup, jnp.array(False), delta=0.1, eps=1e-6)
    root = math.sqrt(num_negatives)
    np.testing.assert_allclose(raw.value, [root] + [-1 / root] * num_negatives + [0], rtol=1e-5)
    assert raw.is_positive.tolist() == [True] + [False] * G
    assert raw.is_negative.tolist() == [False] + [True] * num_negatives + [False]
    assert not raw.is_reflected.any()


@pytest.mark.parametrize("delta", [0.1, 1.0, 0.02])
@pytest.mark.parametrize("num_negatives", [1, 3])
def test_rescue_gives_the_same_root_whatever_delta_is(num_negatives, delta):
    G = num_negatives + 1
    subgroup = subgroup_of(G, 0, range(1, G), 1, is_rescue=True)
    root = math.sqrt(num_negatives)
    # The true rewards (all malformed but one) play no part.
    A = advantages([0.1] + [0] * num_negatives, subgroup, delta=delta, equalize=False)
    np.testing.assert_allclose(A, [root] + [-0.5 / root] * num_negatives + [0], rtol=1e-4)


def test_negatives_alone_are_scaled():
    # S = {1, 0, 0, 0, 0}: A_raw = 2 and -1/2.
    A = advantages([0, 1, 0, 0, 0], subgroup_of(5, 1, [0, 2, 3, 4]))
    np.testing.assert_allclose(A, [-0.25, 2, -0.25, -0.25, -0.25, 0], rtol=1e-5)


def test_rows_outside_the_subgroup_get_exactly_nothing():
    A = advantages([1, 1, 0, 0, 0.5], subgroup_of(5, 1, [2]))
    assert np.flatnonzero(A).tolist() == [1, 2]


def test_missing_negatives_are_made_up_for():
    # Two of four negatives: A_raw = √2 and -1/√2, all times √(4/2).
    subgroup = subgroup_of(4, 0, [1, 2])
    A = advantages([1, 0, 0, 1], subgroup)
    np.testing.assert_allclose(A, [2, -0.5, -0.5, 0, 0], rtol=1e-5)
    A = advantages([1, 0, 0, 1], subgroup, equalize=False)
    np.testing.assert_allclose(A, [2**0.5, -0.5 / 2**0.5, -0.5 / 2**0.5, 0, 0], rtol=1e-5)


def test_reflected_success_replaces_the_hard_negative_and_keeps_its_raw_advantage():
    # S = {anchor 1, rollout 2 at 0, rollout 3 at 0, reflected 1}, without hard negative 1:
    # μ = σ = 1/2, A_raw = ±1, K_S = 2.
    subgroup = subgroup_of(4, 0, [1, 2, 3], 1)
    A = advantages([1, 0, 0, 0], subgroup, reflected=1.0, equalize=False)
    np.testing.assert_allclose(A, [1, 0, -0.5, -0.5, 1], rtol=1e-5)
    assert A[1] == 0
    A = advantages([1, 0, 0, 0], subgroup, reflected=1.0)
    np.testing.assert_allclose(A, np.sqrt(4 / 2) * np.array([1, 0, -0.5, -0.5, 1]), rtol=1e-5)


def test_reflected_success_of_the_only_negative_leaves_nothing_to_contrast():
    A = advantages([1, 0, 1, 1], subgroup_of(4, 0, [1], 1), reflected=1.0)
    assert A.tolist() == [0] * 5


@pytest.mark.parametrize("K", [4, 3])
def test_reflected_failure_joins_beside_the_original_with_the_smaller_penalty(K):
    """S = {1, 0, 0, 0, reflected 0}: A_raw = 2 and -1/2. K_S = 4: for K = 3 no factor √(3/4)."""
    A = advantages([1, 0, 0, 0], subgroup_of(4, 0, [1, 2, 3], 1), reflected=0.0, K=K)
    np.testing.assert_allclose(A, [2, -0.25, -0.25, -0.25, -0.125], rtol=1e-5)


def test_a_reflected_failure_may_take_the_place_of_the_original():
    """S = {1, 0, 0, reflected 0}: A_raw = √3 and -1/√3, K_S = 3."""
    subgroup = subgroup_of(4, 0, [1, 2, 3], 1)
    always = {"reflect_replaces": "always"}
    A = advantages([1, 0, 0, 0], subgroup, reflected=0.0, equalize=False, **always)
    root = 3**0.5
    np.testing.assert_allclose(A, [root, 0, -0.5 / root, -0.5 / root, -0.25 / root], rtol=1e-5)
    for reflected in (1.0, None):  # as by default
        by_default = advantages([1, 0, 0, 0], subgroup, reflected=reflected)
        A = advantages([1, 0, 0, 0], subgroup, reflected=reflected, **always)
        chex.assert_trees_all_equal(A, by_default)


def test_a_failure_with_more_reward_than_the_anchor_is_no_negative():
    """The only success is malformed; near misses have partial credit. Also if one is reflected."""
    near = [0.9, 0.905, 0.9, 0.4]
    is_right = [1, 0, 0, 0]
    subgroup = subgroup_of(4, 0, [1, 2, 3], 3)
    A = advantages(near, subgroup, acc=[*is_right, 0])
    np.testing.assert_allclose(A, [2, 0, 0, -1, 0], rtol=1e-5)  # S = {0.9, 0.4}, K_S = 1
    assert advantages(near, subgroup_of(4, 0, [1, 2], 1), acc=[*is_right, 0]).tolist() == [0] * 5
    reflected = {"reflected": 0.95, "acc": [*is_right, 0]}
    assert advantages(near, subgroup, **reflected).tolist() == A.tolist()


def test_reflection_with_partial_credit_takes_no_part():
    subgroup = subgroup_of(4, 0, [1, 2, 3], 1)
    without = advantages([1, 0, 0, 0], subgroup)
    chex.assert_trees_all_equal(advantages([1, 0, 0, 0], subgroup, reflected=0.5), without)


def test_masked_reflection_slot_plays_no_part():
    subgroup = subgroup_of(4, 0, [1, 2, 3], 1)
    reward = jnp.array([1, 0, 0, 0, 1.0])
    A = care_advantages(reward, reward, subgroup, jnp.array(False), **SETTINGS)
    chex.assert_trees_all_equal(A, advantages([1, 0, 0, 0], subgroup))
    # Nor does a reflection count in a rescue.
    rescued = subgroup_of(4, 0, [1, 2, 3], 1, is_rescue=True)
    without = advantages([0, 0, 0, 0], rescued)
    chex.assert_trees_all_equal(advantages([0, 0, 0, 0], rescued, reflected=1.0), without)


def test_negative_with_a_reward_above_the_mean_is_still_pushed_down():
    # Format alone earns 0.1: S = {1, 0.1, 0, 0}, μ = 0.275; with a generous verifier a failure
    # can lie above the mean: S = {1, 0.9, 0, 0}.
    A = advantages([1, 0.9, 0, 0], subgroup_of(4, 0, [1, 2, 3]), acc=[1, 0, 0, 0, 0])
    assert (A[1:4] < 0).all() and A[0] > 0


def test_pseudo_rewards_add_up_to_nothing():
    # {1, -1/2, -1/2}: μ = 0, σ = 1/√2. Seen beside a large ε alone, as δ cancels otherwise.
    rescued = subgroup_of(3, 0, [1, 2], 1, is_rescue=True)
    A = advantages([0, 0, 0], rescued, delta=1.0, eps=1.0, equalize=False)
    sigma = 1 / math.sqrt(2)
    np.testing.assert_allclose(A, np.array([1, -0.25, -0.25, 0]) / (sigma + 1), rtol=1e-5)


def test_rescue_can_be_switched_off_or_made_small():
    rescued = subgroup_of(3, 0, [1, 2], 1, is_rescue=True)
    full = advantages([0, 0, 0], rescued)
    assert (full[:3] != 0).all()
    assert not advantages([0, 0, 0], rescued, rescue=False).any()
    np.testing.assert_allclose(advantages([0, 0, 0], rescued, rescue_scale=0.1), 0.1 * full)
    # Groups with an anchor do not hear of either.
    anchored = subgroup_of(3, 0, [1, 2], 1)
    A = advantages([1, 0, 0], anchored)
    chex.assert_trees_all_equal(A, advantages([1, 0, 0], anchored, rescue=False, rescue_scale=0.1))


def test_group_without_update_gets_nothing():
    assert not advantages([1, 1, 1], subgroup_of(3, 0, [], has_update=False)).any()
    stray = subgroup_of(3, 0, [1], has_update=False)
    assert not advantages([1, 0, 0], stray, reflected=1.0).any()
    reward = jnp.array([1.0, 0, 0, 1])
    raw = raw_advantages(reward, reward, stray, jnp.array(True), delta=0.1, eps=1e-6)
    assert not any(leaf.any() for leaf in jax.tree.leaves(raw))


def test_equal_rewards_give_exactly_nothing():
    # 0.1 is not exact in binary: mean and σ come out around 1e-9, beside ε = 1e-6.
    A = advantages([0.1] * 7, subgroup_of(7, 0, [1, 2, 3, 4, 5, 6]), acc=[1] + [0] * 7)
    assert A.tolist() == [0] * 8
    assert grpo_advantages(jnp.full(7, 0.1), eps=1e-6).tolist() == [0] * 7


def test_robust_moments_are_trimmed_mean_and_median_deviation():
    # S = {1, 0.4, 0.2, 0.1, 0}: without 1 and 0 the mean is 0.7/3; the median is 0.2 and the
    # deviations 0.8, 0.2, 0, 0.1, 0.2 have median 0.2.
    reward, subgroup = jnp.array([1, 0.4, 0.2, 0.1, 0, 0]), subgroup_of(5, 0, [1, 2, 3, 4], 1)
    raw = raw_advantages(
        reward, reward, subgroup, jnp.array(False), delta=0.1, eps=0.0, robust=True
    )
    expected = (np.array([1, 0.4, 0.2, 0.1, 0]) - 0.7 / 3) / 0.2
    np.testing.assert_allclose(raw.value[:5], expected, rtol=1e-5)
    # Of {1, 0.4, 0.2, 0.1} none is cut; median 0.3, deviations 0.7, 0.1, 0.1, 0.2: 0.15.
    four = subgroup_of(5, 0, [1, 2, 3], 1)
    raw = raw_advantages(reward, reward, four, jnp.array(False), delta=0.1, eps=0.0, robust=True)
    expected = (np.array([1, 0.4, 0.2, 0.1]) - 0.425) / 0.15
    np.testing.assert_allclose(raw.value[:4], expected, rtol=1e-5)


def test_robust_moments_fall_back_where_the_median_deviation_is_zero():
    subgroup = subgroup_of(5, 0, [1, 2, 3, 4], 1)
    plain = advantages([1, 0, 0, 0, 0], subgroup)
    chex.assert_trees_all_close(advantages([1, 0, 0, 0, 0], subgroup, robust=True), plain)


@functools.cache
def jitted(**kwargs):
    return jax.jit(functools.partial(care_advantages, **SETTINGS, **kwargs))


def random_case(seed, G=6):
    rng = np.random.default_rng(seed)
    acc = rng.integers(0, 2, G + 1).astype(np.float32)
    anchor, *negatives = rng.permutation(G)[: rng.integers(2, G)].tolist()
    is_rescue = bool(rng.random() < 0.3)
    acc[anchor], acc[negatives] = 1 - is_rescue, 0
    reward = (0.9 * acc + 0.1 * rng.integers(0, 2, G + 1)).astype(np.float32)
    subgroup = subgroup_of(G, anchor, negatives, negatives[0], is_rescue=is_rescue)
    return jnp.array(reward), jnp.array(acc), subgroup, jnp.array(rng.random() < 0.5)


@pytest.mark.parametrize("robust", [False, True])
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_permuting_rollouts_permutes_advantages(robust, seed):
    reward, acc, subgroup, has_reflection = random_case(seed)
    order = np.random.default_rng(seed + 1).permutation(6)
    rows = jnp.array([*order, 6])
    place = jnp.argsort(jnp.array(order))
    permuted = subgroup.replace(
        anchor=place[subgroup.anchor],
        hard_negative=place[subgroup.hard_negative],
        is_negative=subgroup.is_negative[order],
    )
    call = jitted(robust=robust)
    np.testing.assert_allclose(
        call(reward[rows], acc[rows], permuted, has_reflection),
        call(reward, acc, subgroup, has_reflection)[rows],
        atol=1e-5,
    )


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_positives_gain_and_negatives_lose(seed):
    reward, acc, subgroup, has_reflection = random_case(seed)
    A = jitted()(reward, acc, subgroup, has_reflection)
    assert jnp.isfinite(A).all()
    if A.any():
        assert A[subgroup.anchor] > 0
        repaired = bool(has_reflection & (acc[6] == 1) & ~subgroup.is_rescue)
        kept = np.array(subgroup.is_negative)
        if repaired:
            kept[int(subgroup.hard_negative)] = False
        assert (A[:6][kept] <= 0).all()
        assert (A[6] > 0) if repaired else (A[6] <= 0)


def test_jit_and_vmap_change_nothing():
    cases = [random_case(seed) for seed in range(8)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    batch = jax.vmap(functools.partial(care_advantages, **SETTINGS))(*stacked)
    for case, A in zip(cases, batch, strict=True):
        plain = care_advantages(*case, **SETTINGS)
        np.testing.assert_allclose(jitted()(*case), plain, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(A, plain, rtol=1e-5, atol=1e-6)


def test_grpo_normalises_the_group():
    # {1, 1, 0, 0}: μ = 1/2; σ = 1/2 of the population, 1/√3 of the sample.
    reward = jnp.array([1.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(grpo_advantages(reward, eps=0.0), [1, -1, 1, -1], rtol=1e-6)
    root = math.sqrt(3) / 2
    expected = [root, -root, root, -root]
    np.testing.assert_allclose(grpo_advantages(reward, eps=0.0, ddof=1), expected, rtol=1e-6)
    np.testing.assert_allclose(grpo_advantages(reward, eps=0.5), [0.5, -0.5, 0.5, -0.5], rtol=1e-6)
    assert grpo_advantages(jnp.array([0.3]), eps=1e-6, ddof=1).tolist() == [0]


def test_dr_grpo_takes_the_mean_off_and_leaves_the_spread():
    advantage = dr_grpo_advantages(jnp.array([1.0, 0, 0, 0]))
    np.testing.assert_allclose(advantage, [0.75, -0.25, -0.25, -0.25], rtol=1e-6)
    hard = dr_grpo_advantages(jnp.array([10.0, 0, 0, 0]))
    np.testing.assert_allclose(hard, 10 * advantage, rtol=1e-6)


def test_rloo_takes_off_what_the_others_got():
    """Of 1, 0, 0.5: the others' means are 0.25, 0.75 and 0.5."""
    advantage = rloo_advantages(jnp.array([1.0, 0.0, 0.5]))
    np.testing.assert_allclose(advantage, [0.75, -0.75, 0.0], atol=1e-7)
    np.testing.assert_allclose(rloo_advantages(jnp.array([1.0, 0.0])), [1, -1])


BASELINES = (
    dr_grpo_advantages,
    rloo_advantages,
    functools.partial(grpo_advantages, eps=1e-6),
)


@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines_ignore_order_and_compilation_and_give_equal_rewards_nothing(baseline):
    reward = jnp.array([0.1, 1.0, 0.0, 0.9, 0.1, 1.0, 0.55])
    order = jnp.array([3, 0, 6, 1, 5, 2, 4])
    plain = baseline(reward)
    np.testing.assert_allclose(jax.jit(baseline)(reward), plain, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(baseline(reward[order]), plain[order], rtol=1e-5, atol=1e-7)
    assert baseline(jnp.full(7, 0.1)).tolist() == [0] * 7  # its mean is not 0.1 in float32


@pytest.mark.parametrize("ddof", [0, 1])
def test_rows_that_were_not_judged_are_as_if_not_sampled(ddof):
    """The judged rows of 1, 0, 1, 0, 0.7 have the advantages of a group of their own."""
    judged = jnp.array([1.0, 0.0, 1.0, 0.0, 0.7])
    reward = jnp.array([0.54, 1.0, 0.0, 0.54, 1.0, 0.0, 0.7])
    is_in = jnp.array([False, True, True, False, True, True, True])
    for function in (
        functools.partial(baselines.grpo_advantages, eps=1e-6, ddof=ddof),
        baselines.dr_grpo_advantages,
        baselines.rloo_advantages,
    ):
        found = function(reward, is_in)
        assert not found[~is_in].any()
        np.testing.assert_allclose(found[is_in], _of_all_judged(function)(judged), rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_overlong_penalty_grows_over_the_cache_alone(jit):
    """L_max = 20 and L_cache = 4 tokens: from 16 on, an eighth for each token."""
    penalty = functools.partial(overlong_penalty, max_tokens=20, cache_tokens=4)
    lengths = jnp.array([0, 1, 16, 17, 18, 19, 20, 25])
    expected = [0, 0, 0, -0.125, -0.25, -0.375, -0.5, -0.5]
    np.testing.assert_allclose((jax.jit(penalty) if jit else penalty)(lengths), expected)
    none = overlong_penalty(lengths, max_tokens=20, cache_tokens=0)
    assert none.tolist() == [0] * 8


@pytest.mark.parametrize(
    ("acc", "expected"),
    [
        ([0, 0, 0], False),
        ([1, 1, 1], False),
        ([0, 1, 0], True),
        ([1, 1, 0], True),
        ([0, 0.5, 0], False),
        ([1, 1, 0.5], False),
    ],
)
def test_groups_are_mixed_where_right_and_wrong_stand_in_them(acc, expected):
    for order in ((0, 1, 2), (2, 0, 1)):
        assert bool(is_mixed(jnp.array(acc, jnp.float32)[jnp.array(order)])) == expected


@pytest.mark.parametrize("reward", [[0.5] * 2, [0.1] * 7, [0.0, 1e-30], [-1e-30, 0.0, 1e-30]])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_rewards_without_a_spread_leave_advantages_of_nothing(reward, eps):
    """Also if only ε = 0 divides, and the square of a difference is 0 in float32."""
    reward, ddofs = jnp.array(reward), (0, 1)
    found = [grpo_advantages(reward, eps=eps, ddof=ddof) for ddof in ddofs]
    found += [dr_grpo_advantages(reward), rloo_advantages(reward)]
    subgroup = subgroup_of(len(reward), len(reward) - 1, range(len(reward) - 1))
    found.append(advantages(reward, subgroup, eps=eps))
    for advantage in found:
        np.testing.assert_allclose(advantage, 0, atol=1e-20)
    # Deviations from the median are not squared.
    assert np.isfinite(advantages(reward, subgroup, eps=eps, robust=True)).all()


def test_two_rollouts_are_a_group():
    """G = 2: A is ±1 with the population's σ, ±1/√2 with the sample's."""
    reward = jnp.array([1.0, 0.0])
    for ddof, size in ((0, 1), (1, 0.5**0.5)):
        found = grpo_advantages(reward, eps=0.0, ddof=ddof)
        np.testing.assert_allclose(found, [size, -size], rtol=1e-6)
    np.testing.assert_allclose(rloo_advantages(reward), [1, -1])
    found = advantages([1.0, 0.0], subgroup_of(2, 0, [1], 1), eps=0.0, K=4)
    np.testing.assert_allclose(found, [2, -1, 0], rtol=1e-6)  # √(4/1) · (1, -s)
