"""ViRL39K (TIGER-Lab/ViRL39K): 38,870 questions (tab:dataset-stats) with one or several images.

Parquet, or the same rows as JSON lines: question (with `<image>`, which is missing in some rows),
answer (in `\\boxed{}`), category, source, qid, image (a list of paths under `images/`, either a
folder or the contents of `images.zip`).
"""

from __future__ import annotations

import pathlib
import zipfile
from typing import Any

from care_jax.batch import Example
from care_jax.data.readers import hub
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.readers.parquet import ParquetRows, find_files
from care_jax.data.rows import AnyFolder, Rows, images_of, make_example
from care_jax.rewards.equivalence import boxes

_BOX = "\\boxed{"


def open_rows(path: str, *, images: str = "", images_outside: bool = False) -> Rows:
    """The questions of a release's folder, parquet or JSONL file, or hub id.

    Args:
        images: folder or archive that image paths are relative to; empty for the release's folder.
        images_outside: see `rows.images_of`.

    Raises:
        ValueError: the path has no rows, or the archive is broken.
    """
    release = hub.find(path, ["*.parquet", "images.zip"])
    is_folder = release.is_dir()
    file = next(iter(sorted(release.glob("*.jsonl"))), release) if is_folder else release
    if file.suffix in (".jsonl", ".json"):
        table = JsonRows(file)
    else:
        table = ParquetRows(find_files(file, hub.ALL), ("question", "answer", "qid", "image"))
    folder = _image_folder(hub.image_folder(images, release))

    def example(index: int) -> Example:
        row = table[index]
        return make_example(
            id=row.get("qid"),
            position=index,
            source="virl39k",
            question=row.get("question"),
            answer=_unboxed(row.get("answer")),
            images=images_of(row.get("image"), folder, images_outside),
            needs_placeholder=True,
        )

    return Rows(len(table), example)


def _image_folder(folder: pathlib.Path) -> AnyFolder:
    """The root of the image paths: a folder, or `images.zip` as the release ships it."""
    archive = folder / "images.zip" if folder.is_dir() else folder
    if (folder / "images").is_dir() or not archive.is_file():
        return folder
    try:
        return zipfile.Path(archive)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{archive} is not a complete archive ({error}); download it again"
        ) from error


def _unboxed(answer: Any) -> Any:
    """The content of the box if there is exactly one; any other answer unchanged."""
    if not isinstance(answer, str) or answer.count(_BOX) != 1:
        return answer
    start = answer.index(_BOX) + len(_BOX)
    end = boxes.closing(answer, start)
    return answer if end < 0 else answer[start:end]
