"""Shared parts of the vision towers: image features, attention over patches, the merger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
from flax import nnx
from jaxtyping import Array, Float

from models.attention.mask import BlockMask
from models.attention.packed import attend
from models.config import VisionConfig
from models.layers import Linear, Params, constrain, linear
from models.rope import rotate

NORM_EPS = 1e-6  # of every norm in the towers; the same in all releases, absent from config.json


@flax.struct.dataclass
class ImageFeatures:
    """Image features of B prompts, of the text width, one for each of N merge blocks.

    Attributes:
        merged: replaces the embeddings of the image tokens.
        deepstack: added to the image tokens after the first L decoder layers; None without
            DeepStack.
    """

    merged: Float[Array, "B N D"]
    deepstack: Float[Array, "L B N D"] | None = None


class VisionAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, dtype: Any):
        D, N, H = config.hidden_size, config.num_heads, config.head_dim
        axes = ("embed", None, "heads", "head_dim")
        self.qkv = Linear(rngs, (D,), (3, N, H), axes, dtype, bias=True)
        self.out = Linear(rngs, (N, H), (D,), ("heads", "head_dim", "embed"), dtype, bias=True)


class Merger(nnx.Module):
    """Maps merge_size² neighbouring patches to one feature of the text width."""

    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, norm: nnx.Module, dtype: Any):
        M, D = config.merge_size**2, config.hidden_size
        F = M * D
        self.norm = norm
        self.up = Linear(rngs, (M, D), (F,), (None, "embed", "mlp"), dtype, bias=True)
        self.down = Linear(rngs, (F,), (config.output_size,), ("mlp", "embed"), dtype, bias=True)


def self_attention(
    p: Params,
    x: Float[Array, "B P D"],
    rotary: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
) -> Float[Array, "B P D"]:
    """Self-attention; `attend` maps rotated q, k and v [B, P, N, H] to [B, P, N, H]."""
    qkv = linear(p["qkv"], x)
    q, k, v = rotate(qkv[:, :, 0], rotary), rotate(qkv[:, :, 1], rotary), qkv[:, :, 2]
    q, k, v = (constrain(a, "batch", None, "attended_heads", None) for a in (q, k, v))
    return linear(p["out"], attend(q, k, v), num_inputs=2)


def attend_patches(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P N H"],
    v: Float[Array, "B P N H"],
    mask: BlockMask,
) -> Float[Array, "B P N H"]:
    """Bidirectional attention among the patches of an image or of a window."""
    return attend(q[:, :, :, None], k, v, mask)[:, :, :, 0]


def merge(
    p: Params,
    x: Float[Array, "B P D"],
    config: VisionConfig,
    norm: Callable[[Params, Array, float], Array],
) -> Float[Array, "B _ D"]:
    """down(gelu(up(norm(patches)))) of every merge block, with the exact (erf) GELU."""
    x = norm(p["norm"], x.reshape(x.shape[0], -1, config.merge_size**2, x.shape[-1]), NORM_EPS)
    x = jax.nn.gelu(linear(p["up"], x, num_inputs=2), approximate=False)
    return linear(p["down"], x)
