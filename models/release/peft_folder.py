"""Writes adapters as a folder that `peft` opens, in the layout that vLLM reads as well.

The folder holds adapter_config.json and adapter_model.safetensors. A tensor is named for the module
of transformers' model that it adapts:

    base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight   [rank, inputs]
    base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_B.weight   [outputs, rank]

transformers nests the decoder under `model.language_model` if there is a tower, even where the
release does not; without one it is `model`. Adapters of experts are those of two parameters of one
module, of which `peft` wraps one around the other:

    ...layers.0.mlp.experts.base_layer.lora_A.weight, of gate_up_proj   [experts * rank, inputs]
    ...layers.0.mlp.experts.lora_B.weight, of down_proj                 [outputs, rank * experts]
"""

from __future__ import annotations

import json
import math
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
    targets = dict.fromkeys(_path(tensor).partition(".mlp.experts.") for tensor in adapted)
    modules = "|".join(
        dict.fromkeys(path.split(".")[-1] for path, _, parameter in targets if not parameter)
    )
    parameters = dict.fromkeys(f"mlp.experts.{parameter}" for *_, parameter in targets if parameter)
    shapes = {}
    for tensor in adapted:
        *num_experts, inputs, outputs = _matrix_shape(tensor)
        ranks = rank * math.prod(num_experts)
        module = f"base_model.model.{decoder}.{_module(tensor)}"
        shapes[f"{module}.lora_A.weight"] = (ranks, inputs)
        shapes[f"{module}.lora_B.weight"] = (outputs, ranks)

    def blocks() -> Iterator[np.ndarray]:
        for tensor in adapted:
            for name in ("lora_a", "lora_b"):
                leaf = leaves[tensor.path.removesuffix("kernel") + name]
                matrix = transfer.to_host(leaf, tensor.layer)
                # [E, *inputs, rank] and [E, rank, *outputs]: here inputs come last, outputs first.
                num_experts = math.prod(_matrix_shape(tensor)[:-2])
                if name == "lora_a":
                    matrix = matrix.reshape(num_experts, -1, rank).swapaxes(1, 2)
                    matrix = matrix.reshape(num_experts * rank, -1)
                else:
                    matrix = matrix.reshape(num_experts, rank, -1).transpose(2, 1, 0)
                    matrix = matrix.reshape(-1, rank * num_experts)
                yield np.ascontiguousarray(matrix, _DTYPE)

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
    if parameters:
        fields["target_parameters"] = list(parameters)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(
            json.dumps(fields, indent=2) + "\n", encoding="utf-8"
        )
    transfer.write_file(folder / WEIGHTS, shapes, _DTYPE, blocks())


def _path(tensor: weights.Tensor) -> str:
    """The module of transformers' decoder, or the experts' parameter, from the weight's name."""
    name = weights.release_name(tensor.name, "qwen2_5_vl")  # the flat naming
    return name.removeprefix("model.").removesuffix(".weight")


def _module(tensor: weights.Tensor) -> str:
    """The module of the adapter."""
    module, is_of_experts, parameter = _path(tensor).partition(".experts.")
    if not is_of_experts:
        return module
    return f"{module}.experts.base_layer" if parameter == "gate_up_proj" else f"{module}.experts"


def _matrix_shape(tensor: weights.Tensor) -> tuple[int, ...]:
    """[inputs, outputs] of a kernel, or [experts, inputs, outputs]."""
    *experts, first, second = tensor.hf_shape
    return (*experts, first, second) if experts else (second, first)
