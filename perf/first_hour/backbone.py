"""A shipped configuration with random weights and drawn prompts, scaled to a host's memory.

Letters: N prompts, R responses of a prompt.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from care_jax.aot import roofline, shapes, step_sizes
from care_jax.devices import xla_flags
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.run.run import Run, abstract_params, open_run
from configs import tiny
from models.backbone import Params
from models.config import BackboneConfig
from models.release import config_json
from models.release.known import RELEASES

BYTES_OF_FULL_TRAINING = 14  # per parameter: weights, moments, gradient, reference, decode layout
SHARE_OF_STATE = 0.6  # of the memory; the rest is for caches and activations
LORA_RANK = 64


def configuration(name: str, num_bytes: float, *, is_small: bool) -> ConfigDict:
    """A shipped configuration, scaled down to the memory of these devices.

    Weights and moments are bfloat16. If the state of full training does not fit, LoRA is used.
    `name` is a file of `configs`, such as "qwen25vl_7b", `num_bytes` the memory of all devices. If
    `is_small`, the backbone is the demo's of the same family.
    """
    if is_small:
        return _small(name)
    config = importlib.import_module(f"configs.{name}").get_config()
    backbone = RELEASES[config.model.path]
    config.stages = ("rl",)
    config.model.path, config.model.backbone = "", config_json.to_hf(backbone)
    config.model.param_dtype = config.model.moments_dtype = "bfloat16"
    weights = roofline.decoder_weights(backbone.text)
    if BYTES_OF_FULL_TRAINING * weights > SHARE_OF_STATE * num_bytes:
        config.model.lora_rank = LORA_RANK
    config.mesh.update(data=0, fsdp=-1, tensor=1, sequence=1)
    config.rl.update(
        prompts_per_step=32,
        prompts_per_update=8,
        decode_prompts=32,
        max_response_tokens=2048,
    )
    return config


def _small(name: str) -> ConfigDict:
    config = tiny.get_config("qwen3_vl" if name.startswith("qwen3vl") else "qwen2_5_vl")
    config.stages = ("rl",)
    config.model.backbone.text_config.num_hidden_layers = 1
    if name == "qwen25vl_7b":
        config.model.lora_rank = 4
    config.data.buckets = ((128, 64),)
    config.mesh.fsdp = 1
    config.rl.update(prompts_per_step=4, prompts_per_update=4, decode_prompts=2)
    config.rl.update(row_tokens=512, microbatch_size=1, max_response_tokens=40)
    return config


def cases(is_small: bool) -> dict[str, float | None]:
    """Mean tokens of a response, by the case's name; None is the worst case."""
    return {"mean 12": 12.0} if is_small else {"mean 600": 600.0, "worst case": None}


def open_backbone(name: str, *, is_small: bool, **model) -> Run:
    """A run of `configuration` on this host's devices; `model` overrides keys of config.model."""
    config = configuration(name, total_bytes(), is_small=is_small)
    config.model.update(model)
    return open_run(config, pathlib.Path())


def total_bytes() -> int:
    """Memory of this host's devices; 0 if they do not tell."""
    xla_flags.set_defaults()
    return sum((each.memory_stats() or {}).get("bytes_limit", 0) for each in jax.local_devices())


def random_params(run: Run) -> Params:
    """Parameters with the stage's shapes and shardings, without adapters.

    A hash of the indices, because random bits would need memory beside the weights.
    """

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def values():
            index = jnp.zeros(leaf.shape, jnp.uint32)
            for axis in range(len(leaf.shape)):
                along = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
                index = index * np.uint32(2654435761) + along
            index = (index ^ (index >> 15)) * np.uint32(2246822519)
            return (((index >> 8).astype(jnp.float32) / 2**23 - 1) / 25).astype(leaf.dtype)

        return jax.jit(values, out_shardings=leaf.sharding)()

    config = run.config.copy_and_resolve_references()
    config.model.lora_rank = 0
    return jax.tree.map(fill, abstract_params(dataclasses.replace(run, config=config)))


def draw(
    run: Run, num_prompts: int, num_rows: int, mean: float | None
) -> tuple[Int[np.ndarray, "N 2"], Int[np.ndarray, "N R"]]:
    """Tokens and patches of prompts, tokens of responses; all at their maximum if mean is None."""
    cap = run.config.rl.max_response_tokens
    if mean is None:
        sizes = np.tile(shapes.largest_bucket(run), (num_prompts, 1))
        return sizes, np.full((num_prompts, num_rows), cap)
    return step_sizes.draw(run, num_prompts, num_rows, mean, cap)


def prompts_of(config: BackboneConfig, sizes: Int[np.ndarray, "N 2"]) -> list[TokenizedPrompt]:
    """Prompts of about these sizes: a square image, if there are patches, and random text."""
    rng, vision, prompts = np.random.default_rng(0), config.vision, []
    for num_tokens, num_patches in sizes.tolist():
        side = int((num_patches / vision.merge_size**2) ** 0.5)
        grid, image = np.zeros((0, 3), np.int32), []
        if side:
            grid = np.array([[1, side * vision.merge_size, side * vision.merge_size]], np.int32)
            image = [config.image_token_id] * side**2
            image = [config.vision_start_token_id, *image, config.vision_end_token_id]
        text = rng.integers(0, 256, max(num_tokens - len(image), 1))
        tokens = np.array([*image, *text], np.int32)
        num_patches = int(grid.prod(-1).sum())
        patches = rng.normal(size=(num_patches, vision.patch_dim)).astype(np.float32)
        prompts.append(TokenizedPrompt(tokens, grid, patches))
    return prompts
