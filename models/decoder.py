"""The text decoder: one layer function for training, prefill and decoding.

A layer passes its rotated queries, keys and values to an `attend` function. Training (tree mask),
prefill (keeps keys and values) and decoding (reads and writes the KV cache) differ only in that
function. Training scans stacked layers. Decoding unrolls a list of layers, with q, k, v fused into
one matmul and gate, up into another, since individual matmuls take most of the time on a CPU and
with small batches.

The public functions, which `backbone` re-exports, take the parameters and config of the backbone.

DeepStack: if the tower also returns features of intermediate layers, the l-th of them are added to
the prompt's image tokens after decoder layer l. Responses have no images, so decoding adds none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models import experts, layers
from models.attention.cached import attend_cached, cache_mask, keys_axis, stored_keys
from models.attention.packed import XLA, AttentionImpl, BlockMask, attend, block_mask, causal_reach
from models.config import BackboneConfig, TextConfig
from models.layers import MLP, Linear, Norm, Params, Rotary, Table, stack
from models.vision import ImageFeatures


@flax.struct.dataclass
class KeyValues:
    """KV cache by layer: of the prefix that the rows of a prompt share, or of their suffixes."""

    keys: list[Array]  # like the values, on most devices transposed: see `cached.stored_keys`
    values: list[Array]  # [B, K, P, H] or [B, R, K, S, H]


# Logical axes of a layer's keys, or of its values, in the prefix and in the suffix cache.
PREFIX_AXES = ("batch", "kv_heads", None, None)
SUFFIX_AXES = ("batch", None, "kv_heads", None, None)


# Logical axes of kernels.
QUERY_AXES, KEY_AXES = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
OUT_AXES = ("heads", "head_dim", "embed")


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: TextConfig, dtype: Any):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.q = Linear(rngs, (D,), (N, H), QUERY_AXES, dtype, bias=config.qkv_bias)
        self.k = Linear(rngs, (D,), (K, H), KEY_AXES, dtype, bias=config.qkv_bias)
        self.v = Linear(rngs, (D,), (K, H), KEY_AXES, dtype, bias=config.qkv_bias)
        self.out = Linear(rngs, (N, H), (D,), OUT_AXES, dtype, bias=False)
        if config.qk_norm:
            self.q_norm = Norm(H, dtype=dtype, axes=("head_dim",))
            self.k_norm = Norm(H, dtype=dtype, axes=("head_dim",))


class DecoderLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: TextConfig, dtype: Any):
        D, F = config.hidden_size, config.intermediate_size
        self.attention_norm = Norm(D, dtype=dtype)
        self.attention = Attention(rngs, config, dtype)
        self.mlp_norm = Norm(D, dtype=dtype)
        if config.num_experts:
            self.mlp = experts.SparseMLP(rngs, config, dtype)
        else:
            self.mlp = MLP(rngs, D, F, dtype, bias=False)


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: TextConfig, dtype: Any):
        V, D = config.vocab_size, config.hidden_size
        self.embed = Table(rngs, V, D, "vocab", dtype)
        self.layers = stack(lambda r: DecoderLayer(r, config, dtype), config.num_layers, rngs)
        self.norm = Norm(D, dtype=dtype)
        if not config.tie_embeddings:
            self.unembed = Table(rngs, V, D, "vocab", dtype)


def decoder_layer(
    p: Params,
    x: Float[Array, "... D"],
    rotary: Rotary,
    attend: Callable[[Array, Array, Array], tuple[Array, " Any"]],
    config: TextConfig,
    routes: Int[Array, "... K"] | None = None,
) -> tuple[Float[Array, "... D"], Any, Int[Array, "... K"] | None]:
    """One layer, with parameters of either layout.

    Args:
        x: [B, S, D], or [B, R, T, D] in decoding.
        rotary: of each token.
        attend: (q [..., K, G, H], k [..., K, H], v [..., K, H]) -> (output like q, kept).
        routes: experts of each token, see `experts.sparse_mlp`.

    Returns:
        The layer's output, `kept` as `attend` returned it, and the experts that a sparse decoder's
        router chooses, else None.
    """
    spread = (None,) * (x.ndim - 3)
    x = layers.constrain(x, "batch", *spread, "tokens", None)
    y = layers.rms_norm(p["attention_norm"], x, config.norm_eps)
    q, k, v = _project(p["attention"], y, config)
    q = layers.rotate(q.reshape(*q.shape[:-3], -1, q.shape[-1]), rotary).reshape(q.shape)
    q = layers.constrain(q, "batch", *spread, None, "attended_heads", None, None)
    kv_axes = ("batch", *spread, None, "attended_heads", None)
    k, v = layers.constrain(layers.rotate(k, rotary), *kv_axes), layers.constrain(v, *kv_axes)
    y, kept = attend(q, k, v)
    y = y.reshape(*y.shape[:-3], config.num_heads, config.head_dim)
    x = x + layers.linear(p["attention"]["out"], y, OUT_AXES, num_inputs=2)
    y = layers.rms_norm(p["mlp_norm"], x, config.norm_eps)
    if config.num_experts:
        y, chosen = experts.sparse_mlp(p["mlp"], y, config, routes)
    else:
        y, chosen = layers.mlp(p["mlp"], y), None
    return x + y, kept, chosen


def _project(p: Params, x: Array, config: TextConfig) -> tuple[Array, Array, Array]:
    """Queries [..., K, G, H] grouped by the kv head they use, keys and values [..., K, H]."""
    if "qkv" in p:
        qkv = layers.linear(p["qkv"], x, KEY_AXES)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    else:
        q = layers.linear(p["q"], x, QUERY_AXES)
        k, v = (layers.linear(p[name], x, KEY_AXES) for name in "kv")
        q = q.reshape(*q.shape[:-2], config.num_kv_heads, -1, config.head_dim)
    if config.qk_norm:
        q = layers.rms_norm(p["q_norm"], q, config.norm_eps)
        k = layers.rms_norm(p["k_norm"], k, config.norm_eps)
    return q, k, v


def text_mask(
    reach: Int[Array, "B S"], config: BackboneConfig, attention: AttentionImpl = XLA
) -> BlockMask:
    """The mask of packed text rows, for `forward`.

    `reach` is the last token that attends to each token: the end of its tree for a prompt token,
    the end of its branch for a response token, the token itself for padding.
    """
    return block_mask(None, reach, config.text.num_heads // config.text.num_kv_heads, attention)


def forward(
    params: Params,
    x: Float[Array, "B S D"],
    positions: Int[Array, "B S 3"],
    mask: BlockMask,
    config: BackboneConfig,
    *,
    remat: str = "none",
    features: ImageFeatures | None = None,
    feature_index: Int[Array, "B S"] | None = None,
    routes: Int[Array, "B S L K"] | None = None,
) -> tuple[Float[Array, "B S D"], Int[Array, "B S L K"] | None]:
    """Hidden states of packed rows after the final norm, and each token's experts.

    The experts are those that the routers of a sparse decoder choose, by layer, else None.

    Args:
        params: the training layout.
        x, positions: embedded rows and M-RoPE ids; a branch continues from its prompt's end.
        mask: attention mask and implementation, from `text_mask`.
        remat: what the backward pass rematerialises, see `layers.checkpointed`.
        features: of the rows' images; their DeepStack features are added to the image tokens.
        feature_index: of each token among the features, -1 for none.
        routes: experts to use in place of the routers' choice; -1 for tokens that keep it.
    """
    p, text = params["text"], config.text
    rotary = layers.text_rotary(positions, text)
    if routes is not None:
        routes = jnp.moveaxis(routes, 2, 0)

    def layer(x, xs):
        p, l, routes = xs
        attended = lambda q, k, v: (attend(q, k, v, mask), None)  # noqa: E731
        x, _, chosen = decoder_layer(p, x, rotary, attended, text, routes)
        return _with_deepstack(x, l, features, feature_index), chosen

    layer = layers.checkpointed(layer, remat)
    x, chosen = jax.lax.scan(layer, x, (p["layers"], jnp.arange(text.num_layers), routes))
    hidden = layers.rms_norm(p["norm"], x, text.norm_eps)
    return hidden, None if chosen is None else jnp.moveaxis(chosen, 0, 2)


def to_decode_layout(p: Params, config: TextConfig) -> Params:
    """Unstacks the layers, fuses kernels with the same input, and puts output axes first.

    q, k, v become one kernel [K, G + 2, H, D]: the query heads of a kv head, then its key and its
    value, so that the fused kernel can be sharded over kv heads. gate, up become [2, F, D]; the
    output projection becomes [D, N·H]. A sparse MLP stays as it is.
    """
    K, H = config.num_kv_heads, config.head_dim

    def fuse_qkv(q, k, v):
        q = q.reshape(*q.shape[:-2], K, -1, H)
        return jnp.concatenate([q, k[..., None, :], v[..., None, :]], axis=-2)

    def decode_layer(l):
        layer = jax.tree.map(lambda a: a[l], p["layers"])
        attention, mlp = layer["attention"], layer["mlp"]
        qkv = jax.tree.map(fuse_qkv, *(attention.pop(name) for name in "qkv"))
        attention |= {"qkv": _transposed(qkv), "out": _transposed(attention["out"], num_inputs=2)}
        if config.num_experts:
            return layer
        gate_up = jax.tree.map(lambda *pair: jnp.stack(pair, axis=-2), mlp["gate"], mlp["up"])
        mlp = {"gate_up": _transposed(gate_up), "down": _transposed(mlp["down"])}
        return {**layer, "mlp": mlp}

    return {**p, "layers": [decode_layer(l) for l in range(config.num_layers)]}


def decode_axes(axes: Params, config: TextConfig) -> Params:
    """Logical axis names of the tree of `to_decode_layout`, from those of the training layout."""
    is_axes = lambda node: isinstance(node, tuple)  # noqa: E731
    layer = jax.tree.map(lambda names: names[1:], axes["layers"], is_leaf=is_axes)
    q, _, _ = (layer["attention"].pop(name) for name in "qkv")
    qkv = ("kv_heads", None, "head_dim")
    fused = {"transposed": (*qkv, "embed")} | ({"bias": qkv} if "bias" in q else {})
    layer["attention"] |= {"qkv": fused, "out": {"transposed": ("embed", "heads")}}
    if not config.num_experts:
        mlp = {"gate_up": (None, "mlp", "embed"), "down": ("embed", "mlp")}
        layer["mlp"] = {name: {"transposed": names} for name, names in mlp.items()}
    return {**axes, "layers": [layer] * config.num_layers}


def gather_features(
    features: Float[Array, "B N D"], feature_index: Int[Array, "B S"], elsewhere: Array | float
) -> Float[Array, "B S D"]:
    """The feature of each token, or `elsewhere` where its index is -1."""
    named = jnp.take_along_axis(features, jnp.maximum(feature_index, 0)[..., None], axis=1)
    return jnp.where((feature_index >= 0)[..., None], named, elsewhere)


def _with_deepstack(
    x: Array, l: int | Array, features: ImageFeatures | None, feature_index: Array | None
) -> Array:
    """Adds the DeepStack features of layer l, which may be traced, to the image tokens."""
    if features is None or features.deepstack is None:
        return x
    assert feature_index is not None  # they come together
    deepstack = features.deepstack

    def added(x):
        return x + gather_features(deepstack[l], feature_index, 0.0).astype(x.dtype)

    if isinstance(l, int):
        return added(x) if l < len(deepstack) else x
    return jax.lax.cond(l < len(deepstack), added, lambda x: x, x)


def _transposed(p: Params, num_inputs: int = 1) -> Params:
    kernel = jnp.moveaxis(p["kernel"], range(num_inputs), range(-num_inputs, 0))
    kernel = kernel.reshape(*kernel.shape[: kernel.ndim - num_inputs], -1)
    return {"transposed": kernel, **{name: a for name, a in p.items() if name != "kernel"}}


def unembedding(params: Params, config: BackboneConfig) -> Float[Array, "V D"]:
    """The table of `unembed`."""
    return params["text"]["embed" if config.text.tie_embeddings else "unembed"]["table"]


def unembed(
    params: Params, hidden: Float[Array, "... D"], config: BackboneConfig
) -> Float[Array, "... V"]:
    """Float32 logits over the vocabulary, from the embedding table if the embeddings are tied."""
    table = unembedding(params, config).astype(hidden.dtype)
    if isinstance(params["text"]["layers"], list):
        # The barrier keeps the transpose out of the matmul: a TPU would copy the logits for it.
        logits = jnp.tensordot(table, hidden, (-1, -1), preferred_element_type=jnp.float32)
        return jnp.moveaxis(jax.lax.optimization_barrier(logits), 0, -1)
    return jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)


def prefill(
    params: Params,
    x: Float[Array, "B P D"],
    positions: Int[Array, "B P 3"],
    is_valid: Bool[Array, "B P"],
    config: BackboneConfig,
    *,
    features: ImageFeatures | None = None,
    feature_index: Int[Array, "B P"] | None = None,
    attention: AttentionImpl = XLA,
) -> tuple[Float[Array, "B P D"], KeyValues]:
    """Hidden states of the prompts after the final norm, and their keys and values.

    Args:
        params: the decode layout.
        x, positions, features, feature_index: of the prompts, as in `forward`.
        is_valid: false at padding, which no other token attends to.
    """
    mask = text_mask(causal_reach(jnp.where(is_valid, 0, -1)), config, attention)

    def attend_and_keep(l, q, k, v):
        kept = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
        return attend(q, k, v, mask), tuple(layers.constrain(a, *PREFIX_AXES) for a in kept)

    rotary = layers.text_rotary(positions, config.text)
    inputs = params["text"], x, rotary, attend_and_keep, config.text, features, feature_index
    hidden, cache, _ = _unrolled(*inputs)
    return hidden, cache


def _unrolled(
    p: Params,
    x: Float[Array, "... D"],
    rotary: Rotary,
    attend: Callable[[int, Array, Array, Array], tuple[Array, tuple[Array, ...]]],
    config: TextConfig,
    features: ImageFeatures | None = None,
    feature_index: Int[Array, "B P"] | None = None,
) -> tuple[Float[Array, "... D"], KeyValues, Int[Array, "... L K"] | None]:
    """Runs the layers of the decode layout; `attend` takes the layer's index, returns its cache.

    Also returns the experts that the routers of a sparse decoder choose, else None.
    """
    keys, values, chosen = [], [], []
    for l, layer in enumerate(p["layers"]):
        x, (k, v), own = decoder_layer(layer, x, rotary, functools.partial(attend, l), config)
        x = _with_deepstack(x, l, features, feature_index)
        keys.append(k)
        values.append(v)
        chosen.append(own)
    hidden = layers.rms_norm(p["norm"], x, config.norm_eps)
    return hidden, KeyValues(keys, values), jnp.stack(chosen, -2) if config.num_experts else None


def init_cache(
    config: BackboneConfig,
    batch_size: int,
    num_rows: int,
    num_slots: int,
    dtype: Any,
    attention: AttentionImpl = XLA,
) -> KeyValues:
    """An empty cache of `num_slots` suffix tokens for each of `num_rows` rows per prompt."""
    text = config.text
    shape = batch_size, num_rows, text.num_kv_heads, num_slots, text.head_dim
    values = jnp.zeros(shape, dtype)
    keys_values = stored_keys(values, attention), values
    return KeyValues(*([layers.constrain(a, *SUFFIX_AXES)] * text.num_layers for a in keys_values))


def extend(
    params: Params,
    x: Float[Array, "B R T D"],
    rotary: Rotary,
    index: Int[Array, ""],
    prefix: KeyValues,
    prefix_valid: Bool[Array, "B P"],
    suffix: KeyValues,
    is_visible: Bool[Array, "B R T S"],
    config: BackboneConfig,
    *,
    attention: AttentionImpl = XLA,
) -> tuple[Float[Array, "B R T D"], KeyValues, Int[Array, "B R T L K"] | None]:
    """Decodes T tokens of R rows per prompt.

    Their keys and values are written to suffix slots index..index+T-1. A query attends to the valid
    prefix slots and to the suffix slots in `is_visible`. The prefix is read once per prompt. Cached
    keys are already rotated, so a token's slot need not equal its position.

    Args:
        params: the decode layout.
        x, rotary: embedded tokens, and `backbone.text_rotary` of their positions.
        index: first suffix slot to write, the same for all rows; may be traced.
        prefix, prefix_valid: KV cache of the prompts, its keys as `cached.stored_keys` returns
            them, and which of its slots are not padding.
        suffix, is_visible: KV cache of the rows, and which of its slots each new token attends to,
            including the token's slot.

    Returns:
        Hidden states after the final norm, the suffix cache with the new tokens in it, and the
        experts that the routers of a sparse decoder choose for them, else None.
    """
    mask = cache_mask(prefix_valid, is_visible, attention)
    write = jax.lax.dynamic_update_slice_in_dim

    def attend_suffix(l, q, k, v):
        k, v = stored_keys(k.swapaxes(2, 3), attention), v.swapaxes(2, 3)
        k = write(suffix.keys[l], k, index, axis=keys_axis(attention))
        v = write(suffix.values[l], v, index, axis=-2)
        return attend_cached(q, (prefix.keys[l], prefix.values[l]), (k, v), mask), (k, v)

    return _unrolled(params["text"], x, rotary, attend_suffix, config.text)
