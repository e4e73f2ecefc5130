"""Files of JSON lines with a step each, such as metrics.jsonl: read, and shortened on a resume."""

from __future__ import annotations

import json
import operator
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from care_jax.devices.whole_file import set_aside, write_whole
from care_jax.report.console import print_line

DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)  # what `record_of` raises


def read_records(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a JSONL file, each with its object, which has a step; none without a file.

    Damaged lines are skipped. A last line without newline is ignored.
    """
    return ((line.decode(), record) for line, record, fault in _parsed(path) if not fault)


def record_of(line: bytes) -> dict[str, Any]:
    """The object of a line of a JSONL file; raises one of `DAMAGED` if it is none with a step."""
    record = json.loads(line.decode())
    _ = str.encode(record.get("stage", "")), operator.index(record["step"])
    return record


def keep_records(path: pathlib.Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Atomically rewrites a file with the kept records only; reports and sets aside damaged lines.

    They are appended to `<name>.damaged`.
    """
    if not path.exists():
        return
    kept, damaged = [], []
    for number, (line, record, fault) in enumerate(_parsed(path), 1):
        if fault:
            print_line(f"{path}:{number} is damaged ({fault}); moved to {path.name}.damaged")
            damaged.append(line)
        elif is_kept(record):
            kept.append(f"{line.decode()}\n")
    set_aside(path, damaged)
    write_whole(path, "".join(kept))


def _parsed(path: pathlib.Path) -> Iterator[tuple[bytes, dict[str, Any], str]]:
    """Every complete line, its object, and what is wrong with it, if anything."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            try:
                record, fault = record_of(line), ""
            except DAMAGED as error:
                record, fault = {}, f"{type(error).__name__}: {error}"
            yield line.removesuffix(b"\n"), record, fault
