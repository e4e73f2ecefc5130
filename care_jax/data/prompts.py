"""Opens tokenizer and prompt builder, as the configuration names them."""

from __future__ import annotations

import os
import pathlib

import numpy as np
from jax.typing import DTypeLike
from ml_collections import ConfigDict
from transformers import PreTrainedTokenizerBase

from care_jax.data.drawn import synthetic
from care_jax.data.readers import hub
from care_jax.prompts.builder import PromptBuilder, backbone_config
from care_jax.prompts.release_tokenizer import load_tokenizer
from care_jax.prompts.tokenizer import build_tokenizer
from models.release import config_json


def open_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; for "" one trained on the texts of `synthetic` in about a second."""
    if not folder:
        return build_tokenizer(synthetic.texts())
    return load_tokenizer(os.path.expanduser(folder))


def open_prompts(
    config: ConfigDict, *, patch_dtype: DTypeLike = np.float32
) -> tuple[PromptBuilder, pathlib.Path | None]:
    """The prompt builder of a run and the folder of its release, None for random weights.

    Of a hub id, all files but the weights are downloaded.

    Raises:
        ValueError: no such release, or neither or both of model.path and model.backbone are set.
    """
    model, data = config.model, config.data
    fields = model.backbone.to_dict()
    if bool(model.path) == bool(fields):
        raise ValueError(
            f"expected either model.path or model.backbone, got path {model.path!r} and "
            f"{len(fields)} fields of a backbone; with a path take a configuration without a "
            "backbone, such as configs/qwen25vl_3b.py"
        )
    folder = hub.find(model.path, hub.SETTINGS, kind="model") if model.path else None
    backbone = config_json.from_folder(folder) if folder else None  # before the slower tokenizer
    tokenizer = open_tokenizer(model.tokenizer or str(folder or ""))
    keys = ("min_pixels", "max_pixels", "buckets", "system_prompt", "instruction", "think_tag")
    prompts = PromptBuilder(
        tokenizer,
        backbone or backbone_config(fields, tokenizer),
        patch_dtype=patch_dtype,
        **{key: data[key] for key in keys},
    )
    return prompts, folder
