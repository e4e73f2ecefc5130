"""The vision towers of Qwen2.5-VL and Qwen3-VL, as one transformer over patches.

Qwen2.5-VL: RMSNorm and gated SiLU, and windowed attention except in a few layers. The patches of a
window are consecutive, so that a windowed layer differs from the others by its mask alone.

Qwen3-VL: LayerNorm and a plain GELU MLP, whole-image attention, a learned position for each patch,
and DeepStack: the outputs of a few intermediate layers go to the first decoder layers. Each has a
separate merger, whose LayerNorm spans all patches of a merge block.

In both, rotary embeddings run over rows and columns, a matmul replaces the release's Conv3d patch
embedding (its stride equals its kernel size), and a merger maps merge_size² neighbouring patches to
one feature of the text width.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from models import layers
from models.attention.packed import XLA, AttentionImpl, BlockMask, attend, block_mask, segment_spans
from models.config import BackboneConfig, VisionConfig
from models.layers import MLP, Linear, Norm, Params, Rotary, Table, stack
from models.positions import ImagePatches

NORM_EPS = 1e-6  # of every norm in the towers; the same in all releases, absent from config.json


@flax.struct.dataclass
class ImageFeatures:
    """Image features of B prompts, of the text width, one for each of N merge blocks."""

    merged: Float[Array, "B N D"]  # replaces the embeddings of the image tokens
    # Added to the image tokens after the first L decoder layers; None without DeepStack.
    deepstack: Float[Array, "L B N D"] | None = None


# Logical axes of kernels.
PATCH_AXES, QKV_AXES = (None, "embed"), ("embed", None, "heads", "head_dim")
OUT_AXES, MERGER_AXES = ("heads", "head_dim", "embed"), (None, "embed", "mlp")


class VisionAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        D, N, H = config.hidden_size, config.num_heads, config.head_dim
        self.qkv = Linear(rngs, (D,), (3, N, H), QKV_AXES, dtype, bias=True)
        self.out = Linear(rngs, (N, H), (D,), OUT_AXES, dtype, bias=True)


class VisionLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        D, F = config.hidden_size, config.intermediate_size
        self.attention_norm = Norm(D, dtype=dtype, bias=not config.gated)
        self.attention = VisionAttention(rngs, config, dtype)
        self.mlp_norm = Norm(D, dtype=dtype, bias=not config.gated)
        self.mlp = MLP(rngs, D, F, dtype, bias=True, gated=config.gated)


class Merger(nnx.Module):
    """down(gelu(up(norm(patches)))) of every merge block."""

    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any, norm: Norm):
        M, D = config.merge_size**2, config.hidden_size
        F = M * D
        self.norm = norm
        self.up = Linear(rngs, (M, D), (F,), MERGER_AXES, dtype, bias=True)
        self.down = Linear(rngs, (F,), (config.output_size,), layers.MLP_DOWN, dtype, bias=True)


class VisionTower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        C, D, M = config.patch_dim, config.hidden_size, config.merge_size**2
        has_bias = not config.gated
        self.patch_embed = Linear(rngs, (C,), (D,), PATCH_AXES, dtype, bias=has_bias)
        if config.num_position_embeddings:  # of the cells of a square grid, in raster order
            self.positions = Table(rngs, config.num_position_embeddings, D, None, dtype)
        self.layers = stack(lambda r: VisionLayer(r, config, dtype), config.num_layers, rngs)
        self.merger = Merger(rngs, config, dtype, Norm(D, dtype=dtype, bias=has_bias))
        if config.deepstack_layers:

            def merger(r: nnx.Rngs) -> Merger:
                norm = Norm(M, D, dtype=dtype, axes=(None, "embed"), bias=has_bias)
                return Merger(r, config, dtype, norm)

            self.deepstack = stack(merger, len(config.deepstack_layers), rngs)


def encode_images(
    params: Params,
    images: ImagePatches,
    config: BackboneConfig,
    *,
    dtype: Any,
    remat: str = "none",
    attention: AttentionImpl = XLA,
) -> ImageFeatures:
    """Image features of every prompt, computed in `dtype`; finite also at padding.

    Args:
        params: of the backbone, in either layout.
        remat: what the backward pass rematerialises, see `layers.checkpointed`.
    """
    p, tower = params["vision"], config.vision
    assert tower is not None  # images come with a tower
    x = layers.linear(p["patch_embed"], images.patches.astype(dtype), PATCH_AXES)
    if "positions" in p:
        x = x + learned_positions(p["positions"], images).astype(dtype)
    rotary = layers.vision_rotary(images.coordinates, tower)
    whole = windows = block_mask(*segment_spans(images.segments), 1, attention)
    if images.windows is not None:
        windows = block_mask(*segment_spans(images.windows), 1, attention)

    def layer(p, x, is_full):
        mask = jax.tree.map(functools.partial(jnp.where, is_full), whole, windows)
        return vision_layer(p, x, rotary, mask)

    layer = layers.checkpointed(layer, remat)
    is_full = np.isin(np.arange(tower.num_layers), tower.full_attention_layers)
    num_kept = len(tower.deepstack_layers)

    # The layer outputs for DeepStack are carried outside the rematerialised function; inside it,
    # every step would save `kept` as a residual. The last index collects the unused outputs.
    def step(carry, xs):
        x, kept = carry
        p, is_full, index = xs
        x = layer(p, x, is_full)
        if num_kept:
            kept = jax.lax.dynamic_update_index_in_dim(kept, x, index, 0)
        return (x, kept), None

    index = np.full(tower.num_layers, num_kept)
    index[list(tower.deepstack_layers)] = np.arange(num_kept)
    kept = jnp.zeros((num_kept + 1, *x.shape), x.dtype) if num_kept else None
    (x, kept), _ = jax.lax.scan(step, (x, kept), (p["layers"], is_full, index))

    merged = functools.partial(merge, config=tower)
    deepstack = None if kept is None else jax.vmap(merged)(p["deepstack"], kept[:-1])
    return ImageFeatures(merged(p["merger"], x), deepstack)


def learned_positions(p: Params, images: ImagePatches) -> Float[Array, "B P D"]:
    """The learned position of each patch, a float32 weighted mean of four rows of the table."""
    assert images.position_weights is not None  # the images are packed for this tower
    rows = p["table"][images.position_rows].astype(jnp.float32)
    return (images.position_weights[..., None] * rows).sum(2)


def vision_layer(
    p: Params, x: Float[Array, "B P D"], rotary: Rotary, mask: BlockMask
) -> Float[Array, "B P D"]:
    """One layer, with bidirectional attention among the patches of an image or of a window."""
    x = layers.constrain(x, "batch", "tokens", None)
    y = layers.norm(p["attention_norm"], x, NORM_EPS)
    qkv = layers.linear(p["attention"]["qkv"], y, QKV_AXES)
    q, k, v = layers.rotate(qkv[:, :, 0], rotary), layers.rotate(qkv[:, :, 1], rotary), qkv[:, :, 2]
    q, k, v = (layers.constrain(a, "batch", None, "attended_heads", None) for a in (q, k, v))
    out = attend(q[:, :, :, None], k, v, mask)[:, :, :, 0]
    x = x + layers.linear(p["attention"]["out"], out, OUT_AXES, num_inputs=2)
    return x + layers.mlp(p["mlp"], layers.norm(p["mlp_norm"], x, NORM_EPS))


def merge(p: Params, x: Float[Array, "B P D"], config: VisionConfig) -> Float[Array, "B _ D"]:
    """One feature per merge block: down(gelu(up(norm(patches)))), with the exact (erf) GELU."""
    x = x.reshape(x.shape[0], -1, config.merge_size**2, x.shape[-1])
    x = layers.norm(p["norm"], x, NORM_EPS)
    x = layers.linear(p["up"], x, MERGER_AXES, num_inputs=2)
    return layers.linear(p["down"], jax.nn.gelu(x, approximate=False), layers.MLP_DOWN)
