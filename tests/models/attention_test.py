"""The structured attention equals a dense mask over whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models.attention import Tree, attend_segments, attend_tree

B, K, G, H = 2, 2, 3, 8
TREES = [Tree(11, 0, 0), Tree(6, 3, 4), Tree(7, 1, 5)]


def dense_mask(tree: Tree, segments: np.ndarray) -> np.ndarray:
    """[B, S, S], written from the definition."""
    S = tree.size
    mask = np.zeros((len(segments), S, S), bool)
    for i in range(S):
        for j in range(i + 1):
            branch_i = (i - tree.prefix) // tree.length if i >= tree.prefix else -1
            branch_j = (j - tree.prefix) // tree.length if j >= tree.prefix else -1
            mask[:, i, j] = branch_j in (-1, branch_i)
    return mask & (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, None]


def dense_attention(q, k, v, mask):
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k) * H**-0.5
    scores = jnp.where(mask[:, None, None], scores, -1e30)
    return jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(scores), v)


def inputs(size):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(B, size, K, G, H)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(B, size, K, H)), jnp.float32) for _ in range(2))
    segments = np.zeros((B, size), int)
    segments[1, :3] = -1
    segments[1, -1] = -1
    segments[0, 2:] = 1
    return q, k, v, segments


@pytest.mark.parametrize("chunk", [1024, 6])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_tree_equals_dense_mask_in_values_and_gradients(tree, chunk, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_CHUNK", chunk)
    q, k, v, segments = inputs(tree.size)
    mask = dense_mask(tree, segments)
    weight = jnp.asarray(mask.any(-1))[:, :, None, None, None] * jnp.cos(
        jnp.arange(q.size)
    ).reshape(q.shape)

    def run(attend):
        def loss(q, k, v):
            out = attend(q, k, v)
            return (out * weight).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    ours, out = run(lambda q, k, v: attend_tree(q, k, v, segments, tree))
    theirs, expected = run(lambda q, k, v: dense_attention(q, k, v, mask))
    np.testing.assert_allclose(out * weight, expected * weight, rtol=0, atol=2e-6)
    assert np.isfinite(out).all()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)


def test_large_prompt_scores_do_not_overflow():
    tree = Tree(6, 3, 4)
    q, k, v, segments = inputs(tree.size)
    k = k.at[:, : tree.prefix].multiply(200.0)
    expected = dense_attention(q, k, v, dense_mask(tree, segments))
    out = attend_tree(q, k, v, segments, tree)
    np.testing.assert_allclose(out[0], expected[0], rtol=0, atol=1e-4)


def test_rows_of_another_size_are_refused():
    q, k, v, segments = inputs(9)
    with pytest.raises(ValueError, match="has 18 tokens, got rows of 9"):
        attend_tree(q, k, v, segments, Tree(6, 3, 4))


@pytest.mark.parametrize("chunk", [1024, 4])
def test_segments_equal_dense_mask(chunk, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_CHUNK", chunk)
    q, k, v, segments = inputs(9)
    mask = (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, None]
    expected = dense_attention(q[:, :, :, :1], k, v, mask)[:, :, :, 0]
    ours = attend_segments(q[:, :, :, 0], k, v, jnp.asarray(segments))
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours[segments >= 0], expected[segments >= 0], rtol=0, atol=2e-6)
