"""The tower sees only what belongs together: padding, bins and other images change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import backbone
from models.positions import pack_images

SIZES = [(10, 6), (4, 4), (2, 6)]


@pytest.fixture(scope="module")
def encode(params, config):
    """images -> features [B, N, width]: those merged last, then those of DeepStack."""

    @jax.jit
    def run(images):
        return backbone.encode_images(params, images, config, dtype=jnp.float32)

    def encode(images):
        features = run(jax.tree.map(jnp.asarray, images))
        deepstack = () if features.deepstack is None else features.deepstack
        return np.concatenate([features.merged, *deepstack], axis=-1)

    return encode


@pytest.fixture(scope="module")
def together(encode, make_batch):
    batch = make_batch([SIZES, []])
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


def test_a_row_without_images_is_finite_with_finite_gradients(together, params, config):
    batch, features = together
    assert np.isfinite(features).all()

    def loss(p):
        features = backbone.encode_images(p, batch.images, config, dtype=jnp.float32)
        return sum(jnp.square(leaf[..., 0, :5, :]).mean() for leaf in jax.tree.leaves(features))

    gradients = jax.jit(jax.grad(loss))(params)["vision"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
