"""The vision tower of Qwen3-VL: whole-image attention, learned positions, DeepStack.

LayerNorm and a plain GELU MLP throughout. Each patch gets a learned position, interpolated
bilinearly from a square table over its image (aligned corners), and rotary embeddings over rows and
columns. DeepStack: the outputs of a few intermediate layers go to the first decoder layers. Each
has a separate merger, whose LayerNorm spans all patches of a merge block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from models.attention.mask import AttentionImpl, BlockMask, block_mask, segment_spans
from models.config import VisionConfig
from models.layers import (
    LayerNorm,
    Linear,
    Params,
    checkpointed,
    constrain,
    layer_norm,
    linear,
    normal,
    stack,
)
from models.positions import ImagePatches
from models.rope import vision_rotary
from models.vision import (
    NORM_EPS,
    ImageFeatures,
    Merger,
    VisionAttention,
    attend_patches,
    merge,
    self_attention,
)


class VisionMLP(nnx.Module):
    """down(gelu(up(x))), with the tanh form of GELU."""

    def __init__(self, rngs: nnx.Rngs, size: int, mlp_size: int, dtype: Any):
        self.up = Linear(rngs, (size,), (mlp_size,), ("embed", "mlp"), dtype, bias=True)
        self.down = Linear(rngs, (mlp_size,), (size,), ("mlp", "embed"), dtype, bias=True)


class VisionLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        D = config.hidden_size
        self.attention_norm = LayerNorm((D,), ("embed",), dtype)
        self.attention = VisionAttention(rngs, config, dtype)
        self.mlp_norm = LayerNorm((D,), ("embed",), dtype)
        self.mlp = VisionMLP(rngs, D, config.intermediate_size, dtype)


class PositionTable(nnx.Module):
    """A learned position for every cell of a square grid, in raster order."""

    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        shape = (config.num_position_embeddings, config.hidden_size)
        self.table = normal(rngs, shape, (None, "embed"), dtype, fan_in=config.hidden_size)


class VisionTower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        C, D, M = config.patch_dim, config.hidden_size, config.merge_size**2
        self.patch_embed = Linear(rngs, (C,), (D,), (None, "embed"), dtype, bias=True)
        self.positions = PositionTable(rngs, config, dtype)
        self.layers = stack(lambda r: VisionLayer(r, config, dtype), config.num_layers, rngs)
        self.merger = Merger(rngs, config, LayerNorm((D,), ("embed",), dtype), dtype)

        def block_merger(r: nnx.Rngs) -> Merger:
            return Merger(r, config, LayerNorm((M, D), (None, "embed"), dtype), dtype)

        if config.deepstack_layers:
            self.deepstack = stack(block_merger, len(config.deepstack_layers), rngs)


def encode(
    p: Params,
    images: ImagePatches,
    config: VisionConfig,
    *,
    dtype: Any,
    remat: str,
    attention: AttentionImpl,
) -> ImageFeatures:
    """Features of every merge block, in the processor's order; padding gives finite values."""
    x = linear(p["patch_embed"], images.patches.astype(dtype))
    x = x + positions(p["positions"], images).astype(dtype)
    rotary = vision_rotary(images.coordinates, config)
    mask = block_mask(*segment_spans(images.segments), 1, attention)
    num_kept = len(config.deepstack_layers)

    def layer(p, x):
        return vision_layer(p, x, rotary, mask)

    layer = checkpointed(layer, remat)

    # The layer outputs for DeepStack are carried outside the rematerialised function; inside it,
    # every step would save `kept` as a residual. The last slot collects the unused outputs.
    def step(carry, xs):
        x, kept = carry
        p, slot = xs
        x = layer(p, x)
        return (x, jax.lax.dynamic_update_index_in_dim(kept, x, slot, 0)), None

    slots = np.full(config.num_layers, num_kept)
    slots[list(config.deepstack_layers)] = np.arange(num_kept)
    kept = jnp.zeros((num_kept + 1, *x.shape), x.dtype)
    (x, kept), _ = jax.lax.scan(step, (x, kept), (p["layers"], slots))

    def merged(p, x):
        return merge(p, x, config, layer_norm)

    deepstack = jax.vmap(merged)(p["deepstack"], kept[:-1]) if num_kept else None
    return ImageFeatures(merged(p["merger"], x), deepstack)


def positions(p: Params, images: ImagePatches) -> Float[Array, "B P D"]:
    """The learned position of each patch, a float32 weighted mean of four rows of the table."""
    assert images.position_weights is not None  # the images are packed for this tower
    rows = p["table"][images.position_rows].astype(jnp.float32)
    return (images.position_weights[..., None] * rows).sum(2)


def vision_layer(
    p: Params, x: Float[Array, "B P D"], rotary: tuple[Array, Array], mask: BlockMask
) -> Float[Array, "B P D"]:
    def attend(q, k, v):
        return attend_patches(q, k, v, mask)

    x = constrain(x, "batch", "tokens", None)
    y = layer_norm(p["attention_norm"], x, NORM_EPS)
    x = x + self_attention(p["attention"], y, rotary, attend)
    y = linear(p["mlp"]["up"], layer_norm(p["mlp_norm"], x, NORM_EPS))
    return x + linear(p["mlp"]["down"], jax.nn.gelu(y, approximate=True))
