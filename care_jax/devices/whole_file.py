"""Atomic writes: to a temporary file, which is then renamed."""

import os
import pathlib


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replaces a file with UTF-8 text; a reader finds the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
