"""The vision tower of Qwen2.5-VL: windowed attention, full attention in a few layers, a merger.

RMSNorm and gated SiLU throughout, rotary embeddings over rows and columns, one matmul for the
release's Conv3d patch embedding (its stride equals its kernel size). Patches stay in the
processor's order: a windowed layer gathers queries, keys and values into window bins and gathers
the output back.
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
    MLP,
    Linear,
    Norm,
    Params,
    checkpointed,
    constrain,
    linear,
    mlp,
    rms_norm,
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


class VisionLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        D, F = config.hidden_size, config.intermediate_size
        self.attention_norm = Norm(D, dtype)
        self.attention = VisionAttention(rngs, config, dtype)
        self.mlp_norm = Norm(D, dtype)
        self.mlp = MLP(rngs, D, F, dtype, bias=True)


class VisionTower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        C, D = config.patch_dim, config.hidden_size
        self.patch_embed = Linear(rngs, (C,), (D,), (None, "embed"), dtype, bias=False)
        self.layers = stack(lambda r: VisionLayer(r, config, dtype), config.num_layers, rngs)
        self.merger = Merger(rngs, config, Norm(D, dtype), dtype)


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
    rotary = vision_rotary(images.coordinates, config)
    is_full = np.isin(np.arange(config.num_layers), config.full_attention_layers)
    assert images.window_segments is not None  # the images are packed for this tower
    windows = images.window_segments.reshape(-1, images.window_segments.shape[-1])
    full, windowed = (
        block_mask(*segment_spans(a), 1, attention) for a in (images.segments, windows)
    )

    def layer(x, xs):
        return vision_layer(xs[0], x, rotary, images, (full, windowed), is_full=xs[1]), None

    x, _ = jax.lax.scan(checkpointed(layer, remat), x, (p["layers"], is_full))
    return ImageFeatures(merge(p["merger"], x, config, rms_norm))


def vision_layer(
    p: Params,
    x: Float[Array, "B P D"],
    rotary: tuple[Array, Array],
    images: ImagePatches,
    masks: tuple[BlockMask, BlockMask],
    *,
    is_full,
) -> Float[Array, "B P D"]:
    """One layer; `is_full` (a traced bool) selects the first mask (images), else windows."""
    x = constrain(x, "batch", "tokens", None)

    def attend(q, k, v):
        return jax.lax.cond(is_full, _attend_images, _attend_windows, q, k, v, images, masks)

    y = rms_norm(p["attention_norm"], x, NORM_EPS)
    x = x + self_attention(p["attention"], y, rotary, attend)
    return x + mlp(p["mlp"], rms_norm(p["mlp_norm"], x, NORM_EPS))


def _attend_images(q, k, v, images: ImagePatches, masks: tuple[BlockMask, BlockMask]):
    return attend_patches(q, k, v, masks[0])


def _attend_windows(q, k, v, images: ImagePatches, masks: tuple[BlockMask, BlockMask]):
    assert images.window_patches is not None and images.window_slots is not None
    B, W, S = images.window_patches.shape
    slots = jnp.maximum(images.window_patches, 0).reshape(B, W * S, 1, 1)
    q, k, v = (
        jnp.take_along_axis(a, slots, axis=1).reshape(B * W, S, *a.shape[2:]) for a in (q, k, v)
    )
    out = attend_patches(q, k, v, masks[1])
    out = out.reshape(B, W * S, *out.shape[2:])
    return jnp.take_along_axis(out, images.window_slots[:, :, None, None], axis=1)
