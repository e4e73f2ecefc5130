"""Questions with images from a file of JSON lines, or of one JSON array (`.json`).

One row per line, an object with

    question    text, with placeholders `<image>`, or `<image1>`, `<image2>`, ... for the images
    answer      text or number
    image       one path, relative to the file; or `images`, a list of paths; or neither
    options     the choices of a multiple-choice question (also `choices`); may be empty or absent
    id          text or number; the line number if absent
    response    the target of the cold start, tags included; may be absent
    rationale   the reasoning in the response; may be absent

If the text has no placeholder, all images are put in front. Some releases (such as MATH-Vision)
merge all pictures of a question into one image but keep numbered placeholders in the text. In a row
with one image and several numbered placeholders, the first placeholder is therefore the image and
the others become "(picture 2)" and so on.
"""

from __future__ import annotations

import pathlib
from typing import Any

from care_jax.batch import Example, Unusable
from care_jax.data.json_rows import JsonRows
from care_jax.data.rows import Rows, make_example


def open_rows(path: str) -> Rows:
    """The rows of a file.

    Raises:
        ValueError: the file does not exist, or a `.json` file is not one complete array.
    """
    table = JsonRows(path)
    return Rows(len(table), lambda index: _example(table[index], table.numbers[index], table.path))


def _example(row: dict[str, Any], number: int, path: pathlib.Path) -> Example:
    id = row.get("id")
    return make_example(
        id=number if id is None or id == "" else id,
        source=path.stem,
        question=row.get("question"),
        answer=row.get("answer"),
        images=[path.parent / name for name in _names(row)],
        choices=row.get("options") or row.get("choices"),
        rationale=row.get("rationale"),
        response=row.get("response"),
        needs_image=False,
    )


def _names(row: dict[str, Any]) -> list[str]:
    single, several = row.get("image"), row.get("images")
    if single is not None and several is not None:
        raise Unusable("both image and images")
    names = [single] if single is not None else several if several is not None else []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise Unusable("image of a wrong type")
    return names
