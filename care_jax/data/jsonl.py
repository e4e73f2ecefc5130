"""Questions with images from a file of JSON lines.

One row per line, an object with

    question    text; `<image>`, or `<image1>`, `<image2>`, ... where images stand
    answer      text or number
    image       one path, relative to the file; or `images`, a list of them; or neither
    options     the choices of a multiple-choice question (also `choices`); may be empty or absent
    id          text or number; the line number where it is absent
    response    what the cold start imitates, tags included; may be absent
    rationale   the reasoning in it; may be absent

Choices become lines "(A) ..." below the question. Numbered placeholders name the images by their
place in the list. Where the text has no placeholder, all images go in front. Some releases (such
as MATH-Vision) compose all pictures of a question into one image and keep the numbers in the text:
a row with a single `image` and several numbered placeholders is read that way, the first of them
being the image and the others becoming "(picture 2)" and so on.

Rows that cannot be used are left out, counted by reason, and reported in one line per reason.
"""

from __future__ import annotations

import json
import pathlib
import re
import string
from collections import Counter
from typing import Any

from absl import logging
from PIL import Image

from care_jax.batch import Example
from care_jax.patches import MAX_ASPECT_RATIO

_PLACEHOLDER = re.compile(r"<image(\d*)>")
_SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Unusable(Exception):
    """Why a row is left out; the message is the reason it is counted under."""


def load(path: str | pathlib.Path) -> tuple[list[Example], Counter[str]]:
    """Reads a file.

    Args:
        path: the file of JSON lines.

    Returns:
        The usable rows in order, and how many rows were left out for each reason.

    Raises:
        ValueError: there is no such file, or no row in it can be used.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"expected a file of JSON lines, got {str(path)!r}; check data's path")
    examples, skipped, first_line = [], Counter(), {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                examples.append(_example(line, number, path))
            except _Unusable as reason:
                skipped[str(reason)] += 1
                first_line.setdefault(str(reason), number)
    for reason, count in skipped.most_common():
        logging.warning(
            "%s: left out %d rows: %s (first on line %d)", path, count, reason, first_line[reason]
        )
    if not examples:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in skipped.most_common())
        raise ValueError(f"no row of {str(path)!r} can be used: {reasons or 'the file is empty'}")
    return examples, skipped


def _example(line: bytes, number: int, path: pathlib.Path) -> Example:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Unusable("not JSON") from error
    if not isinstance(row, dict):
        raise _Unusable("not an object")
    question = _text(row, "question")
    if not question:
        raise _Unusable("no question")
    answer = _text(row, "answer", is_number_allowed=True)
    if not answer:
        raise _Unusable("no answer")
    choices = _choices(row)
    rationale, response = _text(row, "rationale"), _text(row, "response")
    lines = [
        f"({letter}) {choice}"
        for letter, choice in zip(string.ascii_uppercase, choices, strict=False)
    ]
    question, images = _placed("\n".join([question, *lines]), _paths(row, path.parent))
    for text in (question, answer, rationale, response):
        if _SPECIAL_TOKEN.search(text):
            raise _Unusable("a special token in the text")
        if _SURROGATE.search(text):
            raise _Unusable("half a character in the text")
    for image in images:
        _check_image(image)
    return Example(
        id=_text(row, "id", is_number_allowed=True) or str(number),
        source=path.stem,
        images=images,
        question=question,
        answer=answer,
        choices=choices,
        rationale=rationale,
        response=response,
    )


def _text(row: dict[str, Any], key: str, *, is_number_allowed: bool = False) -> str:
    """The field without surrounding space; empty where it is absent."""
    value = row.get(key)
    if value is None:
        return ""
    if is_number_allowed and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise _Unusable(f"{key} of a wrong type")
    return value.strip()


def _choices(row: dict[str, Any]) -> tuple[str, ...]:
    value = row.get("options") or row.get("choices") or []
    if not isinstance(value, list) or not all(
        isinstance(choice, str | int | float) for choice in value
    ):
        raise _Unusable("choices of a wrong type")
    if len(value) > len(string.ascii_uppercase):
        raise _Unusable("more than 26 choices")
    return tuple(str(choice).strip() for choice in value)


def _paths(row: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    single, several = row.get("image"), row.get("images")
    if single is not None and several is not None:
        raise _Unusable("both image and images")
    names = [single] if single is not None else several if several is not None else []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise _Unusable("image of a wrong type")
    return [folder / name for name in names]


def _placed(question: str, images: list[pathlib.Path]) -> tuple[str, tuple[pathlib.Path, ...]]:
    """The question with one `<image>` per image, and the images in that order."""
    numbers = _PLACEHOLDER.findall(question)
    if not numbers:
        return "<image>" * len(images) + question, tuple(images)
    if not any(numbers):
        if len(numbers) != len(images):
            raise _Unusable("images and placeholders differ in number")
        return question, tuple(images)
    if len(images) == 1 and all(numbers):
        head, *rest = _PLACEHOLDER.split(question)[::2]
        pictures = [f"(picture {number})" for number in numbers[1:]]
        tail = "".join(a + b for a, b in zip(rest, [*pictures, ""], strict=True))
        return f"{head}<image>{tail}", tuple(images)
    wanted = [int(number) for number in numbers if number]
    if len(wanted) != len(numbers) or sorted(wanted) != list(range(1, len(images) + 1)):
        raise _Unusable("images and placeholders differ in number")
    return _PLACEHOLDER.sub("<image>", question), tuple(images[k - 1] for k in wanted)


def _check_image(path: pathlib.Path) -> None:
    """Decodes the image whole, at the smallest scale its format offers: headers can lie."""
    try:
        if not path.is_file():
            raise _Unusable("image missing")
        with Image.open(path) as image:
            width, height = image.size
            image.draft("RGB", (1, 1))
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _Unusable("image unreadable or truncated") from error
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise _Unusable("image too narrow")
