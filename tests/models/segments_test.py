"""Attention in chunks equals a dense mask, and reads no more keys than its segments make it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models import segments
from models.segments import attend_segments

K, G, H, SIZE = 2, 3, 8, 6
# Two rows each. Segments end within a chunk and at its end, and reach over several.
LAYOUTS = {
    "one": [[0] * 24, [0] * 24],
    "packed": [[0] * 5 + [1] * 7 + [2] * 9 + [-1] * 3, [0] * 18 + [1] * 6],
    "padding within": [[0] * 3 + [-1] * 2 + [0] * 9 + [-1] * 3 + [1] * 7, [-1] * 8 + [0] * 16],
    "padding alone": [[0] * 4 + [-1] * 20, [-1] * 24],
    "in any order": [[2, 0, 1] * 8, [3] * 7 + [1] * 9 + [3] * 8],
    "no multiple of a chunk": [[0] * 6 + [1] * 15, [0] * 2 + [1] * 5 + [2] * 9 + [-1] * 5],
}


@pytest.fixture
def in_chunks(monkeypatch):
    monkeypatch.setattr(segments, "_CHUNK", SIZE)
    monkeypatch.setattr(segments, "_WHOLE", SIZE)


def inputs(ids):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(*ids.shape, K, G, H)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(*ids.shape, K, H)), jnp.float32) for _ in range(2))
    weight = np.cos(np.arange(q.size)).reshape(q.shape) * (ids >= 0)[:, :, None, None, None]
    return q, k, v, weight


def dense(q, k, v, ids, *, is_causal):
    mask = ids[:, :, None] == ids[:, None]
    if is_causal:
        mask = mask & np.tri(ids.shape[1], dtype=bool)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k) * H**-0.5
    scores = jnp.where(mask[:, None, None], scores, -1e30)
    return jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(scores), v)


def value_and_gradients(attend, q, k, v, ids, weight, **kwargs):
    """The output where it means something, and the gradients of its weighted sum."""

    def loss(q, k, v):
        out = attend(q, k, v, ids, **kwargs)
        return (out * weight).sum(), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    assert np.isfinite(out).all()
    return np.where(weight, out, 0), *gradients


def assert_equals_dense(ids, *, is_causal):
    q, k, v, weight = inputs(ids)
    ours = value_and_gradients(attend_segments, q, k, v, ids, weight, is_causal=is_causal)
    expected = value_and_gradients(dense, q, k, v, ids, weight, is_causal=is_causal)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_equal_dense_mask_in_values_and_gradients(layout, is_causal, in_chunks):
    assert_equals_dense(np.array(LAYOUTS[layout]), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "both ways"])
def test_a_short_row_equals_dense_mask_in_values_and_gradients(is_causal):
    assert_equals_dense(np.array(LAYOUTS["padding within"]), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "both ways"])
def test_chunks_over_a_mesh_equal_those_of_one_device(is_causal, in_chunks):
    """Rows that lie on different devices need different windows."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    ids = np.array(LAYOUTS["packed"])
    q, k, v, weight = inputs(ids)
    alone = value_and_gradients(attend_segments, q, k, v, ids, weight, is_causal=is_causal)
    spread = (jax.device_put(a, NamedSharding(mesh, P("data", None, "tensor"))) for a in (q, k, v))
    rows = jax.device_put(ids, NamedSharding(mesh, P("data")))
    ours = value_and_gradients(attend_segments, *spread, rows, weight, is_causal=is_causal)
    for a, b in zip(ours, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "both ways"])
def test_what_no_token_of_a_chunk_sees_is_not_computed(is_causal, in_chunks):
    """Values that are no numbers would spoil any sum that they entered, even with weight 0."""
    ids = np.repeat([[0, 1, 2, -1]], SIZE, axis=1)
    q, k, v, weight = inputs(ids)
    v = jnp.where((ids == 1)[:, :, None, None], jnp.nan, v)

    def loss(q, k, v):
        out = attend_segments(q, k, v, ids, is_causal=is_causal)
        return jnp.where((ids == 1)[:, :, None, None, None], 0, out * weight).sum()

    value, (dq, dk, dv) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    for gradient in (dq, dk, dv):
        assert np.isfinite(np.asarray(gradient)[ids != 1]).all()


ROWS = st.lists(st.lists(st.integers(-1, 3), min_size=20, max_size=20), min_size=2, max_size=2)


@settings(deadline=None)
@given(ROWS, st.booleans())
def test_a_window_holds_every_key_that_its_chunk_sees(rows, is_causal):
    lengths = segments._window_lengths(20, 4)
    for start, first, kind in zip(*windows(rows, 4, is_causal), strict=True):
        stop = first + lengths[kind]
        assert first >= 0 and stop <= 20
        for row in np.array(rows):
            for query in range(start, start + 4):
                seen = np.flatnonzero((row == row[query]) & (row >= 0))
                seen = seen[seen <= query] if is_causal else seen
                assert all((first <= seen) & (seen < stop))


def windows(rows, size, is_causal):
    return map(np.asarray, segments._key_windows(jnp.asarray(rows), size, is_causal))


def test_a_window_is_as_short_as_the_segments_of_its_chunk():
    rows = [[0] * 512 + [1] * 200 + [2] * 150 + [-1] * 162]
    lengths = segments._window_lengths(1024, 128)
    assert lengths == [128, 192, 256, 384, 512, 768, 1024]

    def found(is_causal):
        _, firsts, kinds = windows(rows, 128, is_causal)
        return [(first, lengths[kind]) for first, kind in zip(firsts, kinds, strict=True)]

    first = [(0, 128), (0, 256), (0, 384), (0, 512)]
    padding = (1024 - 128, 128)
    assert found(True) == [*first, (512, 128), (512, 256), (712, 192), padding]
    assert found(False) == [*[(0, 512)] * 4, (512, 256), (512, 384), (712, 192), padding]
