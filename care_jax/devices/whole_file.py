"""Files that a kill leaves whole: written under another name, then renamed."""

import os
import pathlib


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replaces a file with a text in UTF-8; a reader finds the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
