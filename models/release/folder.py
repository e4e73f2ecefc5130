"""Checks the files of a release before any of them is read.

A release is untrusted. Every library that reads it follows links to any file of the machine, waits
for ever at a named pipe, and parses a file of any size.
"""

from __future__ import annotations

import functools
import os
import pathlib

MAX_TEXT_BYTES = 2**26  # the largest tokenizer.json of the supported families has 2^24
# Of all files that this project, transformers or safetensors may open.
_TEXTS, _WEIGHTS = (".json", ".jinja", ".txt", ".model"), ".safetensors"
_TEMPLATES = "additional_chat_templates"


def check(folder: str | pathlib.Path) -> None:
    """Refuses a folder with a file that must not be opened; passes over what is no folder.

    Raises:
        ValueError: one of the files that are read is no regular file, is too large, or is a link
            that leads out of the folder.
    """
    folder = pathlib.Path(folder)
    for each in (folder, folder / _TEMPLATES):
        for path in sorted(each.iterdir()) if each.is_dir() else ():
            if path.suffix in (*_TEXTS, _WEIGHTS):
                _check_file(path, folder)


def _check_file(path: pathlib.Path, folder: pathlib.Path) -> None:
    if not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        what = what if path.exists() else "a broken link"
        raise ValueError(
            f"{str(path)!r} must be a regular file, got {what}; fetch the release again"
        )
    if not is_inside(path, folder):
        raise ValueError(
            f"{str(path)!r} is a link to {os.path.realpath(path)!r}, outside the release; replace "
            "it by a copy of that file"
        )
    size = path.stat().st_size
    if path.suffix in _TEXTS and size > MAX_TEXT_BYTES:
        raise ValueError(
            f"{str(path)!r} must have at most {MAX_TEXT_BYTES} bytes, got {size}; fetch the "
            "release again"
        )


def is_inside(path: str | pathlib.Path, folder: str | pathlib.Path) -> bool:
    """Whether a path, with its links followed, is in a folder.

    The files of a snapshot in huggingface_hub's cache are links to `blobs`, of the repository or of
    the whole cache.
    """
    target = pathlib.Path(os.path.realpath(path))
    return any(map(target.is_relative_to, _roots(os.path.abspath(folder))))


@functools.lru_cache(maxsize=64)
def _roots(folder: str) -> list[pathlib.Path]:
    """The folders in which the files of `folder` may be."""
    root = pathlib.Path(os.path.realpath(folder))
    roots = [root]
    for each in (root, *root.parents):
        if each.parent.name == "snapshots":
            repository = each.parent.parent
            roots += [each, repository / "blobs", repository.parent / "blobs"]
    return roots
