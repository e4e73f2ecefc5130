"""ChartQA: charts with human-written ("human") and generated ("augmented") questions.

Two releases are supported. HuggingFaceM4/ChartQA has parquet files with columns image, query, label
(a list) and human_or_machine (0 is human). The authors' release has a folder per split with
`train_human.json`, `train_augmented.json` ({imgname, query, label}) and `png/`. The benchmark
accepts numbers within 5%: set the source's `tolerance` to 0.05.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from care_jax.batch import Example
from care_jax.data.readers import hub
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.readers.parquet import ParquetRows, find_files
from care_jax.data.rows import Rows, images_of, make_example

SUBSETS = ("human", "augmented")


def open_rows(path: str, *, split: str = "", subset: str = "") -> Rows:
    """The questions of a split (train, val, test) and subset ("human", "augmented", "" for both).

    Args:
        path: folder of either release, or the hub id of the parquet release.

    Raises:
        ValueError: unknown split or subset, or the folder holds neither release.
    """
    hub.check_split("chartqa", split)
    if subset not in ("", *SUBSETS):
        choices = ", ".join(SUBSETS)
        raise ValueError(f"chartqa's subset must be one of {choices} or '', got {subset!r}")
    root = hub.find(path, ["data/*.parquet"])
    for folder in (root, root / split, root / "ChartQA Dataset" / split):
        if (folder / f"{split}_human.json").is_file():
            return _open_folder(folder, split, [subset] if subset else SUBSETS)
    files = find_files(root, split)
    table = ParquetRows(files, ["image", "query", "label", "human_or_machine"])
    indices: Sequence[int] = range(len(table))
    if subset:
        kinds, wanted = ParquetRows(files, ["human_or_machine"]), SUBSETS.index(subset)
        indices = [row for row in indices if kinds[row]["human_or_machine"] == wanted]

    def example(index: int) -> Example:
        row = table[indices[index]]
        return _example(f"{split}-{indices[index]}", row, row["image"], root)

    return Rows(len(indices), example)


def _open_folder(folder: pathlib.Path, split: str, kinds: Sequence[str]) -> Rows:
    tables = {kind: JsonRows(folder / f"{split}_{kind}.json") for kind in kinds}
    indices = [(kind, number) for kind in kinds for number in range(len(tables[kind]))]

    def example(index: int) -> Example:
        kind, number = indices[index]
        row = tables[kind][number]
        return _example(f"{split}-{kind}-{number}", row, row.get("imgname"), folder / "png")

    return Rows(len(indices), example)


def _example(id: str, row: Mapping[str, Any], image: Any, folder: pathlib.Path) -> Example:
    label = row.get("label")
    return make_example(
        id=id,
        source="chartqa",
        question=row.get("query"),
        answer=", ".join(map(str, label)) if isinstance(label, list) else label,
        images=images_of(image, folder),
    )
