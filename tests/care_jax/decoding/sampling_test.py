import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from care_jax.decoding import sampling
from care_jax.devices.sharding import make_mesh


def drawn(logits, seed, **choice):
    """A token for each row of logits."""
    u = jax.random.uniform(jax.random.key(seed), logits.shape[:-1])
    return np.asarray(sampling.sample_token(jnp.asarray(logits), u, **choice)[0])


def in_nucleus(logits, top_p):
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(sampling.nucleus(weights, top_p)) > 0


def test_nucleus_is_the_least_set_that_reaches_top_p():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]]))
    for top_p, expected in (
        (0.5, [[0, 1, 0, 0], [1, 0, 0, 0]]),
        (0.51, [[0, 1, 0, 1], [1, 0, 0, 0]]),
        (0.9, [[0, 1, 1, 1], [1, 0, 0, 0]]),
        (0.95, [[1, 1, 1, 1], [1, 0, 0, 0]]),
    ):
        np.testing.assert_array_equal(in_nucleus(logits, top_p), expected)


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_nucleus_is_the_head_of_the_sorted_probabilities(top_p):
    logits = np.random.default_rng(0).normal(0, 3, (50, 700)).astype(np.float32)
    logits[:, 5] = -np.inf
    logits[0] = 1.0  # as likely as each other: all of them belong
    found = in_nucleus(jnp.asarray(logits), top_p)
    assert found[0].all()
    for row, kept in zip(logits[1:].astype(np.float64), found[1:], strict=True):
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        order = np.argsort(-probabilities)
        upto = np.cumsum(probabilities[order])
        expected = np.zeros(700, bool)
        expected[order[: np.searchsorted(upto, top_p) + 1]] = True
        np.testing.assert_array_equal(kept, expected)


def test_tokens_are_sampled_in_proportion_within_the_nucleus():
    logits = np.tile(np.log([0.1, 0.5, 0.15, 0.25]), (20000, 1)).astype(np.float32)
    shares = np.bincount(drawn(logits, 0, temperature=1.0, top_p=0.9), minlength=4) / len(logits)
    np.testing.assert_allclose(shares, np.array([0, 0.5, 0.15, 0.25]) / 0.9, atol=0.015)
    hot = drawn(logits, 0, temperature=2.0, top_p=1.0)
    root = np.sqrt([0.1, 0.5, 0.15, 0.25])
    np.testing.assert_allclose(np.bincount(hot) / len(hot), root / root.sum(), atol=0.015)


def test_nucleus_is_that_of_the_distribution_at_the_temperature():
    """At temperature 1/2 the odds 10:50:15:25 are 4:100:9:25, and 0.9 of it is the two largest."""
    logits = np.tile(np.log([0.1, 0.5, 0.15, 0.25]), (4000, 1)).astype(np.float32)
    shares = np.bincount(drawn(logits, 0, temperature=0.5, top_p=0.9), minlength=4) / len(logits)
    np.testing.assert_allclose(shares, [0, 0.8, 0, 0.2], atol=0.03)


@pytest.mark.parametrize(
    ("vocab_size", "vocab_shards"), [(1031, 1), (1280, 1), (1280, 4), (1031, 4)]
)
def test_sampling_never_takes_what_has_no_probability(vocab_size, vocab_shards):
    """Across blocks of ids, some without any weight or beyond a shard, and at the end."""
    allowed = np.array([3, 255, 256, 700, 1030])
    logits = np.full((4000, vocab_size), -np.inf, np.float32)
    logits[:, allowed] = np.log([0.3, 0.1, 0.2, 0.15, 0.25])
    tokens = drawn(logits, 1, temperature=1.0, top_p=1.0, vocab_shards=vocab_shards)
    ids, counts = np.unique(tokens, return_counts=True)
    np.testing.assert_array_equal(ids, allowed)
    np.testing.assert_allclose(counts / len(tokens), [0.3, 0.1, 0.2, 0.15, 0.25], atol=0.03)


def test_a_draw_between_two_blocks_takes_a_token_of_the_nucleus():
    """A cumulative sum over the blocks of a large vocabulary is not flat where they are empty."""
    rng, num_ids = np.random.default_rng(0), 151_936
    logits = 2 * rng.normal(size=(64, num_ids)).astype(np.float32)
    for row in logits:
        row[rng.integers(0, num_ids, 40)] = rng.normal(10, 4, 40)
    weights = sampling.nucleus(jnp.exp(logits - logits.max(-1, keepdims=True)), 0.95)
    sums = weights.reshape(64, -1, 128).sum(-1)
    upto = np.asarray(jnp.cumsum(sums, -1))
    for _ in range(2):
        block = rng.integers(0, upto.shape[1] - 1, 64)
        u = np.take_along_axis(upto, block[:, None], 1)[:, 0] / upto[:, -1]
        u = jnp.minimum(u, np.nextafter(np.float32(1), np.float32(0)))
        tokens, logp, _ = sampling.sample_token(jnp.asarray(logits), u, temperature=1.0, top_p=0.95)
        assert (
            np.isfinite(logp).all() and (np.take_along_axis(weights, tokens[:, None], 1) > 0).all()
        )


def test_the_least_and_the_largest_draw_take_a_token():
    logits = jnp.log(jnp.array([[0.0, 0.3, 0.7, 0.0]] * 2))
    u = jnp.array([0.0, np.nextafter(np.float32(1), np.float32(0))])
    tokens, *_ = sampling.sample_token(logits, u, temperature=1.0, top_p=1.0)
    np.testing.assert_array_equal(tokens, [1, 2])


def test_a_draw_of_0_does_not_take_a_token_that_is_all_but_impossible():
    """float32 draws 0 once in 2^23 times, far more often than the first id's probability here."""
    logits = jnp.full((1, 1000), -60.0).at[0, 0].set(-25.0).at[0, 700].set(0.0)
    token, *_ = sampling.sample_token(logits, jnp.zeros(1), temperature=1.0, top_p=1.0)
    assert token == 700


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (1.0, 0.9), (0.7, 1.0), (2.0, 0.9), (0.0, 1.0)]
)
def test_log_probability_is_that_of_the_softmax_whatever_the_sampling(temperature, top_p):
    logits = np.random.default_rng(0).normal(0, 3, (64, 5000)).astype(np.float32)
    u = jax.random.uniform(jax.random.key(0), (64,))
    choice = {"temperature": temperature, "top_p": top_p}
    token, found, _ = sampling.sample_token(jnp.asarray(logits), u, **choice)
    exact = logits.astype(np.float64)
    expected = exact[np.arange(64), token] - np.log(np.exp(exact).sum(-1))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("temperature", "top_p", "shares"),
    [
        (1.0, 1.0, None),
        (1.0, 0.7, [0, 2 / 3, 0, 1 / 3]),
        (0.5, 1.0, [4 / 138, 100 / 138, 9 / 138, 25 / 138]),
        (0.5, 0.9, [0, 0.8, 0, 0.2]),
        (0.0, 1.0, [0, 1, 0, 0]),
    ],
)
def test_a_token_has_the_log_probability_that_it_was_drawn_with(temperature, top_p, shares):
    """Of odds 10:50:15:25, of which 0.7 keeps the second and the last."""
    logits = jnp.tile(jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25])), (40, 1))
    u = jnp.linspace(0, 0.999, 40)
    choice = {"temperature": temperature, "top_p": top_p}
    token, _, found = jax.jit(functools.partial(sampling.sample_token, **choice))(logits, u)
    if shares is None:
        assert found is None
    else:
        np.testing.assert_allclose(found, np.log(np.array(shares)[token]), atol=1e-6)
        assert set(token.tolist()) == set(np.flatnonzero(shares))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("vocab_size", [4 * 128 * 9, 4 * 32 * 37])
def test_a_sharded_vocabulary_is_sampled_without_gathering_it(vocab_size, top_p):
    """In whole blocks of 128 ids a shard, and in others, as the two families' vocabularies."""
    mesh = make_mesh(2, 1, 4)
    place = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    logits = np.random.default_rng(0).normal(0, 3, (8, vocab_size)).astype(np.float32)
    u = jax.random.uniform(jax.random.key(0), (8,))

    def choose(logits, u):
        return sampling.sample_token(logits, u, temperature=0.7, top_p=top_p, vocab_shards=4)

    sharded = jax.jit(choose, in_shardings=(place, NamedSharding(mesh, PartitionSpec("data"))))
    whole = jax.jit(choose)(logits, u)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), sharded(logits, u), whole
    )
    text = sharded.lower(logits, u).compile().as_text()
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", text)
    sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in gathered]
    # 4 rows of a device: what is gathered, if anything, is a number per block.
    assert max(sizes, default=0) <= 4 * -(-vocab_size // 4 // 128) * 4, gathered


@pytest.mark.parametrize("top_p", [1.0, 1 - 1e-9, 1e-45])
@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 100.0])
def test_extreme_settings_draw_tokens_with_finite_log_probabilities(temperature, top_p):
    logits = np.random.default_rng(0).normal(0, 3, (64, 300)).astype(np.float32)
    logits[:, 5] = -1e30  # a token that is never sampled
    logits[0] = 2.0  # a distribution without a maximum
    u = jax.random.uniform(jax.random.key(0), (64,))
    choose = functools.partial(sampling.sample_token, temperature=temperature, top_p=top_p)
    token, logp, drawn_logp = jax.jit(choose)(logits, u)
    exact = logits.astype(np.float64)
    expected = exact[np.arange(64), token] - np.log(np.exp(exact).sum(-1))
    np.testing.assert_allclose(logp, expected, atol=1e-4)
    assert np.isfinite(drawn_logp).all() and (drawn_logp <= 0).all()
    assert not (token[1:] == 5).any()
    if temperature < 1 or top_p < 0.5:
        np.testing.assert_array_equal(token[1:], logits[1:].argmax(-1))
