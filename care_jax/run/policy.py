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

from care_jax.data.prompts import open_prompts
from care_jax.decoding import reflection
from care_jax.devices import sharding
from care_jax.method import spans
from care_jax.method.objectives import objective_of
from care_jax.prompts.builder import PromptBuilder
from care_jax.run import integrity
from models import backbone
from models.config import BackboneConfig
from models.release import config_json


@dataclasses.dataclass(frozen=True)
class Policy:
    """Everything about the policy except its parameters."""

    config: BackboneConfig
    tokenizer: Any  # from transformers
    prompts: PromptBuilder  # turns examples into tokens and image patches
    token_bytes: list[bytes]  # bytes of every token id
    closing_tag: UInt8[np.ndarray, "states V"]  # transitions that find a rationale's end, `spans`
    think_tag: str  # name of the rationale's tag
    folder: pathlib.Path | None  # the release that the weights come from; None for random weights

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that restores it."""
        fields = config_json.to_hf(self.config)
        for part in ("vision_config", "text_config"):
            name = part.removesuffix("_config")
            fields |= {f"{name}.{key}": value for key, value in fields.pop(part, {}).items()}
        return fields


def policy_of(config: ConfigDict) -> Policy:
    """Reads everything except the weights; raises what `data.prompts.open_prompts` raises.

    Of a release with a manifest, as an export has, files of up to 64 MiB are compared with it. A
    run's workdir or checkpoint, and a whole repository in the hub's cache, are no release.
    """
    if path := config.model.path:
        folder = pathlib.Path(path).expanduser()
        _check_folder(folder)
        integrity.refuse_damaged(folder, integrity.find_damage(folder, most_bytes=2**26))
    dtype = jnp.dtype(config.model.compute_dtype)
    prompts, folder = open_prompts(config, patch_dtype=dtype)
    token_bytes = spans.token_bytes(prompts.tokenizer, prompts.config.text.vocab_size)
    return Policy(
        config=prompts.config,
        tokenizer=prompts.tokenizer,
        prompts=prompts,
        token_bytes=token_bytes,
        closing_tag=spans.closing_tag_table(token_bytes, config.data.think_tag),
        think_tag=config.data.think_tag,
        folder=folder,
    )


def _check_folder(folder: pathlib.Path) -> None:
    """Refuses a folder in which there is a release, or could be, but which is none itself."""
    whole = folder.absolute()
    runs = (each for each in (whole, *whole.parents[:3]) if (each / "starts.jsonl").is_file())
    workdir = next(runs, None)
    inside = whole.relative_to(workdir).parts[:1] if workdir else None
    if inside in ((), ("checkpoints",)) or (whole / "progress").is_dir():
        raise ValueError(
            f"model.path {str(folder)!r} is of a run, whose checkpoints are no release; export it "
            "first: run it with --config.stages=\"('export',)\" and --workdir="
            f"{workdir or '<its workdir>'}, and set model.path to the folder export/ in there"
        )
    if revisions := sorted(map(str, whole.glob("snapshots/*"))):
        raise ValueError(
            f"model.path {str(folder)!r} is the hub's cache of a release; set it to a revision in "
            f"there: {' or '.join(revisions)}"
        )


def check_policy(config: ConfigDict, policy: Policy) -> None:
    """Rejects keys that do not fit the model: no room for a reflection, experts that it lacks.

    And, to train, a chat template that opens the rationale.
    """
    rl, care = config.rl, config.care
    if {"sft", "rl"} & {*config.stages}:
        policy.prompts.check_trained()
    of_experts = {
        "rl.replay_routes": rl.replay_routes,
        "model.lora_experts": config.model.lora_experts,
    }
    for key, is_set in of_experts.items():
        if is_set and not policy.config.text.num_experts:
            raise ValueError(
                f"{key} is for a sparse decoder, and {policy.config.family!r} has no experts; set "
                "it to False"
            )
    has_reflection = "rl" in config.stages and objective_of(config).has_reflection
    if not has_reflection or care.reflect_mode == "resample":
        return
    cue = reflection.cue_text(care.cue, care.reflect_mode, seed=config.seed)
    num_cue = len(policy.tokenizer.encode(cue, add_special_tokens=False)) if cue else 0
    if num_cue + 1 >= rl.max_response_tokens:
        raise ValueError(
            f"a cue of {num_cue} tokens and a context leave no token of rl.max_response_tokens "
            f"{rl.max_response_tokens} to decode; shorten care.cue, or set that above {num_cue + 1}"
        )
    if care.max_context + num_cue >= rl.max_response_tokens:
        raise ValueError(
            f"care.max_context {care.max_context} and a cue of {num_cue} tokens leave no token of "
            f"rl.max_response_tokens {rl.max_response_tokens} to decode; set care.max_context to "
            f"{(rl.max_response_tokens - num_cue) // 2} or less"
        )


def decode_shardings(policy: Policy, mesh: Mesh, rules: sharding.Rules) -> backbone.Params:
    """Shardings of the parameters in the decode layout."""

    def decode_layout(key):
        return backbone.to_decode_layout(
            backbone.init(policy.config, key), policy.config, jnp.float32
        )

    shapes = jax.eval_shape(decode_layout, jax.random.key(0))
    return sharding.param_shardings(backbone.decode_axes(policy.config), shapes, rules, mesh)
