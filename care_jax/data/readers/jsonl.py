"""Questions with images from a file of JSON lines, or of one JSON array (`.json`).

One row per line, an object with

    question    text, with placeholders `<image>`, or `<image1>`, `<image2>`, ... for the images; or
                the messages of a chat (also `messages` or `prompt`), of which the last of the user
                is asked
    answer      text or number; for a reward function (`verifier.reward`) also a list or an object
    image       one path, relative to the folder of images, by default that of the file; or
                `images`, a list of paths; or neither
    options     the choices of a multiple-choice question (also `choices`): a list, also as text,
                lines "A. ..." or an object {"A": ...}; may be empty or absent
    id          text or number; the line number if absent
    response    the target of the cold start, tags included; may be absent outside the cold start
    context     a beginning of the response that is not trained on, such as a wrong rationale and
                the cue (`care_jax.commands.repairs` writes such rows); may be absent
    rationale   the reasoning in the response; may be absent
    units       "matter" if an answer without its unit is wrong; may be absent

All other fields are `Example.extra`, which a reward function can read. A row without images is
unusable if one of them seems to have an image, by its name (image..., img..., picture...,
file_name) or as the name of a file. `columns` names fields that are called otherwise.

If the text has no placeholder, all images are put in front. Some releases (such as MATH-Vision)
merge all pictures of a question into one image but keep numbered placeholders in the text. In a row
with one image and several numbered placeholders, the first placeholder is therefore the image and
the others become "(picture 2)" and so on.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from care_jax.batch import Example
from care_jax.data.readers import hub
from care_jax.data.readers.fields import FIELDS, example_of, names_of
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.rows import Rows


def open_rows(
    path: str,
    *,
    columns: Mapping[str, str] | None = None,
    images: str = "",
    images_outside: bool = False,
) -> Rows:
    """The rows of a file; its images are found as in `hub.image_folder` and `rows.images_of`.

    `columns` names fields that are called otherwise, see `fields.names_of`.

    Raises:
        ValueError: the file does not exist, or a `.json` file is not one complete array.
    """
    table = JsonRows(path)
    read = functools.partial(
        example_of,
        names=names_of(columns),
        source=table.path.stem,
        folder=hub.image_folder(images, table.path),
        images_outside=images_outside,
        has_image_names=bool(columns and columns.get("images")),
    )

    return Rows(len(table), lambda index: read(table[index], position=table.numbers[index]))


def in_memory(rows: Iterable[Mapping[str, Any]], name: str) -> Rows:
    """Rows given from Python, with the fields of a file's; ValueError if they are not mappings.

    Rows with a length and an index are read on access, others at once. Values may be numpy's. An
    image may also be a PIL image or the bytes of a file. Paths are relative to the current folder
    and may lead out of it, as the caller is trusted.
    """
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise ValueError(
            f"expected {name} as an iterable of rows, got {rows!r:.80}; pass a list of dicts"
        )
    has_index = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    table: Any = rows if has_index and not isinstance(rows, Mapping) else list(rows)

    def example(index: int) -> Example:
        try:
            row = table[index]
        except KeyError as error:
            raise ValueError(
                f"expected row {index} of {name}, and this {type(table).__name__} has no such key; "
                'pass a list of dicts, of a pandas.DataFrame df.to_dict("records")'
            ) from error
        if not isinstance(row, Mapping):
            raise ValueError(
                f"expected a mapping with question and answer as row {index} of {name}, got a "
                f"{type(row).__name__}; pass dicts or other mappings"
            )
        row = {field: _as_python(value) for field, value in row.items()}
        return example_of(
            row,
            FIELDS,
            position=index + 1,
            source=name,
            folder=pathlib.Path(),
            images_outside=True,
            has_image_names=False,
        )

    return Rows(len(table), example)


def _as_python(value: Any) -> Any:
    """A value without numpy's types; NaN, which pandas writes for a missing value, is None."""
    if isinstance(value, np.ndarray | list | tuple):
        return [_as_python(each) for each in value]
    if isinstance(value, dict):
        return {name: _as_python(each) for name, each in value.items()}
    if isinstance(value, np.floating):
        value = float(str(value))  # of float32 the digits that identify it
    elif isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value
