"""Lively random weights of small backbones, and prompts for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_backbones import WITH_TOWER, Batch, small_backbone

from models import backbone
from models.config import BackboneConfig
from models.positions import feature_indices, pack_images, prompt_positions


@pytest.fixture(scope="session", params=WITH_TOWER)
def family(request) -> str:
    """Every test that asks for a backbone runs for both with a tower; others name theirs:

    @pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
    """
    return request.param


@pytest.fixture(scope="session")
def config(family) -> BackboneConfig:
    return small_backbone(family)


@pytest.fixture(scope="session")
def tied_config(config) -> BackboneConfig:
    return dataclasses.replace(
        config, text=dataclasses.replace(config.text, tie_embeddings=True, num_kv_heads=3)
    )


@pytest.fixture(scope="session")
def make_params():
    """make_params(config) -> params that hide nothing: large weights, random biases and scales."""

    def make(config: BackboneConfig) -> dict:
        rng = np.random.default_rng(0)
        spread = {"kernel": (0, 0.2), "bias": (0, 0.5), "scale": (1, 0.4), "table": (0, 0.7)}

        def draw(path, leaf):
            return jnp.asarray(rng.normal(*spread[path[-1].key], leaf.shape), jnp.float32)

        shapes = jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))
        return jax.tree_util.tree_map_with_path(draw, shapes)

    return make


@pytest.fixture(scope="session")
def params(config, make_params) -> dict:
    return make_params(config)


@pytest.fixture(scope="session")
def make_batch(config):
    """make_batch([[(rows, columns), ...] per prompt]) -> Batch; columns and rows in patches."""

    def make(sizes, *, num_text=9, num_patches=160, contrast=1.0) -> Batch:
        rng = np.random.default_rng(0)
        texts, patches, grids = [], [], []
        for i, prompt in enumerate(sizes):
            tokens = list(rng.integers(0, 100, num_text + 3 * i))
            for height, width in prompt:
                image = [config.image_token_id] * (height * width // 4)
                tokens += [config.vision_start_token_id, *image, config.vision_end_token_id]
                tokens += list(rng.integers(0, 100, 4))
            texts.append(np.asarray(tokens))
            grids.append(np.array([[1, h, w] for h, w in prompt], np.int64).reshape(-1, 3))
            num = sum(h * w for h, w in prompt)
            pixels = contrast * rng.normal(
                size=(num, config.vision.patch_dim if config.vision else 0)
            )
            patches.append(pixels.astype(np.float32))
        P = max(map(len, texts))
        rows = []
        for text, grid in zip(texts, grids, strict=True):
            pad = P - len(text)
            positions, after = prompt_positions(text, grid, config)
            rows.append(
                (
                    np.pad(text, (pad, 0), constant_values=config.pad_token_id),
                    np.arange(P) >= pad,
                    np.pad(positions, ((pad, 0), (0, 0))),
                    after,
                    np.pad(feature_indices(text, grid, config), (pad, 0), constant_values=-1),
                )
            )
        tokens, is_valid, positions, after, feature_index = map(np.stack, zip(*rows, strict=True))
        images = None
        if any(map(len, grids)):
            images = pack_images(patches, grids, config.vision, num_patches)
        return Batch(
            tokens,
            is_valid,
            jnp.asarray(positions),
            jnp.asarray(after),
            feature_index,
            jax.tree.map(jnp.asarray, images),
            patches,
            grids,
        )

    return make
