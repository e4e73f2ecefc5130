"""Finds a release: a local path, or a hub id whose snapshot is downloaded."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence


def find(path: str, patterns: Sequence[str], *, kind: str = "dataset") -> pathlib.Path:
    """The local path of a release, downloaded if necessary.

    Args:
        path: a folder or a file, or a hub id such as HuggingFaceM4/ChartQA.
        patterns: glob patterns of the files to download.
        kind: "dataset" or "model".

    Raises:
        ValueError: the path does not exist and cannot be downloaded.
    """
    place = pathlib.Path(path).expanduser()
    if path and place.exists():
        return place
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ValueError(
            f"expected a folder, a file or a hub id like HuggingFaceM4/ChartQA, got {path!r}, "
            "which does not exist; set the source's path"
        )
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            path, repo_type=kind, allow_patterns=list(patterns)
        )
    except Exception as error:
        raise ValueError(
            f"{path!r} is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}); download it first and set the path to its folder"
        ) from error
    return pathlib.Path(folder)
