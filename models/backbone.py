"""A backbone as pure functions over nested dicts of arrays; only this module calls `nnx.split`.

The dict has two layouts. `init` and `load` return the training layout: {"vision", "text"}, without
"vision" if there is no tower, layers stacked on a leading axis. `to_decode_layout` returns the
decode layout: text layers in a list, with fused and cast weights. `encode_images`, `embed` and
`unembed` take either layout, `forward` takes the training layout, `prefill` and `extend` take the
decode layout.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models import decoder, layers, lora, vision
from models.attention.packed import XLA, AttentionImpl
from models.config import BackboneConfig
from models.layers import Params, Rotary
from models.positions import ImagePatches
from models.release import config_json, transfer
from models.vision import ImageFeatures

NEVER = -1e30  # logit of a token with probability 0; finite, so that 0·logp is 0

# Functions of the other modules that take the parameters and the config of the whole backbone.
encode_images = vision.encode_images
text_mask, forward = decoder.text_mask, decoder.forward
unembed, unembedding = decoder.unembed, decoder.unembedding
prefill, init_cache, extend = decoder.prefill, decoder.init_cache, decoder.extend
export = transfer.export


class Backbone(nnx.Module):
    """Declares every parameter; computes nothing."""

    def __init__(self, rngs: nnx.Rngs, config: BackboneConfig, dtype: Any):
        if config.vision:
            self.vision = vision.VisionTower(rngs, config.vision, dtype)
        self.text = decoder.Decoder(rngs, config.text, dtype)


def init(config: BackboneConfig, rng: Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters in the training layout."""
    _, state = nnx.split(Backbone(nnx.Rngs(params=rng), config, dtype))
    return nnx.to_pure_dict(state)


@functools.lru_cache
def logical_axes(config: BackboneConfig) -> Params:
    """The tree of `init` with a tuple of logical axis names at every leaf."""
    model = nnx.eval_shape(lambda: Backbone(nnx.Rngs(params=0), config, jnp.float32))
    _, state = nnx.split(model)
    is_param = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return nnx.to_pure_dict(jax.tree.map(lambda p: p.get_metadata("axes"), state, is_leaf=is_param))


def embed(
    params: Params,
    tokens: Int[Array, "... S"],
    *,
    dtype: Any,
    features: ImageFeatures | None = None,
    feature_index: Int[Array, "B S"] | None = None,
) -> Float[Array, "... S D"]:
    """Token embeddings; a token whose feature index is not -1 gets that image feature."""
    x = params["text"]["embed"]["table"][tokens].astype(dtype)
    if features is None:
        return x
    assert feature_index is not None  # it comes with features
    return decoder.gather_features(features.merged.astype(dtype), feature_index, x)


def embed_with_images(
    params: Params,
    tokens: Int[Array, "B S"],
    images: ImagePatches | None,
    feature_index: Int[Array, "B S"],
    config: BackboneConfig,
    *,
    dtype: Any,
    remat: str = "none",
    attention: AttentionImpl = XLA,
) -> tuple[Float[Array, "B S D"], ImageFeatures | None]:
    """Encodes the images of the rows, if any, and embeds tokens and image features.

    Returns:
        the embedded rows, and the features that `forward` and `prefill` need for DeepStack.
    """
    features = None
    if images is not None:
        options = {"remat": remat, "attention": attention}
        features = encode_images(params, images, config, dtype=dtype, **options)
    return embed(
        params, tokens, dtype=dtype, features=features, feature_index=feature_index
    ), features


def policy_logits(
    params: Params, hidden: Float[Array, "*S D"], config: BackboneConfig
) -> Float[Array, "*S V"]:
    """Float32 logits of the policy; image and video pad tokens have probability 0."""
    logits = unembed(params, hidden, config)
    return jnp.where(is_never_sampled(jnp.arange(logits.shape[-1]), config), NEVER, logits)


def is_never_sampled(ids: Int[Array, "*V"], config: BackboneConfig) -> Bool[Array, "*V"]:
    """Image and video pad tokens."""
    if config.vision is None:
        return jnp.zeros(ids.shape, bool)
    return (ids == config.image_token_id) | (ids == config.video_token_id)


def to_decode_layout(params: Params, config: BackboneConfig, dtype: Any) -> Params:
    """The decode layout: adapters merged, layers unstacked, weights fused and cast to `dtype`."""
    params = lora.merged(params)
    text = decoder.to_decode_layout(params["text"], config.text)
    return jax.tree.map(lambda a: a.astype(dtype), {**params, "text": text})


def decode_axes(config: BackboneConfig) -> Params:
    """The tree of `to_decode_layout` with a tuple of logical axis names at every leaf."""
    axes = logical_axes(config)
    return {**axes, "text": decoder.decode_axes(axes["text"], config.text)}


def text_rotary(positions: Int[Array, "*B"], config: BackboneConfig) -> Rotary:
    """Cosine and sine at text positions, which have time = height = width."""
    return layers.text_rotary(jnp.stack([positions] * 3, axis=-1), config.text)


def load(
    folder: str | pathlib.Path,
    config: BackboneConfig | None = None,
    dtype: Any = jnp.float32,
    shardings: Params | None = None,
) -> tuple[Params, BackboneConfig]:
    """Reads a Hugging Face release from disk, in the training layout.

    Args:
        folder: holds config.json, safetensors (one file, or several with an index) and optionally
            generation_config.json.
        config: replaces the config read from the folder.
        dtype: of the parameters.
        shardings: a Sharding for each leaf of `logical_axes`; each process reads the shards of
            its devices. None: everything on the default device.

    Raises:
        ValueError: the config asks for something that is not implemented, files are missing or
            truncated, or tensors are missing, unused or of the wrong shape.
    """
    config = config or config_json.from_folder(folder)
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return transfer.load(folder, config, shapes, dtype, shardings), config
