"""Maps Hugging Face tensors to parameters: one table for both loading and export.

Some rows of the table are shared by both families, the others belong to one. A row gives the name
of a tensor in a release, the path of our parameter, and the number of input axes of its kernel. A
release stores a kernel as [outputs, inputs] (a Conv3d with separate input axes), we store it as
[*inputs, *outputs]. All other tensors differ only in shape. A stacked parameter has one tensor per
layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from models.config import BackboneConfig
from models.layers import Params

EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
# (name in the release, our path, number of input axes of a kernel, else 0); {} is the layer.
_SHARED = (
    (EMBEDDING, "text/embed/table", 0),
    ("model.norm.weight", "text/norm/scale", 0),
    (UNEMBEDDING, "text/unembed/table", 0),
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
# Qwen3-VL releases, and files of either family written by newer transformers, nest tower and
# decoder under "model."; both namings are read.
_RENAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))
_NESTED_FAMILIES = ("qwen3_vl",)

Bounds = Sequence[tuple[int, int]]  # (start, stop) along every axis
_BLOCK_SIZE = 2**17  # elements


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a release and the parameter it belongs to.

    Attributes:
        name: in the release.
        path: of the parameter, "/" between keys.
        layer: index into the parameter's leading axis, or None if it is not stacked.
        shape: of the parameter, for one layer.
        num_inputs: number of leading axes of `shape` that a kernel contracts; 0 for anything else.
        spread: shape of a Conv3d's input axes in the release; empty otherwise.
    """

    name: str
    path: str
    layer: int | None
    shape: tuple[int, ...]
    num_inputs: int
    spread: tuple[int, ...]

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """For each axis of the release's tensor, the axes of `shape` that it flattens."""
        axes = tuple(range(len(self.shape)))
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

    def read(self, out: np.ndarray, source: Any, part: Bounds) -> None:
        """Fills `out` with a part of the parameter, a block of the release's rows at a time.

        If an axis in the file flattens several axes of `shape`, the first of them is sliced in the
        file, so that no more of it is read than `part` needs. The others, and the inputs of a
        Conv3d, are sliced after reading.

        Args:
            out: of the part's shape; values are cast to its dtype.
            source: the release's tensor, from `release.open_tensor`.
            part: (start, stop) along every axis of `shape`.
        """
        rows, *columns = self.axes
        in_file = {rows[0], *(group[0] for group in columns if not self.spread)}
        sizes = [part[a][1] - part[a][0] if a in in_file else self.shape[a] for a in self.order]
        region = tuple(slice(None) if a in in_file else slice(*part[a]) for a in self.order)
        transposed = out.transpose(self.order)
        column_slices = [
            self._slice_in_file(group, *part[group[0]]) for group in columns if not self.spread
        ]
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


def _blocks(num_rows: int, row_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fit in the CPU cache while they are transposed: ten times as fast."""
    step = max(1, _BLOCK_SIZE // row_size)
    for i in range(0, num_rows, step):
        yield i, min(i + step, num_rows)


def tensors(config: BackboneConfig, shapes: Params) -> dict[str, list[Tensor]]:
    """Every tensor of a release of this config, by parameter path, layers in order.

    Args:
        config: gives the family and the patch shape.
        shapes: the parameters, or a tree of the same structure whose leaves have shapes.
    """
    vision = config.vision
    conv = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    leaves = leaves_by_path(shapes)
    table = {}
    for name, path, num_inputs in _TABLES[config.family]:
        if path not in leaves:  # tied embeddings, no bias, or no DeepStack
            continue
        name = release_name(name, config.family)
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


def release_name(name: str, family: str) -> str:
    """A tensor's name in the family's releases, given its name in either naming."""
    for nested, flat in _RENAMES:
        if name.startswith(nested):
            name = flat + name[len(nested) :]
    if family in _NESTED_FAMILIES:
        for nested, flat in _RENAMES:
            if name.startswith(flat):
                return nested + name[len(flat) :]
    return name


def leaves_by_path(tree: Params) -> dict[str, Any]:
    """The leaves of nested dicts by path, "/" between keys."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}
