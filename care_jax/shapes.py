"""A run's inputs as shapes alone: what `fit` compiles for, without weights, data or devices.

Every prompt is of the largest bucket and has an image, every response is as long as it may be.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from care_jax import reflect, spans
from care_jax.batch import PackedRows, Prompts, TrainBatch
from care_jax.policy import Policy
from care_jax.prompt import backbone_config, load_tokenizer
from care_jax.run import Run
from care_jax.sampler import Forced
from care_jax.sharding import batch_sharding
from models.config import RELEASES, BackboneConfig
from models.positions import ImagePatches, pack_images


def policy(config: ConfigDict) -> Policy:
    """A policy that tokenises nothing and has no weights.

    Raises:
        ValueError: `model.path` is neither a folder nor a release whose shape is known.
    """
    model = config.model
    file = pathlib.Path(model.path).expanduser() / "config.json"
    if not model.path:
        backbone = backbone_config(None, model.backbone.to_dict(), load_tokenizer(model.tokenizer))
    elif file.is_file():
        backbone = BackboneConfig.from_folder(file.parent)
    elif model.path in RELEASES:
        backbone = RELEASES[model.path]
    else:
        raise ValueError(
            f"model.path {model.path!r} is neither a folder with a config.json nor one of "
            f"{', '.join(RELEASES)}"
        )
    no_bytes = [b""] * backbone.text.vocab_size
    return Policy(
        config=backbone,
        tokenizer=None,
        prompts=None,
        token_bytes=no_bytes,
        closing_tag=spans.closing_tag_table(no_bytes, config.data.think_tag),
        think_tag=config.data.think_tag,
        folder=None,
    )


def on_batch(run: Run, *shape: int) -> Callable[[Any], jax.ShapeDtypeStruct]:
    """Arrays of a shape, by their type, split as batches are."""
    place = batch_sharding(run.mesh)
    return lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def largest_bucket(run: Run) -> tuple[int, int]:
    """(prompt tokens, image patches) of the longest prompts."""
    return max(map(tuple, run.config.data.buckets))


def prompts(run: Run, size: int) -> Prompts:
    """`size` prompts of the largest bucket."""
    num_tokens, num_patches = largest_bucket(run)
    tokens = on_batch(run, size, num_tokens)
    return Prompts(
        tokens=tokens(jnp.int32),
        is_valid=tokens(jnp.bool),
        positions=on_batch(run, size, num_tokens, 3)(jnp.int32),
        next_position=on_batch(run, size)(jnp.int32),
        slots=tokens(jnp.int32),
        images=_images(run, size, num_patches),
    )


def packed_rows(run: Run, size: int) -> PackedRows:
    """`size` full rows of the cold start."""
    config = run.config.sft
    tokens = on_batch(run, size, config.row_tokens)
    return PackedRows(
        tokens=tokens(jnp.int32),
        segments=tokens(jnp.int32),
        positions=on_batch(run, size, config.row_tokens, 3)(jnp.int32),
        slots=tokens(jnp.int32),
        images=_images(run, size, config.row_patches),
        scored=tokens(jnp.int32),
        weight=tokens(jnp.float32),
    )


def _images(run: Run, size: int, num_patches: int) -> ImagePatches:
    vision = run.policy.config.vision
    patches = np.zeros((0, vision.patch_dim), jnp.dtype(run.config.model.compute_dtype))
    images = pack_images([patches], [np.zeros((0, 3), np.int32)], vision, num_patches)
    return jax.tree.map(lambda x: on_batch(run, size, *x.shape[1:])(x.dtype), images)


def train_batch(run: Run, size: int, num_rows: int, num_tokens: int) -> TrainBatch:
    """`size` prompts with their rows."""
    rows, tokens = on_batch(run, size, num_rows), on_batch(run, size, num_rows, num_tokens)
    return TrainBatch(
        prompts=prompts(run, size),
        tokens=tokens(jnp.int32),
        is_valid=tokens(jnp.bool),
        token_advantage=tokens(jnp.float32),
        old_logp=tokens(jnp.float32),
        ref_logp=tokens(jnp.float32),
        row_weight=rows(jnp.float32),
        prompt_weight=on_batch(run, size)(jnp.float32),
        is_trained=tokens(jnp.bool),
        is_answer=tokens(jnp.bool),
    )


def forced(run: Run, size: int) -> Forced:
    """Reflected contexts of full length; a token of the cue is taken to be four bytes."""
    care = run.config.care
    cue = reflect.cue_text(care.cue, care.reflect_mode, seed=run.config.seed)
    num_tokens = care.max_context + math.ceil(len(cue.encode()) / 4)
    tokens = on_batch(run, size, 0 if care.reflect_mode == "resample" else num_tokens)
    return Forced(tokens(jnp.int32), tokens(jnp.bool), on_batch(run, size)(jnp.bool))


def num_bytes(tree: Any) -> int:
    """On one device; what lies in host memory takes none of it."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind != "pinned_host"
    )
