"""Low-rank adapters on the decoder's linear layers (LoRA, arXiv 2106.09685).

An adapted layer computes x·W + scale · (x·A)·B, with A [*inputs, rank] and B [rank, *outputs]
stored next to the kernel in the training layout; scale is α/rank. `merged` folds the adapters into
the kernels, as decoding and export require. `without` returns the base weights. B starts at 0, so
new adapters do not change the output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from models.layers import Params

_NUM_INPUTS = {"q": 1, "k": 1, "v": 1, "out": 2, "gate": 1, "up": 1, "down": 1, "gate_up": 1}
_LEAVES = ("lora_a", "lora_b", "lora_scale")
Path = tuple[str, ...]


def add(params: Params, rng: Array, *, rank: int, alpha: float, experts: bool = False) -> Params:
    """The training layout with an adapter at every linear layer of the decoder but the router.

    A is drawn from N(0, 1/inputs), the product is scaled by α/rank, and existing adapters are
    replaced. Those of a sparse decoder's `experts` are added if asked, each with its own.
    """
    flat: dict[Path, Any] = flatten_dict(without(params))
    for number, path in enumerate(_adapted(flat, experts)):
        kernel = flat[path]
        stacked, inputs, outputs = _split(path, kernel.shape)
        key = jax.random.fold_in(rng, number)
        a = jax.random.normal(key, (*stacked, *inputs, rank)) * math.prod(inputs) ** -0.5
        flat[*path[:-1], "lora_a"] = a.astype(kernel.dtype)
        flat[*path[:-1], "lora_b"] = jnp.zeros((*stacked, rank, *outputs), kernel.dtype)
        flat[*path[:-1], "lora_scale"] = jnp.full(stacked[:1], alpha / rank, jnp.float32)
    return unflatten_dict(flat)


def add_axes(axes: Params, *, experts: bool = False) -> Params:
    """Logical axes of the tree that `add` returns, from those of the base parameters."""
    flat: dict[Path, Any] = flatten_dict(axes)
    for path in _adapted(flat, experts):
        stacked, inputs, outputs = _split(path, flat[path])
        flat[*path[:-1], "lora_a"] = (*stacked, *inputs, None)
        flat[*path[:-1], "lora_b"] = (*stacked, None, *outputs)
        flat[*path[:-1], "lora_scale"] = stacked[:1]
    return unflatten_dict(flat)


def merged(params: Params) -> Params:
    """Folds the adapters into the kernels: W + scale · A·B, in the kernel's dtype."""
    flat: dict[Path, Any] = flatten_dict(without(params))
    adapters: dict[Path, Any] = flatten_dict(params)
    for path in [p for p in adapters if p[-1] == "lora_a"]:
        arrays = [flat[*path[:-1], "kernel"], *(adapters[*path[:-1], name] for name in _LEAVES)]
        flat[*path[:-1], "kernel"] = jax.lax.platform_dependent(
            *arrays, default=jax.vmap(_merged_layer), cuda=_one_by_one
        )
    return unflatten_dict(flat)


def _merged_layer(kernel: Array, *adapter: Array) -> Array:
    a, b, scale = (leaf.astype(jnp.float32) for leaf in adapter)
    of_experts = a.ndim + b.ndim > kernel.ndim + 2
    product = jnp.matmul(a, b) if of_experts else jnp.tensordot(a, b, 1)
    return (kernel + scale * product).astype(kernel.dtype)


def _one_by_one(*arrays: Array) -> Array:
    """For GPUs, whose compiler keeps the float32 products of all layers of several kernels."""
    return jax.lax.map(lambda layer: _merged_layer(*layer), arrays)


def only(params: Params) -> Params:
    """The adapters without the base weights; no array is copied."""
    return unflatten_dict({p: a for p, a in flatten_dict(params).items() if p[-1] in _LEAVES})


def concatenated(adapters: Sequence[Params]) -> Params:
    """One adapter whose product is the sum of theirs: A·B + A'·B' = [A A']·[B; B'].

    The adapters, from `only`, must have the same scale, which is also that of the result.
    """

    def concatenate(path: Any, *leaves: Array) -> Array:
        if path[-1].key == "lora_scale":
            return leaves[0]
        stacked, *_ = _split(tuple(part.key for part in path), leaves[0].shape)
        return jnp.concatenate(leaves, -1 if path[-1].key == "lora_a" else len(stacked))

    return jax.tree_util.tree_map_with_path(concatenate, *adapters)


def without(params: Params) -> Params:
    """The parameters without their adapters; no array is copied."""
    return unflatten_dict({p: a for p, a in flatten_dict(params).items() if p[-1] not in _LEAVES})


def is_adapter(path: Path) -> bool:
    """Whether a parameter is an A or a B."""
    return path[-1] in ("lora_a", "lora_b")


def _adapted(flat: Mapping[Path, Any], experts: bool) -> list[Path]:
    """The paths of kernels that have adapters, in order."""
    decoder = [p for p in sorted(flat) if p[:2] == ("text", "layers") and p[-1] == "kernel"]
    return [p for p in decoder if p[-2] in _NUM_INPUTS and (experts or "experts" not in p)]


def _split(
    path: Path, dims: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Splits the dimensions of a kernel into stacked (layers, experts), inputs and outputs."""
    start = 2 if "experts" in path else 1
    end = start + _NUM_INPUTS[path[-2]]
    return dims[:start], dims[start:end], dims[end:]
