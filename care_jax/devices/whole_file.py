"""Atomic writes, to a temporary file that is renamed; damaged lines kept aside; SHA-256 sums."""

import hashlib
import os
import pathlib
from collections.abc import Iterable


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replaces a file with UTF-8 text; a reader finds the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def set_aside(path: pathlib.Path, lines: Iterable[bytes]) -> None:
    """Appends damaged lines of a file, without their newlines, to `<name>.damaged`."""
    if text := b"".join(line + b"\n" for line in lines):
        with path.with_name(f"{path.name}.damaged").open("ab") as file:
            file.write(text)


def sha256(path: pathlib.Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
