"""Prepared data: ArrayRecord shards of examples, and a manifest that lists them.

A record is the length of a JSON header, the header, and the concatenated image files; reading one
runs no code from it. Records are stored uncompressed, one per chunk, for random access. The
manifest has each shard's SHA-256, which a process compares when it first reads the shard, and a sum
of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import struct
import threading
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from care_jax.batch import Example
from care_jax.data.rows import Rows, locate
from care_jax.devices.whole_file import sha256, write_whole
from care_jax.prompts.images import encoded

MANIFEST = "manifest.json"
FORMAT = 2  # version of records and manifest; others are rejected, except 1, which has no sum
_LENGTH = struct.Struct("<I")
# One record per chunk, for random access. Uncompressed, as image files do not shrink further.
_OPTIONS = "group_size:1,uncompressed"


class ShardWriter:
    """Writes the examples of a source to numbered shards, whose names begin with the source's.

    A shard is closed once its records reach `shard_bytes`. `shards` has file, number of records,
    bytes and sha256 of each closed one.
    """

    def __init__(self, folder: pathlib.Path, source: str, *, shard_bytes: int):
        self.shards: list[dict[str, Any]] = []
        self._folder, self._source, self._shard_bytes = folder, source, shard_bytes
        self._writer = None
        self._num_bytes = self._num_records = 0

    def write(self, example: Example) -> None:
        """Appends an example."""
        if self._writer is None:
            self._path = self._folder / f"{self._source}-{len(self.shards):05d}.arrayrecord"
            self._writer = ArrayRecordWriter(str(self._path), _OPTIONS)
            self._num_bytes = self._num_records = 0
        record = to_record(example)
        self._writer.write(record)
        self._num_bytes += len(record)
        self._num_records += 1
        if self._num_bytes >= self._shard_bytes:
            self.close()

    def close(self) -> None:
        """Closes the last shard."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        entry = {"file": self._path.name, "num_records": self._num_records}
        entry |= {"num_bytes": self._path.stat().st_size, "sha256": sha256(self._path)}
        self.shards.append(entry)


def open_rows(path: str, *, subset: str = "") -> Rows:
    """The examples that `care_jax.commands.prepare` wrote; `subset` selects one source.

    Raises:
        ValueError: the folder is incomplete (the message names the file), or has no such subset.
    """
    folder = pathlib.Path(path).expanduser()
    manifest = read_manifest(folder)
    sources = manifest["sources"]
    if subset and subset not in sources:
        raise ValueError(f"subset must be one of {', '.join(sources)} in {path!r}, got {subset!r}")
    names = [subset] if subset else sources
    shards = [_Shard(folder, entry) for name in names for entry in sources[name]["shards"]]
    ends = list(itertools.accumulate(shard.num_records for shard in shards))
    if not ends:
        raise ValueError(f"{path!r} has no example of {subset or 'any source'}; prepare it again")

    def example(index: int) -> Example:
        number, record = locate(ends, index)
        return shards[number].read(record)

    return Rows(ends[-1], example)


class _Shard:
    """One shard. Its size is checked at once; it is opened, and its sum compared, on first use."""

    def __init__(self, folder: pathlib.Path, entry: dict[str, Any]):
        path = folder / entry["file"]
        num_bytes = path.stat().st_size if path.is_file() else -1
        if num_bytes != entry["num_bytes"]:
            found = "no file" if num_bytes < 0 else num_bytes
            raise ValueError(
                f"expected shard {path} of {entry['num_bytes']} bytes, got {found}; copy it "
                "again, or prepare the folder again"
            )
        self._path, self.num_records, self._sha256 = path, entry["num_records"], entry["sha256"]
        self._reader = None
        self._lock = threading.Lock()

    def read(self, index: int) -> Example:
        try:
            with self._lock:
                if self._reader is None:
                    if sha256(self._path) != self._sha256:
                        raise RuntimeError(f"its SHA-256 differs from the one in {MANIFEST}")
                    self._reader = ArrayRecordReader(str(self._path))
                if self._reader.num_records() != self.num_records:
                    raise RuntimeError(f"it has {self._reader.num_records()} records")
                (record,) = self._reader.read([index])
            return from_record(record)
        except (RuntimeError, ValueError, KeyError, TypeError, struct.error) as error:
            raise ValueError(
                f"shard {self._path} is corrupt at record {index} of {self.num_records} "
                f"({str(error).splitlines()[0][:120]}); copy it again, or prepare the folder again"
            ) from error


def to_record(example: Example) -> bytes:
    """Serialises an example."""
    files = [encoded(image) for image in example.images]
    header = dataclasses.asdict(dataclasses.replace(example, images=()))
    header["images"] = [len(file) for file in files]
    for name in ("context", "extra"):  # added later: older records lack them
        if not header[name]:
            del header[name]
    text = json.dumps(header, ensure_ascii=False, sort_keys=True).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *files])


def from_record(record: bytes) -> Example:
    """Inverse of `to_record`."""
    (length,) = _LENGTH.unpack_from(record)
    start = _LENGTH.size + length
    header = json.loads(record[_LENGTH.size : start])
    ends = list(itertools.accumulate(header["images"], initial=start))
    if ends[-1] != len(record):
        raise ValueError(f"expected a record of {ends[-1]} bytes, got {len(record)}")
    images = tuple(record[a:b] for a, b in itertools.pairwise(ends))
    return Example(**header | {"images": images, "choices": tuple(header["choices"])})


def write_manifest(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest, without which `read_manifest` rejects the folder."""
    whole = {"format": FORMAT} | manifest
    text = json.dumps(whole | {"sha256": _sum_of(whole)}, indent=2, ensure_ascii=False)
    write_whole(folder / MANIFEST, text + "\n")


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a prepared folder; rejects one that is unreadable or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"expected a prepared folder with {MANIFEST}, got {str(folder)!r}; make one with: "
            "python -m care_jax.commands.prepare"
        )
    try:
        manifest = json.loads(path.read_text("utf-8"))
        number = manifest["format"]
        if number == FORMAT and manifest.pop("sha256") != _sum_of(manifest):
            raise ValueError("its own SHA-256 differs")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} must be a whole manifest in JSON, got {error!r}; copy it again, or prepare "
            "the folder again"
        ) from error
    if number not in (1, FORMAT):
        raise ValueError(f"{path} has format {number}, expected {FORMAT}; prepare the folder again")
    return manifest


def _sum_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
