"""Questions with images from a file of JSON lines, or of one JSON array (`.json`).

One row per line, an object with

    question    text; `<image>`, or `<image1>`, `<image2>`, ... where images stand
    answer      text or number
    image       one path, relative to the file; or `images`, a list of them; or neither
    options     the choices of a multiple-choice question (also `choices`); may be empty or absent
    id          text or number; the line number where it is absent
    response    what the cold start imitates, tags included; may be absent
    rationale   the reasoning in it; may be absent

Where the text has no placeholder, all images go in front. Some releases (such as MATH-Vision)
compose all pictures of a question into one image and keep the numbers in the text: a row with a
single `image` and several numbered placeholders is read that way, the first of them being the
image and the others becoming "(picture 2)" and so on.
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
        ValueError: there is no such file, or it is no array to its end.
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
