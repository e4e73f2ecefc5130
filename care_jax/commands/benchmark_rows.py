"""Reads the questions and images of a benchmark, which `prepare` keeps out of the training data.

These rows are only compared, so the checks of rows to train on do not apply: a question may have
any placeholders, and neither an answer nor options are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from care_jax.batch import Example, Unusable
from care_jax.data.readers import hub
from care_jax.data.readers.fields import first_of, names_of, value_at
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.readers.parquet import find_files, open_columns
from care_jax.data.rows import Rows, images_of
from care_jax.data.sources import named, open_section
from care_jax.data.texts import asked, shown


def open_questions(
    key: str, section: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sequence[Example]:
    """The questions of a section of `data.prepare.benchmarks`, its images in order.

    Sources other than `jsonl` and `parquet` are read as for training; of these two the fields of
    question and images are found as for training.

    Raises:
        ValueError: as `sources.open_section`.
    """
    checked = open_section(key, section, settings)
    path, columns = section["path"], section["columns"]
    with named(key):
        if section["source"] == "parquet":
            release = hub.find(path, ["*.parquet", "**/*.parquet", "images/**"])
            names = names_of(columns, {"images": ()})
            fields = [*names["question"], *names["images"]]
            table = open_columns(find_files(release, section["split"]), fields)
        elif section["source"] == "jsonl":
            table = JsonRows(path)
            release, names = table.path, names_of(columns)
        else:
            return checked
    folder = hub.image_folder(section["images"], release)

    def example(index: int) -> Example:
        row = table[index]
        text = asked(first_of(row, names["question"])[1])
        cells = [value_at(row, name) for name in names["images"]]
        pictures = images_of(cells, folder, section["images_outside"])
        text = "" if text is None else text
        if not isinstance(text, str):
            raise Unusable("a question that is not text", shown(text))
        if not text.strip() and not pictures:
            raise Unusable("neither a question nor an image")
        return Example(str(index), str(path), tuple(pictures), text, "")

    return Rows(len(checked), example)
