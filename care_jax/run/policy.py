"""The policy a run trains: backbone, tokenizer, prompt builder, and where its weights come from."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import UInt8
from ml_collections import ConfigDict

from care_jax.data.readers import hub
from care_jax.data.stages import open_tokenizer
from care_jax.decoding import reflection
from care_jax.devices import distributed, sharding
from care_jax.method import spans
from care_jax.method.objectives import objective_of
from care_jax.prompts.builder import PromptBuilder, backbone_config
from care_jax.run import integrity
from models import backbone, lora
from models.config import BackboneConfig
from models.release import config_json


@dataclasses.dataclass(frozen=True)
class Policy:
    """Everything about the policy except its parameters.

    Attributes:
        config: the backbone's configuration.
        tokenizer: from transformers.
        prompts: turns examples into tokens and image patches.
        token_bytes: bytes of every token id.
        closing_tag: automaton that finds the end of a rationale while decoding.
        think_tag: name of the rationale's tag.
        folder: the release that the weights come from; None for random weights.
    """

    config: BackboneConfig
    tokenizer: Any
    prompts: PromptBuilder
    token_bytes: list[bytes]
    closing_tag: UInt8[np.ndarray, "states V"]
    think_tag: str
    folder: pathlib.Path | None

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that restores it."""
        fields = config_json.to_hf(self.config)
        nested = {
            f"{part.removesuffix('_config')}.{key}": value
            for part in ("vision_config", "text_config")
            for key, value in fields.pop(part).items()
        }
        return fields | nested


def build_policy(
    *,
    path: str,
    backbone_fields: dict[str, Any],
    tokenizer_path: str,
    min_pixels: int,
    max_pixels: int,
    buckets: tuple[tuple[int, int], ...],
    system_prompt: str,
    instruction: str,
    think_tag: str,
    patch_dtype: DTypeLike = np.float32,
) -> Policy:
    """Reads everything except the weights.

    Args:
        path: folder or hub id of a release; empty to start from random weights.
        backbone_fields: a `config.json` without token ids and vocabulary size, for random weights.
        tokenizer_path: folder of a tokenizer; empty for the release's, or the built-in small one.
        min_pixels, max_pixels: range of height x width that images are resized to.
        buckets: (prompt tokens, image patches) that batches are padded to.
        system_prompt, instruction: texts before and after the question.
        think_tag: name of the rationale's tag.
        patch_dtype: dtype of image patches.

    Raises:
        ValueError: no such folder, or neither or both of path and backbone are given.
    """
    if bool(path) == bool(backbone_fields):
        raise ValueError(
            f"expected either model.path or model.backbone, got path {path!r} and "
            f"{len(backbone_fields)} fields of a backbone; set exactly one"
        )
    folder = hub.find(path, kind="model") if path else None
    tokenizer = open_tokenizer(tokenizer_path or str(folder or ""))
    config = backbone_config(folder, backbone_fields, tokenizer)
    token_bytes = spans.token_bytes(tokenizer, config.text.vocab_size)
    return Policy(
        config=config,
        tokenizer=tokenizer,
        prompts=PromptBuilder(
            tokenizer,
            config,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            buckets=buckets,
            system_prompt=system_prompt,
            instruction=instruction,
            think_tag=think_tag,
            patch_dtype=patch_dtype,
        ),
        token_bytes=token_bytes,
        closing_tag=spans.closing_tag_table(token_bytes, think_tag),
        think_tag=think_tag,
        folder=folder,
    )


def initial_params(
    policy: Policy, mesh: Mesh, rules: sharding.Rules, *, seed: int, dtype: DTypeLike = jnp.float32
) -> backbone.Params:
    """The release's weights or random ones, sharded; `dtype` is that of the master weights.

    Raises:
        ValueError: the release is incomplete, or differs from the sums it was exported with.
    """
    shardings = sharding.of(abstract_params(policy, mesh, rules))
    if policy.folder is None:
        params = backbone.init(policy.config, jax.random.key(seed), dtype)
        return jax.device_put(params, shardings)
    _check_sums(policy.folder)
    params, _ = backbone.load(policy.folder, policy.config, dtype, shardings)
    return params


def _check_sums(folder: pathlib.Path) -> None:
    """Compares an export with its sums, each process a share of the files; releases have none."""
    share = {"part": jax.process_index(), "num_parts": jax.process_count()}
    faults = distributed.gather_json(integrity.find_damage(folder, **share))
    if fault := next(filter(None, faults), ""):
        raise ValueError(
            f"model.path {folder} is damaged: {fault}; export or copy it again, or remove "
            f"{integrity.MANIFEST} if its weights were changed on purpose"
        )


def abstract_params(
    policy: Policy,
    mesh: Mesh,
    rules: sharding.Rules,
    *,
    dtype: DTypeLike = jnp.float32,
    lora_rank: int = 0,
) -> backbone.Params:
    """Shape, dtype and sharding of every parameter; with adapters if `lora_rank` is above 0."""

    def init(key):
        params = backbone.init(policy.config, key, dtype)
        return lora.add(params, key, rank=lora_rank, alpha=1.0) if lora_rank else params

    axes = backbone.logical_axes(policy.config)
    axes = lora.add_axes(axes) if lora_rank else axes
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        sharding.param_shardings(axes, shapes, rules, mesh),
    )


def with_adapters(
    params: backbone.Params,
    policy: Policy,
    mesh: Mesh,
    rules: sharding.Rules,
    *,
    rank: int,
    alpha: float,
    seed: int,
) -> backbone.Params:
    """The parameters with new adapters on the decoder's linear layers, sharded over the mesh."""
    params = lora.add(params, jax.random.key(seed), rank=rank, alpha=alpha)
    axes = lora.add_axes(backbone.logical_axes(policy.config))
    return jax.device_put(params, sharding.param_shardings(axes, params, rules, mesh))


def decode_shardings(policy: Policy, mesh: Mesh, rules: sharding.Rules) -> backbone.Params:
    """Shardings of the parameters in the decode layout; one reshard leads there from training."""

    def decode_layout(key):
        return backbone.to_decode_layout(
            backbone.init(policy.config, key), policy.config, jnp.float32
        )

    shapes = jax.eval_shape(decode_layout, jax.random.key(0))
    return sharding.param_shardings(backbone.decode_axes(policy.config), shapes, rules, mesh)


def policy_of(config: ConfigDict) -> Policy:
    """The policy of a configuration, without its weights."""
    return build_policy(
        path=config.model.path,
        backbone_fields=config.model.backbone.to_dict(),
        tokenizer_path=config.model.tokenizer,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        buckets=config.data.buckets,
        system_prompt=config.data.system_prompt,
        instruction=config.data.instruction,
        think_tag=config.data.think_tag,
        patch_dtype=jnp.dtype(config.model.compute_dtype),
    )


def check_policy(config: ConfigDict, policy: Policy) -> None:
    """Refuses a reflected context that leaves no tokens to decode; this needs the tokenizer.

    Raises:
        ValueError: naming the key to change.
    """
    rl, care = config.rl, config.care
    if "rl" not in config.stages or not objective_of(config).has_reflection:
        return
    if care.reflect_mode == "resample":
        return
    cue = reflection.cue_text(care.cue, care.reflect_mode, seed=config.seed)
    num_cue = len(policy.tokenizer.encode(cue, add_special_tokens=False)) if cue else 0
    if care.max_context + num_cue >= rl.max_response_tokens:
        raise ValueError(
            f"care.max_context {care.max_context} and a cue of {num_cue} tokens leave no token of "
            f"rl.max_response_tokens {rl.max_response_tokens} to decode; set care.max_context to "
            f"{max((rl.max_response_tokens - num_cue) // 2, 1)} or less"
        )
