"""Weights in the Hugging Face layout: one table, read in both directions.

The table has rows that both families share and rows of each. A row names a tensor of a release,
the parameter it is, and how many input axes its kernel has. A kernel is stored there as [outputs,
inputs] (a Conv3d with its input axes spread) and here as [*inputs, *outputs]; everything else
differs in shape alone. Stacked parameters take one tensor per layer. Files are checked whole before
the first tensor is read, then read one tensor at a time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, so that safetensors needs no torch
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from models.config import BackboneConfig
from models.layers import Params

# (name in the release, our path, input axes of a kernel or 0 for anything else); {} is the layer.
_SHARED = (
    ("model.embed_tokens.weight", "text/embed/table", 0),
    ("model.norm.weight", "text/norm/scale", 0),
    ("lm_head.weight", "text/unembed/table", 0),
    ("model.layers.{}.input_layernorm.weight", "text/layers/attention_norm/scale", 0),
    ("model.layers.{}.self_attn.q_proj.weight", "text/layers/attention/q/kernel", 1),
    ("model.layers.{}.self_attn.q_proj.bias", "text/layers/attention/q/bias", 0),
    ("model.layers.{}.self_attn.k_proj.weight", "text/layers/attention/k/kernel", 1),
    ("model.layers.{}.self_attn.k_proj.bias", "text/layers/attention/k/bias", 0),
    ("model.layers.{}.self_attn.v_proj.weight", "text/layers/attention/v/kernel", 1),
    ("model.layers.{}.self_attn.v_proj.bias", "text/layers/attention/v/bias", 0),
    ("model.layers.{}.self_attn.o_proj.weight", "text/layers/attention/out/kernel", 2),
    ("model.layers.{}.post_attention_layernorm.weight", "text/layers/mlp_norm/scale", 0),
    ("model.layers.{}.mlp.gate_proj.weight", "text/layers/mlp/gate/kernel", 1),
    ("model.layers.{}.mlp.up_proj.weight", "text/layers/mlp/up/kernel", 1),
    ("model.layers.{}.mlp.down_proj.weight", "text/layers/mlp/down/kernel", 1),
    ("visual.patch_embed.proj.weight", "vision/patch_embed/kernel", 1),
    ("visual.blocks.{}.norm1.weight", "vision/layers/attention_norm/scale", 0),
    ("visual.blocks.{}.attn.qkv.weight", "vision/layers/attention/qkv/kernel", 1),
    ("visual.blocks.{}.attn.qkv.bias", "vision/layers/attention/qkv/bias", 0),
    ("visual.blocks.{}.attn.proj.weight", "vision/layers/attention/out/kernel", 2),
    ("visual.blocks.{}.attn.proj.bias", "vision/layers/attention/out/bias", 0),
    ("visual.blocks.{}.norm2.weight", "vision/layers/mlp_norm/scale", 0),
)
_QWEN2_5_VL = (
    ("visual.blocks.{}.mlp.gate_proj.weight", "vision/layers/mlp/gate/kernel", 1),
    ("visual.blocks.{}.mlp.gate_proj.bias", "vision/layers/mlp/gate/bias", 0),
    ("visual.blocks.{}.mlp.up_proj.weight", "vision/layers/mlp/up/kernel", 1),
    ("visual.blocks.{}.mlp.up_proj.bias", "vision/layers/mlp/up/bias", 0),
    ("visual.blocks.{}.mlp.down_proj.weight", "vision/layers/mlp/down/kernel", 1),
    ("visual.blocks.{}.mlp.down_proj.bias", "vision/layers/mlp/down/bias", 0),
    ("visual.merger.ln_q.weight", "vision/merger/norm/scale", 0),
    ("visual.merger.mlp.0.weight", "vision/merger/up/kernel", 2),
    ("visual.merger.mlp.0.bias", "vision/merger/up/bias", 0),
    ("visual.merger.mlp.2.weight", "vision/merger/down/kernel", 1),
    ("visual.merger.mlp.2.bias", "vision/merger/down/bias", 0),
)
_QWEN3_VL = (
    ("model.layers.{}.self_attn.q_norm.weight", "text/layers/attention/q_norm/scale", 0),
    ("model.layers.{}.self_attn.k_norm.weight", "text/layers/attention/k_norm/scale", 0),
    ("visual.patch_embed.proj.bias", "vision/patch_embed/bias", 0),
    ("visual.pos_embed.weight", "vision/positions/table", 0),
    ("visual.blocks.{}.norm1.bias", "vision/layers/attention_norm/bias", 0),
    ("visual.blocks.{}.norm2.bias", "vision/layers/mlp_norm/bias", 0),
    ("visual.blocks.{}.mlp.linear_fc1.weight", "vision/layers/mlp/up/kernel", 1),
    ("visual.blocks.{}.mlp.linear_fc1.bias", "vision/layers/mlp/up/bias", 0),
    ("visual.blocks.{}.mlp.linear_fc2.weight", "vision/layers/mlp/down/kernel", 1),
    ("visual.blocks.{}.mlp.linear_fc2.bias", "vision/layers/mlp/down/bias", 0),
    ("visual.merger.norm.weight", "vision/merger/norm/scale", 0),
    ("visual.merger.norm.bias", "vision/merger/norm/bias", 0),
    ("visual.merger.linear_fc1.weight", "vision/merger/up/kernel", 2),
    ("visual.merger.linear_fc1.bias", "vision/merger/up/bias", 0),
    ("visual.merger.linear_fc2.weight", "vision/merger/down/kernel", 1),
    ("visual.merger.linear_fc2.bias", "vision/merger/down/bias", 0),
    ("visual.deepstack_merger_list.{}.norm.weight", "vision/deepstack/norm/scale", 0),
    ("visual.deepstack_merger_list.{}.norm.bias", "vision/deepstack/norm/bias", 0),
    ("visual.deepstack_merger_list.{}.linear_fc1.weight", "vision/deepstack/up/kernel", 2),
    ("visual.deepstack_merger_list.{}.linear_fc1.bias", "vision/deepstack/up/bias", 0),
    ("visual.deepstack_merger_list.{}.linear_fc2.weight", "vision/deepstack/down/kernel", 1),
    ("visual.deepstack_merger_list.{}.linear_fc2.bias", "vision/deepstack/down/bias", 0),
)
_TABLES = {"qwen2_5_vl": _SHARED + _QWEN2_5_VL, "qwen3_vl": _SHARED + _QWEN3_VL}
# Qwen3-VL's releases, and files that newer transformers write of either family, nest both halves
# under "model."; either naming is read.
_RENAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))
_NESTED_FAMILIES = ("qwen3_vl",)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a release and its place in the parameters.

    Attributes:
        name: in the release.
        path: of the parameter, "/" between keys.
        layer: index into the parameter's leading axis, or None where it is not stacked.
        shape: of the parameter, for one layer.
        num_inputs: leading axes of `shape` that a kernel contracts; 0 for anything else.
        spread: shape of a Conv3d's input axes in the release; empty otherwise.
    """

    name: str
    path: str
    layer: int | None
    shape: tuple[int, ...]
    num_inputs: int
    spread: tuple[int, ...]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape in the release."""
        inputs, outputs = self.shape[: self.num_inputs], self.shape[self.num_inputs :]
        if self.num_inputs:
            return (math.prod(outputs), *(self.spread or (math.prod(inputs),)))
        return self.shape if self.path.endswith("table") else (math.prod(self.shape),)

    def from_hf(self, array: np.ndarray) -> np.ndarray:
        if self.num_inputs:
            array = array.reshape(array.shape[0], -1).T
        return array.reshape(self.shape)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        if self.num_inputs:
            array = array.reshape(math.prod(self.shape[: self.num_inputs]), -1).T
        return np.ascontiguousarray(array).reshape(self.hf_shape)


def tensors(config: BackboneConfig, shapes: Params) -> dict[str, list[Tensor]]:
    """Every tensor of a release of this shape, by parameter path, layers in order.

    Args:
        config: gives the patch's shape.
        shapes: the parameters, or anything of their tree with shapes at the leaves.
    """
    vision = config.vision
    conv = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    leaves = {
        "/".join(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    table = {}
    for name, path, num_inputs in _TABLES[config.family]:
        if path not in leaves:  # no unembedding of its own, no biases
            continue
        name = _release_name(name, config.family)
        shape = tuple(leaves.pop(path).shape)
        spread = conv if path == "vision/patch_embed/kernel" else ()
        if "{}" in name:
            table[path] = [
                Tensor(name.format(l), path, l, shape[1:], num_inputs, spread)
                for l in range(shape[0])
            ]
        else:
            table[path] = [Tensor(name, path, None, shape, num_inputs, spread)]
    if leaves:
        raise ValueError(f"parameters {sorted(leaves)} have no row in the weight table; add them")
    return table


def _release_name(name: str, family: str) -> str:
    """The name in the family's releases of a tensor that is named so in either scheme."""
    for nested, flat in _RENAMES:
        if name.startswith(nested):
            name = flat + name[len(nested) :]
    if family in _NESTED_FAMILIES:
        for nested, flat in _RENAMES:
            if name.startswith(flat):
                return nested + name[len(flat) :]
    return name


def load(folder: str | pathlib.Path, config: BackboneConfig, shapes: Params, dtype: Any) -> Params:
    """Reads a release's safetensors into the tree of `shapes`, cast to `dtype`.

    Raises:
        ValueError: tensors are missing, unused or of the wrong shape; all are named.
    """
    folder = pathlib.Path(folder)
    files = _files_by_name(folder, config.family)
    table = tensors(config, shapes)
    _check(folder, files, [tensor for row in table.values() for tensor in row])
    params: Params = {}
    for path, row in table.items():
        arrays = (
            tensor.from_hf(np.asarray(_read(folder, files[tensor.name]))).astype(dtype)
            for tensor in row
        )
        if row[0].layer is None:
            leaf = next(arrays)
        else:
            leaf = np.empty((len(row), *row[0].shape), dtype)
            for l, array in enumerate(arrays):
                leaf[l] = array
        *parents, last = path.split("/")
        node = params
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = jnp.asarray(leaf)
    return params


def _files_by_name(folder: pathlib.Path, family: str) -> dict[str, tuple[str, str]]:
    """(file, name in that file) of every tensor, by its name in the family's releases."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
    elif (folder / "model.safetensors").exists():
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise ValueError(
            f"{folder} must hold model.safetensors or model.safetensors.index.json, got "
            f"{sorted(path.name for path in folder.iterdir())}; pass the folder of a release"
        )
    return {_release_name(name, family): (file, name) for name, file in files.items()}


def _check(folder: pathlib.Path, files: dict[str, tuple[str, str]], expected: list[Tensor]) -> None:
    names = {tensor.name for tensor in expected}
    problems = [f"missing {name}" for name in sorted(names - files.keys())]
    problems += [f"unused {name}" for name in sorted(files.keys() - names)]
    for tensor in expected:
        if tensor.name not in files:
            continue
        file, name = files[tensor.name]
        with safe_open(folder / file, framework="numpy") as opened:
            shape = tuple(opened.get_slice(name).get_shape())
        if shape != tensor.hf_shape:
            problems.append(f"{tensor.name} has shape {shape}, expected {tensor.hf_shape}")
    if problems:
        raise ValueError(
            f"{folder} does not hold this backbone: {'; '.join(problems)}; check that config.json "
            "belongs to the weights"
        )


def _read(folder: pathlib.Path, place: tuple[str, str]) -> np.ndarray:
    file, name = place
    with safe_open(folder / file, framework="numpy") as opened:
        return opened.get_tensor(name)


def export(
    folder: str | pathlib.Path,
    params: Params,
    config: BackboneConfig,
    *,
    dtype: Any,
    max_shard_bytes: int,
) -> None:
    """Writes config.json, generation_config.json and safetensors under the releases' names.

    Args:
        folder: made if need be; files of these names in it are replaced.
        params: the training layout.
        config: written as config.json.
        dtype: of the written tensors.
        max_shard_bytes: more than this is split over several files, one in memory at a time.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(dtype)
    hf_config = {**config.to_hf(), "dtype": dtype.name}
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    generation = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for old in folder.glob("model*.safetensors*"):  # shards of an earlier export
        old.unlink()

    table = [tensor for row in tensors(config, params).values() for tensor in row]
    shards = _shards(table, dtype.itemsize, max_shard_bytes)
    weight_map = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        arrays = {tensor.name: _to_release(params, tensor, dtype) for tensor in shard}
        save_file(arrays, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, file)
    if len(shards) > 1:
        total = sum(math.prod(tensor.shape) for tensor in table) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def _shards(table: list[Tensor], itemsize: int, max_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in table:
        size = math.prod(tensor.shape) * itemsize
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _to_release(params: Params, tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    leaf = params
    for key in tensor.path.split("/"):
        leaf = leaf[key]
    array = leaf if tensor.layer is None else leaf[tensor.layer]
    return tensor.to_hf(np.asarray(array).astype(dtype))
