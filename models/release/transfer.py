"""Loads a release onto devices and exports it: safetensors read by slice, written as a stream.

A release keeps its tensors in `model.safetensors`, or in several such files with an index that maps
tensors to files. A file is eight bytes of header length, a JSON header with the dtype, shape and
byte offsets of every tensor, and the tensors' bytes.

The whole release is checked before any parameter is loaded. Each device's shard of a parameter is
then read separately, slice by slice: besides the devices' memory, the host holds at most one
tensor. Export gathers and writes one tensor at a time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, so that safetensors needs no torch
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open

from models.config import BackboneConfig
from models.layers import Params
from models.release import config_json, weights
from models.release import folder as release_folder

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BLOCK_SIZE = 2**22  # elements read at a time when tensors are compared
MAX_HEADER_BYTES = 2**25  # of one file; about 200,000 tensors
MAX_TENSORS = 2**20
_MAX_LISTED = 20  # faults that a message lists
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # by numpy's name


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor as described in its file's header; the dtype is a safetensors name, as "BF16"."""

    path: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def load(
    folder: str | pathlib.Path,
    config: BackboneConfig,
    shapes: Params,
    dtype: Any,
    shardings: Params | None = None,
) -> Params:
    """Reads a release's safetensors into the tree of `shapes`, see `backbone.load`."""
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
) -> dict[str, Entry]:
    """The header entry of each tensor, by its name in the family's releases.

    If the embeddings are tied and the release also stores an unembedding, it must equal the
    embedding table and is left out.
    """
    family = config.family
    found: dict[str, Entry] = {}
    problems = []
    for entry in read_headers(folder).values():
        name = weights.release_name(entry.name, family)
        if name.endswith("rotary_emb.inv_freq"):  # of older Llama releases; a constant
            continue
        if name in found:
            problems.append(f"{name} is duplicated, as {found[name].name} and {entry.name}")
        found[name] = entry
    copy = found.pop(weights.UNEMBEDDING, None) if config.text.tie_embeddings else None
    shapes = {tensor.name: (tensor.hf_shape, tensor.other_shape) for tensor in expected}
    problems += [f"missing {name}" for name in sorted(shapes.keys() - found.keys())]
    problems += [f"unused {name}" for name in sorted(found.keys() - shapes.keys())]
    for name in [name for name in shapes if name in found]:
        entry = found[name]
        if entry.shape not in shapes[name]:
            problems.append(f"{name} has shape {entry.shape}, expected {shapes[name][0]}")
        if entry.dtype not in (dtypes := list(DTYPES.values())):
            problems.append(f"{name} is {entry.dtype}, expected {dtypes}")
    if problems:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: {_listed(problems)}; use the "
            "config.json of the same release"
        )
    embedding = found[weights.release_name(weights.EMBEDDING, family)]
    if copy is not None and not is_equal(copy, embedding):
        raise ValueError(
            f"{copy.name} must equal {embedding.name}, as config.json ties them, and differs in "
            f"{folder}; set tie_word_embeddings to false in config.json, or remove {copy.name}"
        )
    return found


def read_headers(folder: str | pathlib.Path) -> dict[str, Entry]:
    """Every tensor of a release by its name; reads no data.

    Raises:
        ValueError: there are no weights, a file is missing or truncated, two files hold the same
            tensor, or the index and the files disagree; the message lists the first such faults.
    """
    folder = pathlib.Path(folder)
    release_folder.check(folder)
    index = None if (folder / SINGLE).exists() else _read_index(folder)
    entries: dict[str, Entry] = {}
    problems, unread = [], set()
    for file in [SINGLE] if index is None else sorted(set(index.values())):
        if len(unread) == _MAX_LISTED:
            break
        try:
            header = _read_header(folder / file)
        except (OSError, SafetensorError) as error:
            unread.add(file)
            problems.append(f"{file} is missing or truncated ({error})")
            continue
        problems += [
            f"{name} is in {entries[name].path.name} and in {file}"
            for name in sorted(header.keys() & entries.keys())
        ]
        entries |= header
        if len(entries) > MAX_TENSORS:
            raise ValueError(
                f"{folder} must hold at most {MAX_TENSORS} tensors, got more; fetch it again"
            )
    if index is not None:
        problems += [
            f"{name} is not in {file}, where the index has it"
            for name, file in sorted(index.items())
            if file not in unread and (name not in entries or entries[name].path.name != file)
        ]
        problems += [
            f"{name} is in {entries[name].path.name} and not in the index"
            for name in sorted(entries.keys() - index.keys())
        ]
    if problems:
        raise ValueError(
            f"{folder} is not a complete release: {_listed(problems)}; fetch or export it again"
        )
    return entries


def _listed(problems: Sequence[str]) -> str:
    """The first faults as one printable line: names of tensors are untrusted."""
    line = "; ".join(f"{problem:.300}" for problem in problems[:_MAX_LISTED])
    line = "".join(c if c.isprintable() else " " for c in line)
    more = len(problems) - _MAX_LISTED
    return f"{line}; and {more} more" if more > 0 else line


def _read_index(folder: pathlib.Path) -> dict[str, str]:
    """File name of every tensor, by the tensor's name."""
    path = folder / INDEX
    if not path.exists():
        found = "no folder"
        if folder.is_dir():
            found = sorted(path.name for path in folder.iterdir())[:_MAX_LISTED]
        raise ValueError(
            f"{folder} must hold {SINGLE} or {INDEX}, got {found}; pass the folder of a release"
        )
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} must be JSON with a weight_map of names to files, got {error!r}; fetch or "
            "export the release again"
        ) from error
    for file in index.values():
        # Untrusted text: a path would lead out of the folder.
        if not file.isprintable() or "/" in file or file in ("", ".", ".."):
            raise ValueError(
                f"{path} must map tensors to files in its folder, got {file!r:.100}; fetch or "
                "export the release again"
            )
    return index


def _read_header(path: pathlib.Path) -> dict[str, Entry]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise SafetensorError(f"a header of {length} bytes, expected {MAX_HEADER_BYTES} at most")
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: Entry(path, name, tuple(each.get_shape()), each.get_dtype())
            for name, each in slices.items()
        }


def is_equal(one: Entry, other: Entry) -> bool:
    """Whether two float tensors hold the same values; reads a block of rows at a time."""
    if one.shape != other.shape:
        return False
    num_rows, row_size = one.shape[0], math.prod(one.shape[1:])
    step = max(1, _BLOCK_SIZE // row_size)
    with open_tensor(one) as ours, open_tensor(other) as theirs:
        for i in range(0, num_rows, step):
            block = slice(i, min(i + step, num_rows))
            if not np.array_equal(ours[block].astype(np.float32), theirs[block].astype(np.float32)):
                return False
    return True


@contextlib.contextmanager
def open_tensor(entry: Entry) -> Iterator[Any]:
    """Opens a tensor for reading: `source[i:j, k:l]` reads only that slice.

    The file is memory-mapped only while this is open, so that its pages do not accumulate in the
    process.
    """
    with safe_open(entry.path, framework="numpy") as file:
        yield file.get_slice(entry.name)


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
    """Maximum bytes of a stacked shard that the host stages at a time; None: no limit.

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
    entries: dict[str, Entry],
    dtype: np.dtype,
    staged: int | None,
) -> list[jax.Array]:
    """A shard of a parameter, on each of `devices`; None is the default device.

    The host stages at most `staged` bytes at a time, in whole layers; None: no limit.
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
            entry = entries[tensor.name]
            with open_tensor(entry) as source:
                if entry.shape != tensor.hf_shape:
                    source = weights.Exchanged(source)
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
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        blocks = (
            block
            for tensor in shard
            for block in tensor.rows(to_host(leaves[tensor.path], tensor.layer), dtype)
        )
        shapes = {tensor.name: tensor.hf_shape for tensor in shard}
        write_file(folder / file, shapes, dtype, blocks)
        weight_map |= dict.fromkeys(shapes, file)
    if is_writer and len(shards) > 1:
        total = sum(math.prod(tensor.shape) for tensor in table) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_configs(folder: pathlib.Path, config: BackboneConfig, dtype: np.dtype) -> None:
    """Writes config.json and generation_config.json, and removes weights of an earlier export."""
    folder.mkdir(parents=True, exist_ok=True)
    # transformers before 4.56 reads the latter.
    fields = {**config_json.to_hf(config), "dtype": dtype.name, "torch_dtype": dtype.name}
    generation = {name: fields[name] for name in ("eos_token_id", "pad_token_id")}
    for name, content in (("config.json", fields), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
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


def write_file(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    blocks: Iterable[np.ndarray],
) -> None:
    """Writes one safetensors file without holding it in memory.

    In a multi-process run process 0 writes. The others iterate over `blocks` too, to join the
    all-gathers.

    Args:
        path: replaced if it exists.
        shapes: of the tensors, by name.
        blocks: their values in the order of `shapes`, of `dtype` and contiguous; a block may start
            and end anywhere.

    Raises:
        ValueError: the blocks and the tensors differ in total bytes.
    """
    if jax.process_index():
        collections.deque(blocks, maxlen=0)
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        fields = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
        header[name] = fields
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    written = 0
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for block in blocks:
            written += file.write(block.reshape(-1).view(np.uint8).data)
    if written != end:
        raise ValueError(f"{path} needs {end} bytes of tensors, got {written}; check the blocks")
