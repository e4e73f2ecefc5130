"""A run's inputs as abstract arrays, for `compile`: no weights, data or devices.

Every prompt fills the largest bucket and has an image; every response has the maximum length.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int
from ml_collections import ConfigDict

from care_jax.batch import ImitationBatch, Prompts, TrainBatch, TreeRows
from care_jax.data.prompts import open_tokenizer
from care_jax.decoding.schedule import Sizes
from care_jax.decoding.slots import Slots, abstract_slots
from care_jax.devices import sharding
from care_jax.method import spans
from care_jax.prompts.builder import backbone_config
from care_jax.rl.update_batch import as_reference
from care_jax.run.policy import Policy
from care_jax.run.run import Run, abstract_params
from models.backbone import Params
from models.positions import ImagePatches, pack_images
from models.release import config_json
from models.release.known import RELEASES


def policy(config: ConfigDict) -> Policy:
    """A policy without tokenizer and weights.

    Raises:
        ValueError: `model.path` is neither a folder with a config.json nor a known release.
    """
    model = config.model
    file = pathlib.Path(model.path).expanduser() / "config.json"
    if not model.path:
        backbone = backbone_config(model.backbone.to_dict(), open_tokenizer(model.tokenizer))
    elif file.is_file():
        backbone = config_json.from_folder(file.parent)
    elif model.path in RELEASES:
        backbone = RELEASES[model.path]
    else:
        raise ValueError(
            f"model.path {model.path!r} must be a folder with a config.json or one of "
            f"{', '.join(RELEASES)}"
        )
    no_bytes, think_tag = [b""] * backbone.text.vocab_size, config.data.think_tag
    tag_table = spans.closing_tag_table(no_bytes, think_tag)
    no_text: Any = None  # unused by compiled programs
    return Policy(backbone, no_text, no_text, no_bytes, tag_table, think_tag, folder=None)


def on_batch(rows_sharding: NamedSharding, *shape: int) -> Callable[[Any], jax.ShapeDtypeStruct]:
    """dtype -> abstract array of this shape and sharding."""
    return lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=rows_sharding)


def slots(run: Run, sizes: Sizes, num_prompt_tokens: int) -> Slots:
    """The decoder's slots, for prompts of this length."""
    dtype = jnp.dtype(run.config.model.compute_dtype)
    return abstract_slots(
        run.policy.config,
        sizes,
        num_prompt_tokens,
        dtype,
        run.attention(is_decoding=True),
        run.config.decode_sharding_rules,
        run.mesh,
    )


def slot_bytes(run: Run, sizes: Sizes) -> int:
    """Bytes on one chip of the decoder's slots and their KV caches, for the longest prompts."""
    num_tokens = largest_bucket(run)[0] + sizes.num_context_tokens
    return num_bytes(slots(run, sizes, num_tokens))


def largest_bucket(run: Run) -> tuple[int, int]:
    """(prompt tokens, image patches) of the longest prompts."""
    return max(map(tuple, run.config.data.buckets))


def num_rows(run: Run) -> int:
    """Rows of a prompt: its rollouts and, if the objective has reflection, the reflected row."""
    return run.config.rl.num_rollouts + run.objective.has_reflection


def largest_update(run: Run) -> tuple[Int[np.ndarray, "N 2"], Int[np.ndarray, "N R"]]:
    """(tokens, patches) of the prompts and tokens of the responses of the largest update."""
    rl = run.config.rl
    sizes = np.tile(largest_bucket(run), (rl.prompts_per_update, 1))
    return sizes, np.full((rl.prompts_per_update, num_rows(run)), rl.max_response_tokens)


def prompts(run: Run, size: int, num_context_tokens: int = 0) -> Prompts:
    """`size` prompts of the largest bucket, each with `num_context_tokens` additional tokens."""
    num_tokens, num_patches = largest_bucket(run)
    num_tokens += num_context_tokens
    rows_sharding = run.decode_batch_sharding
    tokens = on_batch(rows_sharding, size, num_tokens)
    return Prompts(
        tokens=tokens(jnp.int32),
        is_valid=tokens(jnp.bool),
        positions=on_batch(rows_sharding, size, num_tokens, 3)(jnp.int32),
        next_position=on_batch(rows_sharding, size)(jnp.int32),
        feature_index=tokens(jnp.int32),
        images=_images(run, rows_sharding, size, num_patches),
    )


def tree_rows(run: Run, size: int, num_tokens: int, num_patches: int) -> TreeRows:
    """`size` rows of packed trees."""
    rows_sharding = run.train_batch_sharding
    names = ("tokens", "reach", "feature_index", "predictor", "branch", "scored")
    return TreeRows(
        **dict.fromkeys(names, on_batch(rows_sharding, size, num_tokens)(jnp.int32)),
        positions=on_batch(rows_sharding, size, num_tokens, 3)(jnp.int32),
        images=_images(run, rows_sharding, size, num_patches),
    )


def imitation_batch(run: Run, size: int) -> ImitationBatch:
    """`size` rows of SFT (the cold start)."""
    sft = run.config.sft
    weight = on_batch(run.train_batch_sharding, size, sft.row_tokens)(jnp.float32)
    return ImitationBatch(tree_rows(run, size, sft.row_tokens, sft.row_patches), weight)


def train_batch(run: Run, size: int) -> TrainBatch:
    """`size` rows of an update."""
    rl, rows_sharding, text = run.config.rl, run.train_batch_sharding, run.policy.config.text
    tokens, routes = on_batch(rows_sharding, size, rl.row_tokens), None
    if text.num_experts:
        routes = on_batch(rows_sharding, size, rl.row_tokens, *text.route_shape)(jnp.int16)
    values = ("token_advantage", "old_logp", "ref_logp", "row_weight")
    return TrainBatch(
        rows=tree_rows(run, size, rl.row_tokens, rl.row_patches),
        **dict.fromkeys(values, tokens(jnp.float32)),
        **dict.fromkeys(("is_trained", "is_compared", "is_answer"), tokens(jnp.bool)),
        prompt_weight=on_batch(rows_sharding, size)(jnp.float32),
        drawn_logp=None if run.objective.correction == "none" else tokens(jnp.float32),
        is_fresh=tokens(jnp.bool) if rl.carry_over else None,
        routes=routes,
    )


def _images(
    run: Run, rows_sharding: NamedSharding, size: int, num_patches: int
) -> ImagePatches | None:
    vision = run.policy.config.vision
    if not num_patches or vision is None:
        return None
    patches = np.zeros((0, vision.patch_dim), jnp.dtype(run.config.model.compute_dtype))
    images = pack_images([patches], [np.zeros((0, 3), np.int32)], vision, num_patches)
    return jax.tree.map(lambda x: on_batch(rows_sharding, size, *x.shape[1:])(x.dtype), images)


def reference(run: Run) -> Params:
    """The reference policy while it scores, see `update_batch.copy_reference`."""
    params = abstract_params(run)
    shapes = jax.eval_shape(functools.partial(as_reference, run), params)
    return sharding.abstract(shapes, sharding.of(params))


def reference_bytes(run: Run) -> int:
    """Bytes of the reference policy that one device keeps."""
    has_copy = run.has_reference_copy and "reference" not in run.config.model.offload
    return num_bytes(reference(run)) if has_copy else 0


def num_bytes(tree: Any) -> int:
    """Bytes on one device; arrays in pinned host memory take none."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind != "pinned_host"
    )
