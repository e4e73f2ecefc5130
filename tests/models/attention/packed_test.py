"""Attention over listed blocks equals a dense mask, in every backend, and skips what is unseen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from models.attention import kernels, packed
from models.attention.packed import (
    AttentionImpl,
    attend,
    block_mask,
    causal_reach,
    largest_difference,
    segment_spans,
)

B, S, K = 2, 60, 2
# Blocks that do not divide the row, of different sizes on either side.
IMPLS = {
    "xla": AttentionImpl("xla", query_block=8, key_block=16, dense_tokens=0),
    "dense": AttentionImpl("xla", dense_tokens=S),
    "tpu": AttentionImpl("tpu", interpret=True, query_block=16, key_block=8, dense_tokens=0),
    "gpu": AttentionImpl("gpu", interpret=True, query_block=16, key_block=8, dense_tokens=0),
}


def forest(rng, num_tokens):
    """reach of a row of unequal trees: [prompt | branches], the last cut off, padding between."""
    reach, start = np.arange(num_tokens), 0
    while start < num_tokens - 8:
        prompt, *branches = rng.integers(1, 12, rng.integers(2, 5))
        ends = np.minimum(start + prompt + np.cumsum(branches), num_tokens)
        reach[start : start + prompt] = ends[-1] - 1
        for first, end in zip([start + prompt, *ends[:-1]], ends, strict=True):
            reach[first:end] = end - 1
        start = ends[-1] + rng.integers(0, 3)
    return reach


def text(seed=0):
    """No first, and last, of rows of trees."""
    rng = np.random.default_rng(seed)
    return None, np.stack([forest(rng, S) for _ in range(B)])


def images():
    """first and last of rows of images: three with padding behind them, one alone."""
    segments = np.array([[0] * 9 + [1] * 30 + [2] * 11 + [-1] * 10, [0] * 60])
    return tuple(map(np.asarray, segment_spans(jnp.asarray(segments))))


def arrays(group, head_dim):
    rng = np.random.default_rng(0)
    q, weight = (rng.normal(size=(B, S, K, group, head_dim)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(B, S, K, head_dim)).astype(np.float32) for _ in range(2))
    return tuple(map(jnp.asarray, (q, k, v))), weight


def causal():
    return np.broadcast_to(np.arange(S), (B, S))


def dense(q, k, v, first, last):
    """Written from the definition."""
    query = np.arange(q.shape[1])[:, None]
    is_seen = (first[:, None] <= query) & (query <= last[:, None])
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -jnp.inf))
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)


def values_and_gradients(impl, first, last, q, k, v, weight):
    """Attention by `impl`, or dense, and the gradients of its weighted sum by q, k and v.

    Causal rows have no `first`, as text is built.
    """

    def loss(*qkv):
        if impl is None:
            out = dense(*qkv, causal() if first is None else first, last)
        else:
            out = attend(*qkv, block_mask(first, last, q.shape[3], impl))
        return (out * weight).sum(), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, *gradients


jitted = jax.jit(values_and_gradients, static_argnums=0)  # a program for an impl and a shape


def assert_equals_dense(impl, spans, group, head_dim):
    qkv, weight = arrays(group, head_dim)
    ours = jitted(impl, *spans, *qkv, weight)
    expected = jitted(None, *spans, *qkv, weight)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (7, 128)])
@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_kernels_equal_a_dense_mask_in_values_and_gradients_of_trees(name, group, head_dim):
    assert_equals_dense(IMPLS[name], text(), group, head_dim)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 72), (1, 80)])
@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_kernels_equal_a_dense_mask_in_values_and_gradients_of_images(name, group, head_dim):
    assert_equals_dense(IMPLS[name], images(), group, head_dim)


@pytest.mark.parametrize("spans", [text, images])
@pytest.mark.parametrize("name", ["xla", "dense"])
def test_xla_equals_a_dense_mask_in_values_and_gradients(name, spans):
    assert_equals_dense(IMPLS[name], spans(), 3, 24)


@pytest.mark.parametrize("blocks", [(8, 8), (4, 32), (32, 16)], ids=str)
def test_other_forests_and_blocks_equal_a_dense_mask(blocks):
    impl = dataclasses.replace(IMPLS["xla"], query_block=blocks[0], key_block=blocks[1])
    for seed in range(1, 5):
        assert_equals_dense(impl, text(seed), 2, 8)


@pytest.mark.parametrize("name", ["xla", "dense"])
def test_jit_changes_nothing(name):
    qkv, weight = arrays(2, 8)
    arguments = IMPLS[name], *text(), *qkv, weight
    for a, b in zip(jitted(*arguments), values_and_gradients(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


# Two kv heads of three or four query heads: sharded over one axis and not the other, which does not
# divide; copied to be sharded over both; kept whole where nothing divides.
@pytest.mark.parametrize(
    ("name", "group", "tensor", "sequence"),
    [*((name, group, 2, 2) for name in IMPLS for group in (3, 4)), ("xla", 3, 4, 1)],
)
def test_a_mesh_changes_nothing(name, group, tensor, sequence):
    """Rows that lie on different devices need different lists."""
    axes = ("data", "tensor", "sequence")
    mesh = jax.make_mesh((2, tensor, sequence), axes, (AxisType.Auto,) * 3)
    impl = dataclasses.replace(IMPLS[name], mesh=mesh, batch_axes=axes[:1], head_axes=axes[1:])
    spans = images() if group == 4 else text()
    assert_equals_dense(impl, spans, group, 8)


@pytest.mark.parametrize("name", ["xla", "tpu", "gpu"])
def test_what_no_token_of_a_block_sees_is_not_computed(name):
    """Values that are no numbers would spoil any sum that they entered, even with weight 0."""
    spans = segment_spans(jnp.repeat(jnp.array([[0, 1, 2]] * B), 20, axis=1))
    impl = dataclasses.replace(IMPLS[name], query_block=4, key_block=4)
    (q, k, v), weight = arrays(2, 8)
    is_spoilt = (np.arange(S) // 20 == 1)[None, :, None, None]
    v = jnp.where(is_spoilt, jnp.nan, v)
    mask = block_mask(*spans, 2, impl)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def gradients_of_the_rest(q, k, v):
        out = jnp.where(is_spoilt[..., None], 0, attend(q, k, v, mask))
        return (out * weight).sum(), out

    gradients, out = gradients_of_the_rest(q, k, v)
    for a in (out, *gradients):
        assert np.isfinite(np.asarray(a)[:, ~is_spoilt.ravel()]).all()


def test_the_lists_hold_the_blocks_that_a_tree_leaves():
    """A prompt of 2 blocks and 4 branches of 1: its 3 pairs, and 2 + 1 of each branch."""
    reach = np.concatenate([np.full(16, 47), np.repeat([23, 31, 39, 47], 8)])[None]
    impl = AttentionImpl(query_block=8, key_block=8, dense_tokens=0)
    mask = block_mask(None, reach, 3, impl)
    rows = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]]
    assert mask.by_query.starts.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    num = int(mask.by_query.starts[-1])
    assert mask.by_query.others[:num].tolist() == [j for row in rows for j in row]
    assert mask.by_key.starts.tolist() == [0, 6, 11, 12, 13, 14, 15]
    assert mask.by_key.others[:num].tolist() == [*range(6), *range(1, 6), 2, 3, 4, 5]


ROWS = st.lists(st.lists(st.integers(0, 23), min_size=24, max_size=24), min_size=2, max_size=2)


@settings(deadline=None)
@given(ROWS, st.sampled_from([(4, 8), (8, 4)]), st.booleans())
def test_every_pair_of_blocks_that_see_each_other_is_listed_once(rows, blocks, is_causal):
    last = np.maximum(rows, np.arange(24))
    first = np.broadcast_to(np.arange(24), last.shape)
    if not is_causal:
        first, last = (np.sort(a) for a in (np.minimum(rows, first), last))
        first = np.minimum(first, np.arange(24))
    impl = AttentionImpl(query_block=blocks[0], key_block=blocks[1], dense_tokens=0)
    mask = block_mask(None if is_causal else first, last, 1, impl)
    query = np.arange(24)[:, None]
    is_seen = (first[:, None] <= query) & (query <= last[:, None])
    is_seen = is_seen.reshape(2, 24 // blocks[0], blocks[0], 24 // blocks[1], blocks[1])
    expected = {
        (row * (24 // blocks[0]) + i, row * (24 // blocks[1]) + j)
        for row, i, j in zip(*np.nonzero(is_seen.any((2, 4))), strict=True)
    }
    for pairs, order in ((mask.by_query, 1), (mask.by_key, -1)):
        num = int(pairs.starts[-1])
        listed = [*zip(pairs.owners.tolist(), pairs.others.tolist(), strict=True)][:num]
        assert len(set(listed)) == num
        assert expected <= {pair[::order] for pair in listed}
        owners = np.repeat(np.arange(len(pairs.starts) - 1), np.diff(pairs.starts))
        np.testing.assert_array_equal(owners, pairs.owners[:num])


def test_a_segment_spans_its_run_and_padding_itself():
    first, last = segment_spans(jnp.array([[-1, -1, 0, 0, 0, 1, 2, 2, -1]]))
    assert first.tolist() == [[0, 1, 2, 2, 2, 5, 6, 6, 8]]
    assert last.tolist() == [[0, 1, 4, 4, 4, 5, 7, 7, 8]]
    assert causal_reach(jnp.array([[0, 0, 0], [-1, 0, 0]])).tolist() == [[2, 2, 2], [0, 2, 2]]


@pytest.mark.parametrize("name", IMPLS)
def test_large_scores_do_not_overflow(name):
    qkv, weight = arrays(2, 8)
    qkv = qkv[0], 200 * qkv[1], qkv[2]
    ours, expected = (jitted(i, *text(), *qkv, weight) for i in (IMPLS[name], None))
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_largest_difference_sees_a_wrong_kernel(name, monkeypatch):
    def difference():
        compare = jax.jit(lambda last: largest_difference(None, last, (K, 2, 8), IMPLS[name]))
        return float(compare(text()[1]))

    assert difference() < 2e-2
    run = kernels.RUN[name]

    def wrong(walks, *args, **kwargs):
        return [1.1 * a for a in run(walks, *args, **kwargs)]

    monkeypatch.setitem(kernels.RUN, name, wrong)
    assert difference() > 5e-2


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="attention must be one of xla, tpu, gpu, got 'splash'"):
        AttentionImpl("splash")
    with pytest.raises(ValueError, match="query_block 12 and key_block 8: one must divide the"):
        block_mask(
            None, text()[1], 1, dataclasses.replace(IMPLS["xla"], query_block=12, key_block=8)
        )
    (q, k, v), _ = arrays(2, 8)
    mask = block_mask(None, text()[1], 2, IMPLS["xla"])
    with pytest.raises(
        ValueError, match=r"the mask of rows \(2, 60\) must match q \(2, 59, 2, 2, 8\)"
    ):
        packed.attend(q[:, 1:], k[:, 1:], v[:, 1:], mask)
