"""SHA-256 sums of a folder's files: written when the folder is complete, compared when it is read.

The manifest `sha256.json` has the size and sum of every file, and a sum over all of these entries.
Files are hashed in threads, since hashlib releases the GIL.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from care_jax.devices import distributed
from care_jax.devices.whole_file import sha256, write_whole

MANIFEST = "sha256.json"
_NUM_LAST_BYTES = 2**16
_NUM_THREADS = min(8, os.cpu_count() or 1)


def write_manifest(folder: pathlib.Path, *, leave_out: Sequence[str] = (), of: str = "") -> None:
    """Writes the manifest of a folder atomically; no file in it may be written meanwhile.

    `leave_out` names files that may change later; `of` identifies the folder, such as
    "checkpoint 40", so that a copy of another step under its name is found.
    """
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = sorted(files - {MANIFEST, *leave_out})
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        entries = dict(zip(names, pool.map(lambda name: _entry(folder / name), names), strict=True))
    _write(folder, entries, of)


def update_manifest(folder: pathlib.Path, name: str) -> None:
    """Updates the entry of one file that was written after the others."""
    entries, of = _read(folder)
    if entries is not None:
        _write(folder, entries | {name: _entry(folder / name)}, of)


def has_manifest(folder: pathlib.Path) -> bool:
    """Whether a manifest was written in the folder."""
    return (folder / MANIFEST).is_file()


def find_damage(
    folder: pathlib.Path,
    *,
    of: str = "",
    most_bytes: int | None = None,
    part: int = 0,
    num_parts: int = 1,
) -> str:
    """Describes the first files that do not match the manifest; "" if all match.

    Args:
        folder: without a manifest, nothing is compared.
        of: what the folder must be, see `write_manifest`.
        most_bytes: files above this size are compared by size alone; None: all are hashed.
        part, num_parts: every num_parts-th file is compared, from this one on.
    """
    try:
        entries, found_of = _read(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is unreadable ({str(error).splitlines()[0][:80]})"
    if entries is None:
        return ""
    if found_of and found_of != of:
        return f"its files are those of {found_of}"

    def damage(name: str) -> str:
        size, path = entries[name]["bytes"], folder / name
        try:
            if (found := path.stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}"
            is_hashed = most_bytes is None or size <= most_bytes
            if is_hashed and sha256(path) != entries[name]["sha256"]:
                return f"{name} has another SHA-256 than when it was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return ""

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        faults = [*filter(None, pool.map(damage, sorted(entries)[part::num_parts]))]
    more = f" and {len(faults) - 2} more files" if len(faults) > 2 else ""
    return ", ".join(faults[:2]) + more


def shared_damage(folder: pathlib.Path, of: str = "") -> str:
    """`find_damage` with the files divided among all processes; all return the same."""
    share = {"part": jax.process_index(), "num_parts": jax.process_count()}
    return next(filter(None, distributed.gather_json(find_damage(folder, of=of, **share))), "")


def refuse_other_copies(release: pathlib.Path) -> None:
    """Raises a ValueError if processes have other files of a release; each reads its own copy.

    Of weights the sizes and last bytes are compared, which differ between two trainings.
    """
    weights = {path.name: _ending(path) for path in sorted(release.glob("*.safetensors"))}
    texts = [release / name for name in (MANIFEST, "config.json", "tokenizer.json")]
    sums = {path.name: sha256(path) for path in texts if path.is_file()}
    first, *others = distributed.gather_json([weights, sums])
    differing = [number for number, files in enumerate(others, start=1) if files != first]
    if differing:
        raise ValueError(
            f"expected the same files of model.path {release} on all processes, got others on "
            f"{', '.join(map(str, differing))} than on 0; give all hosts the same files"
        )


def refuse_damaged(release: pathlib.Path, fault: str) -> None:
    """Raises a ValueError if `find_damage` has found a fault in a release."""
    if fault:
        raise ValueError(
            f"model.path {release} is damaged: {fault}; export or copy it again, or remove "
            f"{MANIFEST} if its files were changed on purpose"
        )


def _ending(path: pathlib.Path) -> list[int]:
    """Size of a file, and the checksum of its last bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - _NUM_LAST_BYTES, 0))
        return [size, zlib.crc32(file.read())]


def _entry(path: pathlib.Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _sum_of(entries: dict[str, Any], of: str) -> str:
    # Manifests written without `of` sum the entries alone.
    text = json.dumps([entries, of] if of else entries, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write(folder: pathlib.Path, entries: dict[str, Any], of: str) -> None:
    manifest = {"files": entries, **({"of": of} if of else {}), "sha256": _sum_of(entries, of)}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def _read(folder: pathlib.Path) -> tuple[dict[str, Any] | None, str]:
    """The entries by file name, None without a manifest, and what the folder is.

    Raises:
        ValueError: the manifest itself is damaged.
    """
    if not has_manifest(folder):
        return None, ""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    entries, of = manifest["files"], manifest.get("of", "")
    if manifest["sha256"] != _sum_of(entries, of):
        raise ValueError("its own sum differs")
    return entries, of
