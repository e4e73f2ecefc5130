"""Tells the format of a file that a reader does not read by its first bytes."""

from __future__ import annotations

import pathlib

START = 512  # bytes that tell a format
# Where a format's mark begins, the mark, the format, and what to do with such a file.
_FORMATS = (
    (0, b"\x1f\x8b", "compressed with gzip", "decompress it with gunzip"),
    (0, b"PK\x03\x04", "a zip archive", "unpack it and name a file in it"),
    (257, b"ustar", "a tar archive", "unpack it and name a file in it"),
    (0, b"PAR1", "a parquet file", "set the source to 'parquet' and name its columns"),
    (0, b"ARROW1", "an Arrow file", "write it with pyarrow.parquet.write_table"),
    (0, b"\xff\xff\xff\xff", "an Arrow stream", "write it with datasets' Dataset.to_parquet"),
    (0, b"{", "a file of JSON", "set the source to 'jsonl'"),
    (0, b"[", "a file of JSON", "set the source to 'jsonl'"),
)
# Of files of data, by precedence: beside those of Arrow are some of JSON that describe them.
_SUFFIXES = (".arrow", ".jsonl", ".tar", ".zip", ".gz", ".json")


def format_of(start: bytes) -> tuple[str, str]:
    """(format, what to do with it) of a file that begins with these bytes; "" if unknown."""
    for place, mark, kind, advice in _FORMATS:
        if start[place : place + len(mark)] == mark:
            return kind, advice
    return "", ""


def told(path: pathlib.Path) -> str:
    """`, a tar archive; unpack it` of a file, with its name of the first one of a folder."""
    if path.is_dir():
        files = [each for each in path.rglob("*") if each.suffix in _SUFFIXES]
        if not files:
            return ""
        file = min(files, key=lambda each: (_SUFFIXES.index(each.suffix), each))
        return f", but {file.relative_to(path)}{told(file)}"
    with path.open("rb") as file:
        kind, advice = format_of(file.read(START))
    return f", {kind}; {advice}" if kind else ""
