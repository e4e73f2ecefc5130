"""The policy a run trains: backbone, tokenizer, prompt builder, and where its weights come from."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt8
from ml_collections import ConfigDict

from care_jax.data.readers import hub
from care_jax.data.stages import open_tokenizer
from care_jax.decoding import reflection
from care_jax.devices import sharding
from care_jax.method import spans
from care_jax.method.objectives import objective_of
from care_jax.prompts.builder import PromptBuilder, backbone_config
from models import backbone
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


def policy_of(config: ConfigDict) -> Policy:
    """Reads everything except the weights.

    Raises:
        ValueError: no such folder, or neither or both of model.path and model.backbone are given.
    """
    model, data = config.model, config.data
    fields = model.backbone.to_dict()
    if bool(model.path) == bool(fields):
        raise ValueError(
            f"expected either model.path or model.backbone, got path {model.path!r} and "
            f"{len(fields)} fields of a backbone; set exactly one"
        )
    folder = hub.find(model.path, kind="model") if model.path else None
    tokenizer = open_tokenizer(model.tokenizer or str(folder or ""))
    shape = backbone_config(folder, fields, tokenizer)
    token_bytes = spans.token_bytes(tokenizer, shape.text.vocab_size)
    keys = ("min_pixels", "max_pixels", "buckets", "system_prompt", "instruction", "think_tag")
    options = {key: data[key] for key in keys}
    patch_dtype = jnp.dtype(model.compute_dtype)
    return Policy(
        config=shape,
        tokenizer=tokenizer,
        prompts=PromptBuilder(tokenizer, shape, patch_dtype=patch_dtype, **options),
        token_bytes=token_bytes,
        closing_tag=spans.closing_tag_table(token_bytes, data.think_tag),
        think_tag=data.think_tag,
        folder=folder,
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


def decode_shardings(policy: Policy, mesh: Mesh, rules: sharding.Rules) -> backbone.Params:
    """Shardings of the parameters in the decode layout; one reshard leads there from training."""

    def decode_layout(key):
        return backbone.to_decode_layout(
            backbone.init(policy.config, key), policy.config, jnp.float32
        )

    shapes = jax.eval_shape(decode_layout, jax.random.key(0))
    return sharding.param_shardings(backbone.decode_axes(policy.config), shapes, rules, mesh)
