"""Loads a release onto devices and exports it, one tensor at a time.

The whole release is checked before any parameter is loaded. Each device's shard of a parameter is
then read separately, slice by slice: besides the devices' memory, the host holds at most one
tensor. Export gathers and writes one tensor at a time.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from models.config import BackboneConfig
from models.layers import Params
from models.release import config_json, tensor_files, weights


def load(
    folder: str | pathlib.Path,
    config: BackboneConfig,
    shapes: Params,
    dtype: Any,
    shardings: Params | None = None,
) -> Params:
    """Reads a release's safetensors into the tree of `shapes`, see `backbone.load`.

    The default device takes everything without `shardings`.
    """
    table = weights.tensors(config, shapes)
    every = [tensor for row in table.values() for tensor in row]
    entries = _find(pathlib.Path(folder), every, config)
    dtype = np.dtype(dtype)
    settings = {"entries": entries, "dtype": dtype, "staged": _staged_bytes(every, dtype)}
    read = functools.partial(_read_part, **settings)
    sharding_of = weights.leaves_by_path(shardings) if shardings else dict.fromkeys(table)
    params = {path: _load_parameter(row, read, sharding_of[path]) for path, row in table.items()}
    return unflatten_dict(params, sep="/")


def _find(
    folder: pathlib.Path, expected: list[weights.Tensor], config: BackboneConfig
) -> dict[str, tensor_files.Entry]:
    """The header entry of each tensor, by its name in the family's releases.

    If the embeddings are tied and the release also stores an unembedding, it must equal the
    embedding table and is left out.
    """
    family = config.family
    found: dict[str, tensor_files.Entry] = {}
    problems = []
    for entry in tensor_files.read_headers(folder).values():
        name = weights.release_name(entry.name, family)
        if name in found:
            problems.append(f"{name} is there twice, as {found[name].name} and {entry.name}")
        found[name] = entry
    copy = found.pop(weights.UNEMBEDDING, None) if config.text.tie_embeddings else None
    shapes = {tensor.name: tensor.hf_shape for tensor in expected}
    problems += [f"missing {name}" for name in sorted(shapes.keys() - found.keys())]
    problems += [f"unused {name}" for name in sorted(found.keys() - shapes.keys())]
    for name in [name for name in shapes if name in found]:
        entry = found[name]
        if entry.shape != shapes[name]:
            problems.append(f"{name} has shape {entry.shape}, expected {shapes[name]}")
        if entry.dtype not in (dtypes := list(tensor_files.DTYPES.values())):
            problems.append(f"{name} is {entry.dtype}, expected {dtypes}")
    if problems:
        raise ValueError(
            f"{folder} does not hold this backbone: {'; '.join(problems)}; check that config.json "
            "belongs to the weights"
        )
    embedding = found[weights.release_name(weights.EMBEDDING, family)]
    if copy is not None and not tensor_files.is_equal(copy, embedding):
        raise ValueError(
            f"{copy.name} must equal {embedding.name}, as config.json ties them, and differs in "
            f"{folder}; set tie_word_embeddings to false in config.json, or remove {copy.name}"
        )
    return found


def _load_parameter(
    row: list[weights.Tensor], read: Callable[..., list[jax.Array]], sharding: Sharding | None
) -> jax.Array:
    """One parameter; each shard is read once for all local devices that hold it."""
    shape = row[0].shape if row[0].layer is None else (len(row), *row[0].shape)
    if sharding is None:
        whole = [(0, size) for size in shape]
        return read(row, whole, [None])[0]
    holders: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # every addressable device holds a part
        part = tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
        holders.setdefault(part, []).append(device)
    arrays = [array for part, devices in holders.items() for array in read(row, part, devices)]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _staged_bytes(every: list[weights.Tensor], dtype: np.dtype) -> int | None:
    """Most bytes of a stacked shard that the host stages at a time; None: no limit.

    The limit is the size of the largest tensor. On CPU there is none: the host array becomes the
    device's memory.
    """
    if jax.default_backend() == "cpu":
        return None
    return max(math.prod(tensor.shape) for tensor in every) * dtype.itemsize


def _read_part(
    row: list[weights.Tensor],
    part: weights.Bounds,
    devices: Sequence[jax.Device | None],
    *,
    entries: dict[str, tensor_files.Entry],
    dtype: np.dtype,
    staged: int | None,
) -> list[jax.Array]:
    """A shard of a parameter, on each of `devices`; None is the default device.

    Args:
        row: the parameter's tensors.
        part: (start, stop) of the shard along every axis of the parameter.
        staged: most bytes that the host stages at a time, in whole layers; None: no limit.
    """
    is_stacked = row[0].layer is not None
    if is_stacked:
        (first, last), *part = part
        row = row[first:last]
    shape = tuple(stop - start for start, stop in part)
    step = len(row)
    if staged is not None:
        step = max(1, min(step, staged // (math.prod(shape) * dtype.itemsize)))
    groups = []
    for i in range(0, len(row), step):
        host = _aligned_empty((len(row[i : i + step]), *shape), dtype)
        for tensor, out in zip(row[i : i + step], host, strict=True):
            with tensor_files.open_tensor(entries[tensor.name]) as source:
                tensor.read(out, source, part)
        host = host if is_stacked else host[0]
        groups.append(jax.block_until_ready([jax.device_put(host, each) for each in devices]))
        del host, out
    if len(groups) == 1:
        return groups[0]
    return [jnp.concatenate(arrays) for arrays in zip(*groups, strict=True)]


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array aligned to 64 bytes, which `device_put` on CPU does not copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def export(
    folder: str | pathlib.Path,
    params: Params,
    config: BackboneConfig,
    dtype: Any = jnp.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes the training layout as a Hugging Face release: config, weights, generation config.

    In a multi-process run every process must call this; process 0 writes.

    Args:
        folder: created if missing; an earlier export in it is replaced.
        dtype: of the written tensors.
        max_shard_bytes: larger weights are split over several files.
    """
    folder, dtype = pathlib.Path(folder), np.dtype(dtype)
    is_writer = jax.process_index() == 0
    if is_writer:
        _write_configs(folder, config, dtype)
    leaves = weights.leaves_by_path(params)
    table = [tensor for row in weights.tensors(config, params).values() for tensor in row]
    shards = _shards(table, dtype.itemsize, max_shard_bytes)
    weight_map = {}
    for i, shard in enumerate(shards):
        file = tensor_files.SINGLE
        if len(shards) > 1:
            file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        blocks = (
            block
            for tensor in shard
            for block in tensor.rows(to_host(leaves[tensor.path], tensor.layer), dtype)
        )
        shapes = {tensor.name: tensor.hf_shape for tensor in shard}
        tensor_files.write_file(folder / file, shapes, dtype, blocks)
        weight_map |= dict.fromkeys(shapes, file)
    if is_writer and len(shards) > 1:
        total = sum(math.prod(tensor.shape) for tensor in table) * dtype.itemsize
        tensor_files.write_index(folder, weight_map, total)


def _write_configs(folder: pathlib.Path, config: BackboneConfig, dtype: np.dtype) -> None:
    """Writes config.json and generation_config.json, and removes weights of an earlier export."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**config_json.to_hf(config), "dtype": dtype.name}
    generation = {name: fields[name] for name in ("eos_token_id", "pad_token_id")}
    for name, content in (("config.json", fields), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    for old in folder.glob("model*.safetensors*"):
        old.unlink()


def _shards(
    table: list[weights.Tensor], itemsize: int, max_bytes: int
) -> list[list[weights.Tensor]]:
    """Consecutive tensors of at most `max_bytes` together, or a larger one alone."""
    shards: list[list[weights.Tensor]] = [[]]
    filled = 0
    for tensor in table:
        size = math.prod(tensor.shape) * itemsize
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def to_host(leaf: jax.Array | np.ndarray, layer: int | None) -> np.ndarray:
    """One tensor's values on the host.

    Read from a new array, since a jax.Array keeps its host copy until it is deleted.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf if layer is None else leaf[layer])
    whole = layer is None
    fresh = jnp.copy(leaf) if whole else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    if not fresh.is_fully_addressable:
        return multihost_utils.process_allgather(fresh, tiled=True)
    return np.asarray(fresh)
