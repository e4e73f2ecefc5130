"""Finds a release: a local path, or a hub id whose snapshot is downloaded."""

from __future__ import annotations

import errno
import pathlib
import re
from collections.abc import Sequence

import jax

from care_jax.devices import distributed
from models.release import folder as release_folder

SPLITS = ("train", "val", "test")
ALL = "all"  # asks for every split
_SPLIT_WORDS = (*SPLITS, "training", "valid", "validation", "dev", "eval", "testing", "testmini")
SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model")  # a model's files besides its weights
MODEL = (*SETTINGS, "*.safetensors")  # a repository may have the weights in other formats, too
# By kind: the config key that gives the path, and an example of a hub id.
_KEYS = {
    "dataset": ("the source's path", "HuggingFaceM4/ChartQA"),
    "model": ("model.path", "Qwen/Qwen2.5-VL-7B-Instruct"),
}


def find(
    path: str, patterns: Sequence[str] | None = None, *, kind: str = "dataset"
) -> pathlib.Path:
    """The local path of a release, downloaded if necessary (needs `huggingface_hub`).

    Process 0 downloads before the others, which find its files if they share HF_HOME: in a mounted
    bucket several hosts would overwrite each other's downloads.

    Args:
        path: a folder or a file, or a hub id such as HuggingFaceM4/ChartQA; a local model is a
            folder with config.json.
        patterns: glob patterns of the files to download; None for all.
        kind: "dataset" or "model".

    Raises:
        ValueError: the path does not exist and cannot be downloaded, or is no model, or
            `release_folder.check` refuses it.
    """
    is_shared = _may_be_id(path) and not distributed.is_alone()
    is_first = is_shared and jax.process_index() == 0
    if is_shared and not is_first:
        distributed.gather_json(path)  # a barrier: process 0 is done
    try:
        folder = _find(path, patterns, kind)
    finally:
        if is_first:
            distributed.gather_json(path)
    if kind == "model":
        release_folder.check(folder)
    return folder


def check_split(name: str, split: str) -> None:
    """Rejects a split that no release of a source has."""
    if split not in SPLITS:
        raise ValueError(f"{name}'s split must be one of {', '.join(SPLITS)}, got {split!r}")


def check_files(files: Sequence[pathlib.Path], root: pathlib.Path, split: str) -> None:
    """Refuses files of several revisions below a folder, and of several splits if none is asked."""
    parents = {parent for file in files for parent in file.parents}
    revisions = {str(each) for each in parents if each.parent.name == "snapshots"}
    splits = {_split_of(file.relative_to(root)) for file in files} - {""} if not split else set()
    for kind, found, advice in (
        ("revision", revisions, "name the folder of one"),
        ("split", splits, f"set the source's split to one of them, or to {ALL!r}"),
    ):
        if len(found) > 1:
            raise ValueError(
                f"expected files of one {kind} in {str(root)!r}, got {', '.join(sorted(found))}; "
                f"{advice}"
            )


def _split_of(path: pathlib.Path) -> str:
    """The split that the name of a file or else of one of its folders has; "" for none."""
    for name in (path.stem, *(folder.name for folder in path.parents)):
        for word in re.findall("[a-z]+", name.lower()):
            if word in _SPLIT_WORDS:
                return word
    return ""


def image_folder(images: str, release: pathlib.Path) -> pathlib.Path:
    """The folder that image paths are relative to: `images`; if empty, that of the release."""
    default = release.parent if release.is_file() else release
    return pathlib.Path(images).expanduser() if images else default


def _may_be_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def _find(path: str, patterns: Sequence[str] | None, kind: str) -> pathlib.Path:
    key, example = _KEYS[kind]
    local = pathlib.Path(path).expanduser()
    if path and local.exists():
        if kind == "model" and not (local / "config.json").is_file():
            raise ValueError(
                f"{key} {path!r} holds no config.json; set it to a folder in Hugging Face layout "
                f"or a hub id such as {example}"
            )
        return local
    if not _may_be_id(path):
        raise ValueError(
            f"expected a folder, a file or a hub id such as {example}, got {path!r}, which does "
            f"not exist; correct {key}"
        )
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            path, repo_type=kind, allow_patterns=list(patterns or ()) or None
        )
    except Exception as error:
        said = str(error).strip().splitlines()[:1]
        reason = ": ".join([type(error).__name__, *said])
        advice = f"download it first and set {key} to its folder"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
            advice = "set HF_HOME to a folder with room that may be written"
        raise ValueError(
            f"{key} {path!r} is not a local path, and could not be downloaded from the hub "
            f"({reason:.200}); {advice}"
        ) from error
    return pathlib.Path(folder)
