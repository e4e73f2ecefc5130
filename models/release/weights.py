"""Maps Hugging Face tensors to parameters: one table for both loading and export.

Some rows of the table are shared by all families, the others belong to a few. A release stores a
kernel as [outputs, inputs] (a Conv3d with separate input axes), we store it as [*inputs, *outputs].
All other tensors differ only in shape. A stacked parameter has one tensor per layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from models.config import BackboneConfig
from models.families import FAMILIES
from models.layers import Params

EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
# (module in the release, our module, number of input axes of a kernel, else 0); {} is the layer. A
# module's weight is our kernel, scale (of a norm) or table; its bias is our bias.
_TEXT = (
    ("model.embed_tokens", "text/embed", 0),
    ("model.norm", "text/norm", 0),
    ("lm_head", "text/unembed", 0),
    ("model.layers.{}.input_layernorm", "text/layers/attention_norm", 0),
    ("model.layers.{}.self_attn.q_proj", "text/layers/attention/q", 1),
    ("model.layers.{}.self_attn.k_proj", "text/layers/attention/k", 1),
    ("model.layers.{}.self_attn.v_proj", "text/layers/attention/v", 1),
    ("model.layers.{}.self_attn.o_proj", "text/layers/attention/out", 2),
    ("model.layers.{}.post_attention_layernorm", "text/layers/mlp_norm", 0),
)
_MLP = (
    ("model.layers.{}.mlp.gate_proj", "text/layers/mlp/gate", 1),
    ("model.layers.{}.mlp.up_proj", "text/layers/mlp/up", 1),
    ("model.layers.{}.mlp.down_proj", "text/layers/mlp/down", 1),
)
_EXPERTS = "text/layers/mlp/experts/"  # stored in a release as here: [experts, inputs, outputs]
_SPARSE_MLP = (
    ("model.layers.{}.mlp.gate", "text/layers/mlp/router", 1),
    ("model.layers.{}.mlp.experts.gate_up_proj", f"{_EXPERTS}gate_up", 1),
    ("model.layers.{}.mlp.experts.down_proj", f"{_EXPERTS}down", 1),
)
_QK_NORMS = (
    ("model.layers.{}.self_attn.q_norm", "text/layers/attention/q_norm", 0),
    ("model.layers.{}.self_attn.k_norm", "text/layers/attention/k_norm", 0),
)
_TOWER = (
    ("visual.patch_embed.proj", "vision/patch_embed", 1),
    ("visual.blocks.{}.norm1", "vision/layers/attention_norm", 0),
    ("visual.blocks.{}.attn.qkv", "vision/layers/attention/qkv", 1),
    ("visual.blocks.{}.attn.proj", "vision/layers/attention/out", 2),
    ("visual.blocks.{}.norm2", "vision/layers/mlp_norm", 0),
)
_QWEN2_5_TOWER = (
    *_TOWER,
    ("visual.blocks.{}.mlp.gate_proj", "vision/layers/mlp/gate", 1),
    ("visual.blocks.{}.mlp.up_proj", "vision/layers/mlp/up", 1),
    ("visual.blocks.{}.mlp.down_proj", "vision/layers/mlp/down", 1),
    ("visual.merger.ln_q", "vision/merger/norm", 0),
    ("visual.merger.mlp.0", "vision/merger/up", 2),
    ("visual.merger.mlp.2", "vision/merger/down", 1),
)
_QWEN3_TOWER = (
    *_TOWER,
    ("visual.pos_embed", "vision/positions", 0),
    ("visual.blocks.{}.mlp.linear_fc1", "vision/layers/mlp/up", 1),
    ("visual.blocks.{}.mlp.linear_fc2", "vision/layers/mlp/down", 1),
    ("visual.merger.norm", "vision/merger/norm", 0),
    ("visual.merger.linear_fc1", "vision/merger/up", 2),
    ("visual.merger.linear_fc2", "vision/merger/down", 1),
    ("visual.deepstack_merger_list.{}.norm", "vision/deepstack/norm", 0),
    ("visual.deepstack_merger_list.{}.linear_fc1", "vision/deepstack/up", 2),
    ("visual.deepstack_merger_list.{}.linear_fc2", "vision/deepstack/down", 1),
)
_TABLES = {
    "qwen2_5_vl": _TEXT + _MLP + _QWEN2_5_TOWER,
    "qwen3_vl": _TEXT + _MLP + _QK_NORMS + _QWEN3_TOWER,
    "qwen3_vl_moe": _TEXT + _SPARSE_MLP + _QK_NORMS + _QWEN3_TOWER,
    "qwen2": _TEXT + _MLP,
    "qwen3": _TEXT + _MLP + _QK_NORMS,
    "llama": _TEXT + _MLP,
}
# Releases that nest, and files that newer transformers wrote of any with a tower, name tower and
# decoder under "model."; both namings are read.
_RENAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))

Bounds = Sequence[tuple[int, int]]  # (start, stop) along every axis
_BLOCK_SIZE = 2**17  # elements


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a release and the parameter it belongs to."""

    name: str  # in the release
    path: str  # of the parameter, "/" between keys
    layer: int | None  # index into the parameter's leading axis; None if it is not stacked
    shape: tuple[int, ...]  # of the parameter, for one layer
    num_inputs: int  # leading axes of `shape` that a kernel contracts; 0 for anything else
    spread: tuple[int, ...]  # a Conv3d's input axes in the release; empty otherwise

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """For each axis of the release's tensor, the axes of `shape` that it flattens."""
        axes = tuple(range(len(self.shape)))
        if self.path.startswith(_EXPERTS):
            return axes[:1], axes[1:2], axes[2:]
        if self.num_inputs:
            return axes[self.num_inputs :], axes[: self.num_inputs]
        return tuple((axis,) for axis in axes) if self.path.endswith("table") else (axes,)

    @property
    def order(self) -> list[int]:
        """Axes of `shape` in the order of the release's tensor."""
        return [axis for group in self.axes for axis in group]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of the release's tensor."""
        sizes = [math.prod(self.shape[axis] for axis in group) for group in self.axes]
        return (*sizes[:-1], *(self.spread or sizes[-1:]))

    @property
    def other_shape(self) -> tuple[int, ...]:
        """The shape in files of transformers 5, which exchanges the axes of experts' kernels."""
        first, *others = self.hf_shape
        return (first, *reversed(others)) if self.path.startswith(_EXPERTS) else self.hf_shape

    def read(self, out: np.ndarray, source: Any, part: Bounds) -> None:
        """Fills `out` with a part of the parameter, a block of the release's rows at a time.

        If an axis in the file flattens several axes of `shape`, the first of them is sliced in the
        file, so that no more of it is read than `part` needs. The others, and the inputs of a
        Conv3d, are sliced after reading. Values are cast to the dtype of `out`; `source` is the
        release's tensor, from `transfer.open_tensor`.
        """
        rows, *columns = self.axes
        in_file = {rows[0], *(group[0] for group in columns if not self.spread)}
        sizes = [part[a][1] - part[a][0] if a in in_file else self.shape[a] for a in self.order]
        region = tuple(slice(None) if a in in_file else slice(*part[a]) for a in self.order)
        transposed = out.transpose(self.order)
        in_columns = [] if self.spread else columns
        column_slices = [self._slice_in_file(group, *part[group[0]]) for group in in_columns]
        start, stop = part[rows[0]]
        for i, j in _blocks(stop - start, math.prod(sizes[1:])):
            row_slice = self._slice_in_file(rows, start + i, start + j)
            block = source[(row_slice, *column_slices)]
            transposed[i:j] = block.reshape(j - i, *sizes[1:])[region]

    def _slice_in_file(self, group: tuple[int, ...], start: int, stop: int) -> slice:
        """Slice of the file axis that flattens `group`, for start..stop of its first axis."""
        each = math.prod(self.shape[axis] for axis in group[1:])
        return slice(start * each, stop * each)

    def rows(self, array: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
        """The parameter in the release's axis order, cast, in contiguous blocks of rows."""
        transposed = array.transpose(self.order)
        for i, j in _blocks(len(transposed), math.prod(transposed.shape[1:])):
            yield np.ascontiguousarray(transposed[i:j], dtype)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """A tensor of the file, `source`, with its last two axes exchanged."""

    source: Any

    def __getitem__(self, part: tuple[slice, slice, slice]) -> np.ndarray:
        first, rows, columns = part
        return self.source[first, columns, rows].swapaxes(1, 2)


def _blocks(num_rows: int, row_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fit in the CPU cache while they are transposed: ten times as fast."""
    step = max(1, _BLOCK_SIZE // row_size)
    return ((i, min(i + step, num_rows)) for i in range(0, num_rows, step))


def tensors(config: BackboneConfig, shapes: Params) -> dict[str, list[Tensor]]:
    """Every tensor of a release of this config, by parameter path, layers in order.

    Args:
        shapes: the parameters, or a tree of the same structure whose leaves have shapes.
    """
    conv = ()
    if vision := config.vision:
        patch = vision.patch_size, vision.patch_size
        conv = (vision.in_channels, vision.temporal_patch_size, *patch)
    leaves = leaves_by_path(shapes)
    table = {}
    for name, path, num_inputs in _rows(config.family):
        if path not in leaves:  # tied embeddings, no bias, or no DeepStack
            continue
        layers, shape = [None], tuple(leaves.pop(path).shape)
        if "{}" in name:
            layers, shape = range(shape[0]), shape[1:]
        spread = conv if path == "vision/patch_embed/kernel" else ()
        table[path] = [Tensor(name.format(l), path, l, shape, num_inputs, spread) for l in layers]
    if leaves:
        raise ValueError(f"parameters {sorted(leaves)} have no row in the weight table; add them")
    return table


def _rows(family: str) -> Iterator[tuple[str, str, int]]:
    """(tensor in the release, our path, number of input axes) of every module's parameters."""
    for module, path, num_inputs in _TABLES[family]:
        if path.startswith(_EXPERTS):
            yield release_name(module, family), f"{path}/kernel", num_inputs
            continue
        leaf = "kernel" if num_inputs else "scale" if path.endswith("norm") else "table"
        yield release_name(f"{module}.weight", family), f"{path}/{leaf}", num_inputs
        yield release_name(f"{module}.bias", family), f"{path}/bias", 0


def release_name(name: str, family: str) -> str:
    """A tensor's name in the family's releases, given its name in either naming."""
    for nested, flat in _RENAMES:
        if name.startswith(nested):
            name = flat + name[len(nested) :]
    if FAMILIES[family].nests:
        for nested, flat in _RENAMES:
            if name.startswith(flat):
                return nested + name[len(flat) :]
    return name


def leaves_by_path(tree: Params) -> dict[str, Any]:
    """The leaves of nested dicts by path, "/" between keys."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}
