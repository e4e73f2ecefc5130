"""Anchor and hard negatives on groups small enough to draw."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.method.select import ANCHOR_RULES, RULES, select_subgroup

# Degrees on the unit circle. The anchor, rollout 0, is at 0; the failures, in order of distance:
#   1: 10    2: -12    3: 30    4: 33    5: 60    6: -65    7: 180
DEGREES = (0.0, 10.0, -12.0, 30.0, 33.0, 60.0, -65.0, 180.0)

DISTANCE_RULES = [rule for rule in RULES if rule != "random"]
# Every rule under the first anchor rule, and the last of both.
BOTH_RULES = [*((rule, ANCHOR_RULES[0]) for rule in RULES), (RULES[-1], ANCHOR_RULES[-1])]
jitted = jax.jit(select_subgroup, static_argnames=("K", "M", "rule", "anchor_rule"))


def circle(degrees):
    angle = np.deg2rad(np.array(degrees))
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def select(acc, *, degrees=DEGREES, num_think=None, num_answer=None, logp=None, K=4, M=6, **kwargs):
    G = len(acc)
    return jitted(
        jnp.array(acc, jnp.float32),
        jnp.array(num_think if num_think is not None else [9] * G),
        jnp.array(num_answer if num_answer is not None else [2] * G),
        jnp.array(logp if logp is not None else [-5.0] * G, jnp.float32),
        jnp.array(circle(degrees[:G]), jnp.float32),
        K=K,
        M=M,
        **kwargs,
    )


def negatives(subgroup):
    return np.flatnonzero(subgroup.is_negative).tolist()


ONE_SUCCESS = (1, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("rule", "K", "expected"),
    [
        ("nearest", 4, [1, 2, 3, 4]),
        ("farthest", 4, [4, 5, 6, 7]),
        ("mixed", 4, [1, 2, 6, 7]),
        ("mixed", 3, [1, 2, 7]),
        # Of {1..6}: 1 is nearest; 6 is 75 away from 1; 5 is 50 away from 1; then 2 is 22 away
        # from 1, 3 is 20 from 1, 4 is 23 from 1.
        ("nearest_diverse", 4, [1, 4, 5, 6]),
        ("nearest_diverse", 3, [1, 5, 6]),
        ("nearest_diverse", 1, [1]),
    ],
)
def test_rule_on_a_drawn_circle(rule, K, expected):
    subgroup = select(ONE_SUCCESS, K=K, rule=rule)
    assert negatives(subgroup) == expected
    assert (int(subgroup.anchor), bool(subgroup.has_update)) == (0, True)
    assert not subgroup.is_rescue


def test_diverse_rule_looks_no_farther_than_the_candidates():
    # Candidates 1, 2, 3: from 1, 2 is 22 away and 3 is 20 away.
    assert negatives(select(ONE_SUCCESS, K=2, M=3)) == [1, 2]
    # Candidate 7, on the other side, comes in with M = 7 and is chosen second.
    assert negatives(select(ONE_SUCCESS, K=2, M=7)) == [1, 7]


def test_random_rule_chooses_failures_without_replacement():
    acc = (1, 0, 0.5, 0, 1, 0, 0, 0)
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = jax.vmap(lambda rng: select(acc, K=3, rule="random", rng=rng).is_negative)(keys)
    assert drawn.sum(1).tolist() == [3] * 200
    share = drawn.mean(0)
    assert share[jnp.array([0, 2, 4])].tolist() == [0, 0, 0]
    np.testing.assert_allclose(share[jnp.array([1, 3, 5, 6, 7])], 3 / 5, atol=0.12)


@pytest.mark.parametrize("rule", DISTANCE_RULES)
def test_hard_negative_is_the_nearest_chosen(rule):
    subgroup = select(ONE_SUCCESS, K=3, rule=rule)
    assert int(subgroup.hard_negative) == negatives(subgroup)[0]


@pytest.mark.parametrize(
    ("num_think", "num_answer", "expected"),
    [
        ((1, 9, 9, 8), (1, 1, 1, 5), 3),  # fewest rationale tokens among successes
        ((1, 8, 8, 8), (1, 3, 2, 2), 2),  # then fewest answer tokens, then the smaller index
        ((1, 8, 8, 8), (1, 2, 2, 2), 1),
    ],
)
def test_anchor_is_the_shortest_success(num_think, num_answer, expected):
    subgroup = select((0, 1, 1, 1), num_think=num_think, num_answer=num_answer)
    assert int(subgroup.anchor) == expected
    assert negatives(subgroup) == [0]


def test_anchor_is_well_formed_where_any_success_is():
    """A right answer without a rationale has length 0; it is the anchor only among its like."""
    acc, num_think = (1, 0, 1, 1), (0, 4, 12, 9)
    formatted = functools.partial(jnp.array, dtype=bool)
    assert int(select(acc, num_think=num_think, is_formatted=formatted([0, 1, 1, 1])).anchor) == 3
    assert int(select(acc, num_think=num_think, is_formatted=formatted([0, 1, 1, 0])).anchor) == 2
    # Nobody's format is right, or only a failure's: the shortest success as before.
    assert int(select(acc, num_think=num_think, is_formatted=formatted([0, 0, 0, 0])).anchor) == 0
    assert int(select(acc, num_think=num_think, is_formatted=formatted([0, 1, 0, 0])).anchor) == 0


def test_random_anchor_is_a_well_formed_success_where_there_is_one():
    is_formatted = jnp.array([True, False, True, False, True])
    drawn = draw_subgroups((0, 1, 1, 1, 1), 200, is_formatted=is_formatted)
    assert set(drawn.anchor.tolist()) == {2, 4}


def draw_subgroups(acc, number, *, rule="nearest", **kwargs):
    keys = jax.random.split(jax.random.key(0), number)
    return jax.vmap(lambda rng: select(acc, rule=rule, anchor_rule="random", rng=rng, **kwargs))(
        keys
    )


def test_random_anchor_is_any_success_with_equal_chance():
    """Of rows 1, 4 and 6; the shortest, row 4, has no better one, and partial credit none."""
    drawn = draw_subgroups((0, 1, 0.5, 0, 1, 0, 1, 0), 3000, num_think=(1, 9, 1, 1, 2, 1, 9, 1))
    counts = np.bincount(drawn.anchor, minlength=8)
    assert counts[[0, 2, 3, 5, 7]].tolist() == [0] * 5
    # 3000 draws of chance 1/3: a deviation of 26.
    np.testing.assert_allclose(counts[[1, 4, 6]], 1000, atol=4 * 26)


def test_negatives_are_those_of_the_anchor_that_was_drawn():
    """Anchors at 0 and 180 degrees; failures at 10 and 170."""
    drawn = draw_subgroups((1, 0, 0, 1), 40, degrees=(0, 10, 170, 180), K=1)
    assert set(drawn.anchor.tolist()) == {0, 3}
    np.testing.assert_array_equal(drawn.hard_negative, np.where(drawn.anchor == 0, 1, 2))


def test_random_anchor_and_random_negatives_are_independent():
    """Two successes, three failures of which one is drawn: six pairs of equal chance."""
    drawn = draw_subgroups((1, 0, 0, 1, 0), 3000, rule="random", K=1)
    pairs = np.array(drawn.anchor) * 5 + np.array(drawn.hard_negative)
    counts = np.bincount(pairs, minlength=25)[[1, 2, 4, 16, 17, 19]]
    # 3000 draws of chance 1/6: a deviation of 20.
    np.testing.assert_allclose(counts, 500, atol=4 * 20)


def test_a_rescue_has_the_same_pseudo_anchor_under_either_anchor_rule():
    drawn = draw_subgroups((0, 0, 0, 0), 40, logp=(-9, -3, -7, -4), K=2)
    assert set(drawn.anchor.tolist()) == {1} and drawn.is_rescue.all()
    expected = select((0, 0, 0, 0), logp=(-9, -3, -7, -4), K=2, rule="nearest")
    assert (drawn.is_negative == expected.is_negative).all()


def test_the_anchor_rule_leaves_the_draws_of_the_rest_as_they_were():
    """Under `shortest` random negatives are those of least uniform, drawn by the key itself."""
    for seed in range(20):
        rng = jax.random.key(seed)
        subgroup = select(ONE_SUCCESS, rule="random", K=3, rng=rng)
        order = np.argsort(np.where(np.array(ONE_SUCCESS), 2.0, jax.random.uniform(rng, (8,))))
        assert negatives(subgroup) == sorted(order[:3].tolist())


def test_partial_credit_is_in_neither_set():
    subgroup = select((0.5, 1, 0, 0.9), num_think=(1, 9, 9, 1))
    assert (int(subgroup.anchor), negatives(subgroup)) == (1, [2])
    # Nobody succeeded, one failed: too few for a rescue.
    assert not select((0.5, 0.9, 0, 0.5)).has_update


@pytest.mark.parametrize("rule", DISTANCE_RULES)
def test_distance_ties_go_to_the_smaller_index(rule):
    subgroup = select((0, 0, 1, 0, 0, 0), degrees=(40, 40, 0, 40, 40, 40), K=3, rule=rule)
    assert (negatives(subgroup), int(subgroup.hard_negative)) == ([0, 1, 3], 0)


def test_length_of_embeddings_does_not_matter():
    acc, lengths = jnp.array([1.0, 0, 0]), jnp.array([[3.0], [5.0], [0.1]])
    two, h = jnp.array([2, 2, 2]), jnp.array(circle((0, 40, 10)), jnp.float32)
    subgroup = jitted(acc, two, two, -acc, h * lengths, K=1, M=1, rule="nearest")
    assert negatives(subgroup) == [2]


def test_all_failed_group_gets_the_likeliest_as_pseudo_anchor():
    subgroup = select((0, 0, 0, 0), logp=(-9, -3, -7, -4), K=2, rule="nearest")
    # From 10 degrees: 0 is 10 away, -12 is 22 away, 30 is 20 away.
    assert (int(subgroup.anchor), negatives(subgroup)) == (1, [0, 3])
    assert (bool(subgroup.is_rescue), bool(subgroup.has_update)) == (True, True)
    assert int(subgroup.hard_negative) == 0
    # K' = min(K, |F| - 1): the pseudo-anchor is not its own negative.
    assert negatives(select((0, 0), logp=(-9, -3))) == [0]


def test_pseudo_anchor_is_well_formed_where_any_failure_is():
    logp, acc = (-1, -3, -7, -4), (0, 0, 0, 0)
    malformed_first = jnp.array([False, False, True, True])
    assert int(select(acc, logp=logp, is_formatted=malformed_first).anchor) == 3
    assert int(select(acc, logp=logp, is_formatted=jnp.zeros(4, bool)).anchor) == 0
    # Negatives may be malformed, and a well-formed partial answer is no candidate.
    assert negatives(select(acc, logp=logp, is_formatted=malformed_first)) == [0, 1, 2]
    partial = select((0.5, 0, 0, 0), logp=logp, is_formatted=jnp.array([True, False, False, False]))
    assert int(partial.anchor) == 1


@pytest.mark.parametrize("acc", [(1, 1, 1), (0,), (0.5, 0.5), (1,), (0, 0.5)])
def test_group_without_contrast_has_no_update(acc):
    subgroup = select(acc)
    assert negatives(subgroup) == []
    assert not subgroup.has_update and not subgroup.is_rescue


def random_group(seed, G=8, D=5):
    rng = np.random.default_rng(seed)
    return dict(
        acc=rng.choice([0.0, 0.0, 0.5, 1.0], G).astype(np.float32),
        # Values from wide ranges: no ties, so that a permutation cannot break them otherwise.
        num_think=rng.permutation(100)[:G],
        num_answer=rng.permutation(100)[:G],
        logp=rng.normal(size=G).astype(np.float32),
        embedding=rng.normal(size=(G, D)).astype(np.float32),
        is_formatted=rng.random(G) < 0.5,
    )


def call(rule, group, rng=None, anchor_rule="shortest"):
    group = {name: jnp.asarray(value) for name, value in group.items()}
    return jitted(**group, rng=rng, K=3, M=4, rule=rule, anchor_rule=anchor_rule)


@pytest.mark.parametrize(("rule", "anchor_rule"), BOTH_RULES)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_chosen_are_failures_and_never_the_anchor(rule, anchor_rule, seed):
    group = random_group(seed)
    subgroup = call(rule, group, jax.random.key(seed), anchor_rule)
    num_failed = int((group["acc"] == 0).sum())
    is_rescue = not (group["acc"] == 1).any() and num_failed >= 2
    expected = num_failed if (group["acc"] == 1).any() else max(num_failed - 1, 0)
    assert int(subgroup.is_negative.sum()) == min(3, expected)
    assert bool(subgroup.is_rescue) == is_rescue
    assert (group["acc"][np.array(subgroup.is_negative)] == 0).all()
    if subgroup.has_update:
        assert not subgroup.is_negative[subgroup.anchor]
        assert subgroup.is_negative[subgroup.hard_negative]
        assert group["acc"][int(subgroup.anchor)] == (0 if is_rescue else 1)


@pytest.mark.parametrize("rule", DISTANCE_RULES)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_permuting_rollouts_permutes_the_choice(rule, seed):
    group = random_group(seed)
    order = np.random.default_rng(seed + 1).permutation(8)
    before = call(rule, group)
    after = call(rule, {name: value[order] for name, value in group.items()})
    if not before.has_update:
        assert not after.has_update
        return
    assert order[int(after.anchor)] == int(before.anchor)
    assert order[int(after.hard_negative)] == int(before.hard_negative)
    np.testing.assert_array_equal(after.is_negative, np.array(before.is_negative)[order])


def test_permuting_tied_rollouts_chooses_equal_ones():
    degrees = np.array([0, 0, 20, 20, 20, 70, 70, 70], float)
    acc = np.array([1, 1, 0, 0, 0, 0, 0, 0])
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(8)
        subgroup = select(acc[order], degrees=degrees[order], K=3)
        first = {d: next(i for i in range(8) if degrees[order][i] == d) for d in (0, 20, 70)}
        # 20 is nearest, 70 is farthest from it; all that are left are at 0 from those chosen.
        left = [i for i in range(8) if degrees[order][i] > 0 and i not in first.values()]
        assert int(subgroup.anchor) == first[0]
        assert negatives(subgroup) == sorted([first[20], first[70], left[0]])


@pytest.mark.parametrize(("rule", "anchor_rule"), BOTH_RULES)
def test_jit_and_vmap_change_nothing(rule, anchor_rule):
    groups = [random_group(seed) for seed in range(3)]
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = {name: jnp.stack([group[name] for group in groups]) for name in groups[0]}
    select_one = functools.partial(select_subgroup, K=3, M=4, rule=rule, anchor_rule=anchor_rule)
    plain = select_one(**{name: jnp.asarray(x) for name, x in groups[0].items()}, rng=keys[0])
    chex.assert_trees_all_equal(plain, call(rule, groups[0], keys[0], anchor_rule))
    batch = jax.jit(jax.vmap(lambda group, rng: select_one(**group, rng=rng)))(stacked, keys)
    for i, group in enumerate(groups):
        alone = call(rule, group, keys[i], anchor_rule)
        chex.assert_trees_all_equal(alone, jax.tree.map(lambda x, i=i: x[i], batch))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(rule="hardest"), "unknown rule 'hardest'; choose one of nearest, nearest_diverse"),
        (dict(rule="random"), "^rule 'random' needs a key"),
        (dict(anchor_rule="longest"), "unknown anchor_rule 'longest'; choose one of shortest, ran"),
        (dict(anchor_rule="random"), "^anchor_rule 'random' needs a key"),
        (dict(K=4, M=3), "set M to at least 4"),
        (dict(K=0), "at least 1"),
    ],
)
def test_impossible_settings_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        select(ONE_SUCCESS, **kwargs)


@pytest.mark.parametrize("rule", RULES)
def test_more_negatives_than_rollouts_are_all_failures_at_no_cost(rule):
    """K > G: the program is that of K = G - 1, however large K is."""
    rng = jax.random.key(0)
    chosen = functools.partial(select_subgroup, rule=rule, rng=rng)
    G, lengths = 4, jnp.arange(4)
    rows = jnp.array([1.0, 0, 0, 0]), lengths, lengths, -1.0 * lengths, jnp.eye(4)
    assert negatives(chosen(*rows, K=100, M=100)) == [1, 2, 3]
    sizes = {
        len(jax.make_jaxpr(functools.partial(chosen, K=K, M=K))(*rows).eqns) for K in (G - 1, 100)
    }
    assert len(sizes) == 1
