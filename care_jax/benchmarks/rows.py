"""Reads fields of a release's rows: gold answer, options, and image positions in the question."""

from __future__ import annotations

import ast
import re
from typing import Any, NamedTuple

_PLACEHOLDER = re.compile(r"<image (\d)>")


class Question(NamedTuple):
    """The prompt of a row, with one `<image>` per image and no options if it is open.

    `images` names the fields of the row that hold them, in the order of the `<image>` tags.
    """

    text: str
    images: tuple[str, ...]
    options: tuple[str, ...] = ()


def gold_of(row: dict[str, Any]) -> str:
    """The reference answer: `answer` in a release, `gold` in recorded cases."""
    for key in ("answer", "gold"):
        if key in row:
            return "" if row[key] is None else str(row[key])
    raise ValueError(
        f"expected a row with an answer, got the fields {', '.join(sorted(row))}; download the "
        "release again"
    )


def read_options(row: dict[str, Any]) -> tuple[str, ...]:
    """The options of a row: a list, or a Python literal of one; empty for an open question.

    ValueError: it is neither.
    """
    fields = (row.get(key) for key in ("options", "choices"))
    options = next((field for field in fields if field is not None), ())
    given = options
    if isinstance(options, str):
        try:
            options = ast.literal_eval(options) if options.strip() else []
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            options = None
    if not isinstance(options, list | tuple):
        raise ValueError(f"expected a list of options, or its Python literal, got {given!r:.60}")
    return tuple(str(option) for option in options)


def place_images(text: str) -> tuple[str, tuple[str, ...]]:
    """Replaces the first `<image 1>` by `<image>` and later ones by the words "image 1".

    Also returns the fields (image_1, ...) in the order of their `<image>` tags.
    """
    names: list[str] = []

    def reference(match: re.Match) -> str:
        name = f"image_{match.group(1)}"
        if name in names:
            return f"image {match.group(1)}"
        names.append(name)
        return "<image>"

    placed = _PLACEHOLDER.sub(reference, text)
    return placed, tuple(names)
