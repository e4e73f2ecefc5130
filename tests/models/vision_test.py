"""The tower sees only what belongs together: padding, bins and other images change nothing.

Nor does remat, and bfloat16 changes little.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models import backbone, layers
from models.attention.packed import AttentionImpl
from models.positions import pack_images

SIZES = [(10, 6), (4, 4), (2, 6)]


@pytest.fixture(scope="module")
def encode(params, config):
    """images -> features [B, N, width]: those merged last, then those of DeepStack."""

    @jax.jit
    def run(images):
        return backbone.encode_images(params, images, config, dtype=jnp.float32)

    def encode(images):
        return np.concatenate(parts(run(jax.tree.map(jnp.asarray, images))), axis=-1)

    return encode


def parts(features):
    return [features.merged, *(() if features.deepstack is None else features.deepstack)]


@pytest.fixture(scope="module")
def together(encode, make_batch):
    batch = make_batch([SIZES, [], []])
    return batch, encode(batch.images)


def test_each_image_alone_gives_the_same_features(together, encode, config):
    batch, features = together
    counts = [h * w for h, w in SIZES]
    alone = [[patches] for patches in np.split(batch.patches[0], np.cumsum(counts)[:-1])]
    grids = [[grid] for grid in batch.grids[0]]
    packed = pack_images([a[0] for a in alone], grids, config.vision, 160)
    separate = encode(packed)
    ends = np.cumsum(counts) // 4
    for i, (stop, count) in enumerate(zip(ends, counts, strict=True)):
        ours = features[0, stop - count // 4 : stop]
        np.testing.assert_allclose(ours, separate[i, : count // 4], rtol=0, atol=2e-5)


def test_more_padding_changes_no_feature(together, encode, config):
    batch, features = together
    num = len(batch.patches[0]) // 4
    wider = encode(pack_images(batch.patches, batch.grids, config.vision, 240))
    np.testing.assert_allclose(wider[0, :num], features[0, :num], rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def gradient(together, params, config):
    """(remat) -> gradient of the mean square of all features, by the tower."""

    def gradient(remat):
        def loss(vision):
            features = backbone.encode_images(
                {"vision": vision}, together[0].images, config, dtype=jnp.float32, remat=remat
            )
            return sum(jnp.square(leaf).mean() for leaf in jax.tree.leaves(features))

        return jax.jit(jax.grad(loss))(params["vision"])

    return gradient


@pytest.fixture(scope="module")
def without_remat(gradient):
    return gradient("none")


def test_a_row_without_images_is_finite_with_finite_gradients(together, without_remat):
    _, features = together
    assert np.isfinite(features).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(without_remat))


def test_remat_equals_no_remat(gradient, without_remat):
    for a, b in zip(*map(jax.tree.leaves, (gradient("layer"), without_remat)), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("family", "dense_tokens"),
    [pytest.param("qwen2_5_vl", 0, id="blocks"), pytest.param("qwen3_vl", 1000, id="dense")],
    indirect=["family"],
)
def test_a_mesh_changes_no_feature_and_no_gradient(params, make_batch, config, dense_tokens):
    """Patches are sharded between attentions, and heads inside them."""
    images = make_batch([SIZES, [(4, 6)]]).images
    mesh = jax.make_mesh((2, 2, 2), ("data", "tensor", "sequence"), (AxisType.Auto,) * 3)
    axes = {"batch": "data", "tokens": "sequence", "attended_heads": "tensor"}
    blocks = dict(query_block=32, key_block=16, dense_tokens=dense_tokens)
    sharded = AttentionImpl("xla", mesh, ("data",), ("tensor", "sequence"), **blocks)
    used = (images.segments >= 0)[:, ::4, None]

    def place(x, names):
        spec = P(*(axes.get(name) for name in names))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def gradient(attention, place):
        def loss(vision):
            features = backbone.encode_images(
                {"vision": vision}, images, config, dtype=jnp.float32, attention=attention
            )
            return sum(jnp.sin(leaf * used).sum() for leaf in jax.tree.leaves(features)), features

        with layers.activation_sharding(place):
            return jax.jit(jax.grad(loss, has_aux=True))(params["vision"])

    ours = gradient(sharded, place)
    alone = gradient(AttentionImpl("xla", **blocks), lambda x, names: x)
    for a, b in zip(*map(jax.tree.leaves, (ours, alone)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_bfloat16_features_stay_close_to_float32(together, params, config):
    batch, features = together
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    encode = jax.jit(lambda p: backbone.encode_images(p, batch.images, config, dtype=jnp.bfloat16))
    used = np.asarray(batch.images.segments)[:, ::4] >= 0
    narrow = parts(encode(half))
    for ours, exact in zip(narrow, np.split(features, len(narrow), axis=-1), strict=True):
        assert ours.dtype == jnp.bfloat16
        error = np.abs(ours.astype(jnp.float32) - exact)[used]
        assert error.mean() < 0.05 * np.abs(exact[used]).mean()
