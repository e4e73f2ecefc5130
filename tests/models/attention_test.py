"""The structured attention equals a dense mask over whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from models import attention, segments
from models.attention import Kernel, Tree, attend_tree

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


def values_and_gradients(attend, q, k, v, weight):
    """attend(q, k, v) and the gradients of its weighted sum by each of them."""

    def loss(q, k, v):
        out = attend(q, k, v)
        return (out * weight).sum(), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, gradients


def weights_like(q, is_token):
    """Weights of no symmetry, 0 at padding."""
    return is_token[:, :, None, None, None] * np.cos(np.arange(q.size)).reshape(q.shape)


def inputs(size, group=G):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(B, size, K, group, H)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(B, size, K, H)), jnp.float32) for _ in range(2))
    segments = np.zeros((B, size), int)
    segments[1, :3] = -1
    segments[1, -1] = -1
    segments[0, 2:] = 1
    return q, k, v, segments


@pytest.mark.parametrize("chunk", [1024, 6])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_tree_equals_dense_mask_in_values_and_gradients(tree, chunk, monkeypatch):
    monkeypatch.setattr(attention, "_BRANCH_CHUNK", chunk)
    monkeypatch.setattr(segments, "_CHUNK", chunk)
    q, k, v, ids = inputs(tree.size)
    mask = dense_mask(tree, ids)
    weight = weights_like(q, mask.any(-1))
    out, ours = values_and_gradients(
        lambda q, k, v: attend_tree(q, k, v, ids, tree), q, k, v, weight
    )
    expected, theirs = values_and_gradients(
        lambda q, k, v: dense_attention(q, k, v, mask), q, k, v, weight
    )
    np.testing.assert_allclose(out * weight, expected * weight, rtol=0, atol=2e-6)
    assert np.isfinite(out).all()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)


def assert_splash_equals_dense_mask(tree, kernel, group=G):
    """Values within 2e-6 and gradients within 1e-5 of their largest entry."""
    q, k, v, segments = inputs(tree.size, group)
    mask = dense_mask(tree, segments)
    weight = weights_like(q, mask.any(-1))
    out, ours = values_and_gradients(
        lambda q, k, v: attend_tree(q, k, v, jnp.asarray(segments), tree, kernel), q, k, v, weight
    )
    expected, theirs = values_and_gradients(
        lambda q, k, v: dense_attention(q, k, v, mask), q, k, v, weight
    )
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out * weight, expected * weight, rtol=0, atol=2e-6)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


# Whole blocks that see nothing of each other, a row that is no multiple of a block, a prompt alone.
@pytest.mark.parametrize("tree", [Tree(128, 2, 128), Tree(90, 3, 50), Tree(150, 0, 0)], ids=str)
def test_splash_equals_dense_mask_in_values_and_gradients(tree):
    assert_splash_equals_dense_mask(tree, Kernel("splash", interpret=True))


# Two kv heads of three or four query heads: split over one axis and not the other, which does not
# divide; copied to be split over both; kept whole where nothing divides.
@pytest.mark.parametrize(
    ("group", "tensor", "sequence"), [(3, 2, 2), (4, 2, 2), (3, 4, 1)], ids=str
)
def test_splash_equals_dense_mask_over_a_mesh(group, tensor, sequence):
    axes = ("data", "tensor", "sequence")
    mesh = jax.make_mesh((2, tensor, sequence), axes, (AxisType.Auto,) * 3)
    kernel = Kernel("splash", mesh, axes[:1], axes[1:], interpret=True)
    assert_splash_equals_dense_mask(Tree(60, 2, 30), kernel, group)


def test_splash_skips_the_blocks_that_the_tree_leaves_empty():
    tree, block = Tree(256, 4, 128), 128
    kernel = attention._splash_kernel(tree, tree.size, 4, block, True)
    # Of the prompt 3 of 4 blocks; of each response its 2 of the prompt and its own.
    for info in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info):
        assert (info.block_mask > 0).sum() == 3 + 4 * (2 + 1)


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
