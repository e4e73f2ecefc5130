"""Safetensors of a release: checks headers before data, reads slices, writes files as a stream.

A release keeps its tensors in `model.safetensors`, or in several such files with an index that maps
tensors to files. A file is eight bytes of header length, a JSON header with the dtype, shape and
byte offsets of every tensor, and the tensors' bytes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, so that safetensors needs no torch
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BLOCK_SIZE = 2**22  # elements read at a time when tensors are compared
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # by numpy's name


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor as described in its file's header; its dtype by the format's name, as "BF16"."""

    path: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_headers(folder: str | pathlib.Path) -> dict[str, Entry]:
    """Every tensor of a release by its name; reads no data.

    Raises:
        ValueError: there are no weights, a file is missing or truncated, two files hold the same
            tensor, or the index and the files disagree; the message lists all such faults.
    """
    folder = pathlib.Path(folder)
    index = None if (folder / SINGLE).exists() else _read_index(folder)
    entries: dict[str, Entry] = {}
    problems, unread = [], set()
    for file in [SINGLE] if index is None else sorted(set(index.values())):
        try:
            header = _read_header(folder / file)
        except (OSError, SafetensorError) as error:
            unread.add(file)
            problems.append(f"{file} is missing or cut short ({error})")
            continue
        problems += [
            f"{name} is in {entries[name].path.name} and in {file}"
            for name in sorted(header.keys() & entries.keys())
        ]
        entries |= header
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
        found = " ".join("; ".join(problems).split())  # names in headers may hold line breaks
        raise ValueError(f"{folder} is no complete release: {found}; fetch or export it again")
    return entries


def _read_index(folder: pathlib.Path) -> dict[str, str]:
    """File name of every tensor, by the tensor's name."""
    path = folder / INDEX
    if not path.exists():
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no folder"
        raise ValueError(
            f"{folder} must hold {SINGLE} or {INDEX}, got {found}; pass the folder of a release"
        )
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
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
                f"{path} must map tensors to files beside it, got {file!r:.100}; fetch or export "
                "the release again"
            )
    return index


def _read_header(path: pathlib.Path) -> dict[str, Entry]:
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: Entry(path, name, tuple(each.get_shape()), each.get_dtype())
            for name, each in slices.items()
        }


@contextlib.contextmanager
def open_tensor(entry: Entry) -> Iterator[Any]:
    """Opens a tensor for reading: `source[i:j, k:l]` reads only that slice.

    The file is memory-mapped only while this is open, so that its pages do not accumulate in the
    process.
    """
    with safe_open(entry.path, framework="numpy") as file:
        yield file.get_slice(entry.name)


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


def write_file(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    blocks: Iterable[np.ndarray],
) -> None:
    """Writes one safetensors file without holding it in memory.

    In a multi-process run process 0 writes. The others only take the blocks, which joins the
    all-gathers behind them.

    Args:
        path: replaced if it exists.
        shapes: of the tensors, by name.
        dtype: of all of them.
        blocks: their values in the order of `shapes`, of this dtype and contiguous; a block may
            start and end anywhere.

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


def write_index(folder: pathlib.Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Writes the index: the file of every tensor, and the bytes of all of them."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
