"""ChartQA: charts with human-written ("human") and generated ("augmented") questions.

Two releases are supported. HuggingFaceM4/ChartQA has parquet files with columns image, query, label
(a list) and human_or_machine (0 is human). The authors' release has a folder per split with
`train_human.json`, `train_augmented.json` ({imgname, query, label}) and `png/`. The benchmark
accepts numbers within 5%: set the source's `tolerance` to 0.05.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from care_jax.batch import Example
from care_jax.data.readers import hub
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.readers.parquet import ParquetRows, find_files, images_of
from care_jax.data.rows import Rows, image_path, make_example

SPLITS = ("train", "val", "test")
SUBSETS = ("human", "augmented")
NAME = "chartqa"


def open_rows(path: str, *, split: str, subset: str) -> Rows:
    """The questions of a split.

    Args:
        path: folder of either release, or the hub id of the parquet release.
        split: train, val or test.
        subset: "human", "augmented", or "" for both.

    Raises:
        ValueError: unknown split or subset, or the folder holds neither release.
    """
    if split not in SPLITS:
        raise ValueError(f"chartqa's split must be one of {', '.join(SPLITS)}, got {split!r}")
    if subset not in ("", *SUBSETS):
        raise ValueError(f"chartqa's subset must be {' or '.join(SUBSETS)}, or '', got {subset!r}")
    place = hub.find(path, ["data/*.parquet"])
    for folder in (place, place / split, place / "ChartQA Dataset" / split):
        if (folder / f"{split}_human.json").is_file():
            return _open_folder(folder, split, [subset] if subset else list(SUBSETS))
    return _open_parquet(find_files(place, split), place, split, subset)


def _open_folder(folder: pathlib.Path, split: str, subsets: list[str]) -> Rows:
    tables = {subset: JsonRows(folder / f"{split}_{subset}.json") for subset in subsets}
    places = [(subset, index) for subset in subsets for index in range(len(tables[subset]))]

    def example(index: int) -> Example:
        subset, number = places[index]
        row = tables[subset][number]
        name = row.get("imgname")
        images = [image_path(folder / "png", name)] if isinstance(name, str) and name else []
        return _example(f"{split}-{subset}-{number}", row, images)

    return Rows(len(places), example)


def _open_parquet(files: list[pathlib.Path], place: pathlib.Path, split: str, subset: str) -> Rows:
    table = ParquetRows(files, ["image", "query", "label", "human_or_machine"])
    to_place: Callable[[int], int] = int
    num_rows = len(table)
    if subset:
        kinds = ParquetRows(files, ["human_or_machine"])
        wanted = SUBSETS.index(subset)
        found = [row for row in range(len(kinds)) if kinds[row]["human_or_machine"] == wanted]
        to_place, num_rows = found.__getitem__, len(found)

    def example(index: int) -> Example:
        place_in_split = to_place(index)
        row = table[place_in_split]
        return _example(f"{split}-{place_in_split}", row, images_of(row["image"], place))

    return Rows(num_rows, example)


def _example(id: str, row: dict[str, Any], images: list) -> Example:
    label = row.get("label")
    answer = ", ".join(map(str, label)) if isinstance(label, list) else label
    return make_example(id=id, source=NAME, question=row.get("query"), answer=answer, images=images)
