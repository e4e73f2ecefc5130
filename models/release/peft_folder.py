"""Writes adapters as a folder that `peft` opens, in the layout that vLLM reads as well.

The folder holds adapter_config.json and adapter_model.safetensors. A tensor is named for the module
of transformers' model that it adapts:

    base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight   [rank, inputs]
    base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_B.weight   [outputs, rank]

transformers nests the decoder under `model.language_model` if there is a tower, even where the
release does not; without one it is `model`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from models import backbone
from models.config import BackboneConfig
from models.layers import Params
from models.release import transfer, weights

WEIGHTS = "adapter_model.safetensors"
_DTYPE = np.dtype(np.float32)


def export(
    folder: pathlib.Path, adapters: Params, config: BackboneConfig, *, alpha: float, base: str
) -> None:
    """Writes the adapters, in float32.

    In a multi-process run every process must call this; process 0 writes.

    Args:
        folder: created if missing; an earlier export in it is replaced.
        adapters: the leaves that `lora.add` adds, in the tree of the training layout; α is `alpha`.
        base: folder or hub id of the base weights; empty if they have none.
    """
    params = jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))
    leaves = weights.leaves_by_path(adapters)
    adapted = [
        tensor
        for path, row in weights.tensors(config, params).items()
        if path.removesuffix("kernel") + "lora_a" in leaves
        for tensor in row
    ]
    rank = next(leaf.shape[-1] for path, leaf in leaves.items() if path.endswith("lora_a"))
    decoder = "model.language_model" if config.vision else "model"
    modules = "|".join(dict.fromkeys(_module(tensor).split(".")[-1] for tensor in adapted))
    shapes = {}
    for tensor in adapted:
        outputs, inputs = tensor.hf_shape
        module = f"base_model.model.{decoder}.{_module(tensor)}"
        shapes[f"{module}.lora_A.weight"] = (rank, inputs)
        shapes[f"{module}.lora_B.weight"] = (outputs, rank)

    def blocks() -> Iterator[np.ndarray]:
        for tensor in adapted:
            for name in ("lora_a", "lora_b"):
                leaf = leaves[tensor.path.removesuffix("kernel") + name]
                matrix = transfer.to_host(leaf, tensor.layer)
                # [*inputs, rank] and [rank, *outputs]: the release's order is the transpose.
                matrix = matrix.reshape((-1, rank) if name == "lora_a" else (rank, -1))
                yield np.ascontiguousarray(matrix.T, _DTYPE)

    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        # vLLM parses these parentheses. The prefix excludes the tower's modules of the same names.
        "target_modules": decoder.replace(".", r"\.") + rf"\..*\.({modules})",
        "inference_mode": True,
    }
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(
            json.dumps(fields, indent=2) + "\n", encoding="utf-8"
        )
    transfer.write_file(folder / WEIGHTS, shapes, _DTYPE, blocks())


def _module(tensor: weights.Tensor) -> str:
    """The module of transformers' decoder, from its weight's name."""
    name = weights.release_name(tensor.name, "qwen2_5_vl")  # the flat naming
    return name.removeprefix("model.").removesuffix(".weight")
