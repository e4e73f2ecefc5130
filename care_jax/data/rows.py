"""Builds examples from rows of a release, on access, with the checks that all sources share.

A source extracts the parts of a row. `make_example` matches placeholders to images and raises
`Unusable` for rows that cannot be used, which are counted by its message.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
import pathlib
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging
from PIL import Image

from care_jax.batch import Example, Unusable, answer_text
from care_jax.data.choices import check_answer, choices_of
from care_jax.data.texts import LONE_SURROGATE, SURROGATE, answer_of, asked, shown, text_of
from care_jax.prompts.images import AnyImage, open_image
from care_jax.rewards import answers
from care_jax.rewards.equivalence import notation, options
from care_jax.rewards.verifier import parse_text
from models.release import folder as release_folder

MAX_CHARS = 16_384  # of a question with its choices, and of an answer
MAX_RESPONSE_CHARS = 65_536
MAX_ID_CHARS = 1_024
MAX_IMAGES = 64  # of a row, which are decoded together
PUT_IN_FRONT = "placeholder put in front"
NOT_TEXT = "answer is a list or an object, which needs verifier.reward"
NO_TEXT_LEFT = "answer has no text inside its LaTeX or Markdown marks"
NO_RESPONSE = "no response to imitate"
NO_ANSWER_TAGS = "response without the <answer> tags that data.instruction asks for"
NO_THINK_TAGS = "response not of the rationale's span and the answer's alone"
OTHER_TAG = "response in another tag than data.think_tag; change it, or prepare the data with it"
OTHER_ANSWER = "response with another answer than the row's `answer`"
CONTEXT_ALONE = "context without a response; a passage to read belongs in the question"
OUTSIDE = "image path outside the images folder, which needs images_outside"
AnyFolder = pathlib.Path | zipfile.Path
_PLACEHOLDER = re.compile(r"<image[ _-]?(\d*)/?>", re.IGNORECASE)
_LIKE_A_PLACEHOLDER = re.compile(r"</?ima?g[^<>]*>", re.IGNORECASE)
SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
_BASE64 = ("iVBOR", "/9j/", "R0lG", "UklG")  # PNG, JPEG, GIF, WebP
_MAX_PATH = 4_096  # characters
_MAX_DIGITS = 4  # of a placeholder's number
_MAX_TRIES = 64  # a source is rejected if this many first rows are unusable


@dataclasses.dataclass(frozen=True)
class Rows(Sequence[Example]):
    """Rows that are read, and may raise `Unusable`, on access."""

    num_rows: int
    read: Callable[[int], Example]  # of an index in [0, num_rows); may raise `Unusable`

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"index {index} is outside 0..{self.num_rows - 1}")
        return self.read(index)


def locate(ends: Sequence[int], index: int) -> tuple[int, int]:
    """(part, index in it) of an index into concatenated parts that end at `ends`."""
    part = bisect.bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)


def with_text_answers(source: Sequence[Example]) -> Rows:
    """The source; examples whose answer is not text are `Unusable`.

    The built-in verifier compares text; other answers need a reward function.
    """

    def check(example: Example) -> None:
        if not isinstance(example.answer, str):
            raise Unusable(NOT_TEXT)
        if not notation.clean(example.answer):
            raise Unusable(NO_TEXT_LEFT)

    return _checked_by(source, check)


def with_responses(
    source: Sequence[Example],
    *,
    instruction: str = "",
    think_tag: str = "think",
    are_right: bool = False,
) -> Rows:
    """The source; examples are `Unusable` whose response is absent or not to be imitated.

    Args:
        instruction: `data.instruction`; responses must have the spans whose tags are in it.
        think_tag: name of the rationale's tag; a response must not begin with another one.
        are_right: the answer of a response must not differ from the gold one by text rules.
    """
    asked_for = instruction.replace("{tag}", think_tag)
    needs_think, needs_answer = (f"<{tag}>" in asked_for for tag in (think_tag, "answer"))

    def check(example: Example) -> None:
        if not example.response:
            raise Unusable(NO_RESPONSE)
        text = example.context + example.response
        tag = re.match(r"\s*<(\w+)>", text)
        if tag and tag.group(1) != think_tag:
            raise Unusable(OTHER_TAG, f"<{tag.group(1)}>, expected <{think_tag}>")
        found = parse_text(text, think_tag=think_tag)
        if needs_answer and not found.has_answer:
            raise Unusable(NO_ANSWER_TAGS)
        if needs_answer and needs_think and not found.fmt:
            raise Unusable(NO_THINK_TAGS, shown(text))
        if are_right and found.has_answer and isinstance(example.answer, str):
            outcome = answers.compare_example(found.answer, example)
            if isinstance(outcome, str) and outcome.startswith("different"):
                raise Unusable(OTHER_ANSWER, f"{shown(found.answer)} and {shown(example.answer)}")

    return _checked_by(source, check)


def _checked_by(source: Sequence[Example], check: Callable[[Example], None]) -> Rows:
    def read(index: int) -> Example:
        example = source[index]
        check(example)
        return example

    return Rows(len(source), read)


def checked(source: Sequence[Example], name: str) -> tuple[list[Example], Counter[str]]:
    """The usable examples of the source `name`, and the number of rows left out by reason.

    Logs a warning per reason. ValueError: no row can be used.
    """
    left_out = LeftOut()
    examples = [*usable(source, range(len(source)), left_out)]
    for reason, count in left_out.counts.most_common():
        first = left_out.first[reason]
        logging.warning("%s: left out %d rows: %s (first is %s)", name, count, reason, first)
    if not examples:
        raise ValueError(f"no row of {name} can be used: {str(left_out) or 'it is empty'}")
    return examples, left_out.counts


def first_usable(source: Sequence[Example]) -> Example:
    """The first usable example, with images that decode, to see which fields a source has.

    ValueError: none of the first 64 rows is usable; lists the reasons by frequency.
    """
    left_out = LeftOut()
    for example in usable(source, range(min(len(source), _MAX_TRIES)), left_out):
        return example
    num_rows = left_out.counts.total()
    raise ValueError(f"none of the first {num_rows} rows can be used: {left_out}")


def usable(source: Sequence[Example], rows: Iterable[int], left_out: LeftOut) -> Iterator[Example]:
    """The usable ones of these rows, whose images are decoded once, without keeping them."""
    for row in rows:
        try:
            example = source[row]
            for image in example.images:
                open_image(image, at_least=1)
        except Unusable as error:
            left_out.add(error, row)
        else:
            yield example


class LeftOut:
    """Counts unusable rows by reason, and describes the first row of each."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, error: Unusable, index: int) -> None:
        """Counts the row at an index of its source."""
        self.counts[str(error)] += 1
        detail = f": {error.detail}" if error.detail else ""
        self.first.setdefault(str(error), f"row {index + 1}{detail}")

    def __str__(self) -> str:
        reasons = self.counts.most_common()
        return "; ".join(
            f"{count} x {reason} (first is {self.first[reason]})" for reason, count in reasons
        )


def make_example(
    *,
    id: Any,
    source: str,
    question: Any,
    answer: Any,
    images: Sequence[AnyImage],
    position: Any = "",
    choices: Any = (),
    rationale: Any = "",
    response: Any = "",
    context: Any = "",
    units: Any = "",
    extra: Mapping[str, Any] | None = None,
    needs_image: bool = True,
    needs_placeholder: bool = False,
) -> Example:
    """Builds an example from the raw fields of a row.

    Choices become lines "(A) ..." below the question. Numbered placeholders refer to images by
    their position in the list. If the text has no placeholder, all images are put in front.

    Args:
        id: text or number; if None or "", `position`, the row's position in its source.
        question: text, with or without placeholders; or the messages of a chat.
        answer: text or number; with choices a letter, or the text of one of them; for a reward
            function also a list or a dict in JSON types.
        choices: see `choices_of`.
        rationale, response: texts, or None.
        context: text before the response, which it needs, or None.
        units: "matter", "" or None.
        extra: the other columns of the row, in JSON types.
        needs_image: rejects rows without an image.
        needs_placeholder: records adding missing placeholders as a repair.
    """
    question = text_of(asked(question, has_images=bool(images)), "question")
    if not question:
        raise Unusable("no question")
    gold = answer_text(named := answer_of(answer))
    if needs_image and not images:
        raise Unusable("no image")
    if choices := choices_of(choices):
        check_answer(answer, gold, choices)
    rationale = text_of(rationale, "rationale")
    given, target = text_of(context, "context"), text_of(response, "response")
    if given and not target:
        raise Unusable(CONTEXT_ALONE)
    if given:
        given, target = context.lstrip(), response.rstrip()  # with the space between them
    lines = [f"({letter}) {text}" for letter, text in zip(options.LETTERS, choices, strict=False)]
    question, images, is_repaired = _placed("\n".join([question, *lines]), list(images))
    is_long = max(len(question), len(gold)) > MAX_CHARS
    if is_long or max(len(rationale), len(given) + len(target)) > MAX_RESPONSE_CHARS:
        raise Unusable("text too long")
    id = text_of(position if id is None or id == "" else id, "id", is_number_allowed=True)
    if len(id) > MAX_ID_CHARS:
        raise Unusable(f"id of more than {MAX_ID_CHARS} characters")
    texts = (question, gold, rationale, given, target)
    if any(map(SPECIAL_TOKEN.search, texts)):
        raise Unusable("a special token in the text")
    if any(map(SURROGATE.search, (*texts, id))):
        raise Unusable(LONE_SURROGATE)
    units = text_of(units, "units")
    if units not in ("", "matter"):
        raise Unusable('units is neither empty nor "matter"', shown(units))
    return Example(
        id=id,
        source=source,
        images=tuple(images),
        question=question,
        answer=named,
        choices=choices,
        rationale=rationale,
        response=target,
        context=given,
        units=units,
        repair=PUT_IN_FRONT if is_repaired and needs_placeholder else "",
        extra=extra or {},
    )


def images_of(cell: Any, folder: AnyFolder, images_outside: bool = False) -> list[AnyImage]:
    """The images of a row's cell: a path, bytes, a struct {bytes, path}, or a list of these.

    A cell given from Python may be an open image; None, "" and an empty struct are no image. Paths
    are relative to the folder, which may be inside an archive. `images_outside` allows paths that
    lead out of it.
    """
    found = list(itertools.islice(leaves(cell), MAX_IMAGES + 1))
    if len(found) > MAX_IMAGES:
        raise Unusable(f"more than {MAX_IMAGES} images")
    return [_image(leaf, folder, images_outside) for leaf in found]


def leaves(cell: Any) -> Iterator[Any]:
    """The cell, or the elements of its lists, without empty ones."""
    if isinstance(cell, list | tuple):
        for each in cell:
            yield from leaves(each)
    elif not (cell is None or cell == "" or (isinstance(cell, dict) and not any(cell.values()))):
        yield cell


def _image(cell: Any, folder: AnyFolder, images_outside: bool) -> AnyImage:
    image = (cell.get("bytes") or cell.get("path")) if isinstance(cell, dict) else cell
    if isinstance(image, str) and image:
        return _image_path(folder, image, images_outside)
    if isinstance(image, bytes | pathlib.Path | Image.Image):
        return image
    raise Unusable("image is neither a path nor bytes", shown(cell))


def _image_path(folder: AnyFolder, name: str, images_outside: bool) -> AnyFolder:
    """The image file that a row names; rows are untrusted, so it must be below the folder.

    Links are followed, if they stay below the folder or in the cache of huggingface_hub.
    """
    if name.startswith(("http://", "https://", "data:")):
        raise Unusable("image is a URL, which is not read; save it as a file", f"{name:.60}")
    if name.startswith(_BASE64) and "." not in name:
        raise Unusable("image in base64, which is not read; save it as a file", f"{name:.60}")
    if name.startswith("[") and name.endswith("]"):
        raise Unusable("images are a list written as text; write a list", shown(name))
    if len(name) > _MAX_PATH or "\0" in name or SURROGATE.search(name):
        raise Unusable("image path that no file can have", shown(name))
    path = pathlib.PurePosixPath(name)
    is_inside = not path.is_absolute() or path.is_relative_to(os.path.abspath(str(folder)))
    is_inside = is_inside and ".." not in path.parts
    if is_inside and isinstance(folder, pathlib.Path):
        is_inside = release_folder.is_inside(folder / name, folder)
    if not (images_outside or is_inside):
        raise Unusable(OUTSIDE, name)
    return folder / name


def _placed(question: str, images: list[AnyImage]) -> tuple[str, list[AnyImage], bool]:
    """(question with one `<image>` per image, images in that order, whether all were added)."""
    for tag in _LIKE_A_PLACEHOLDER.findall(question):
        if not _PLACEHOLDER.fullmatch(tag):
            raise Unusable("a placeholder that is not read; write <image>", shown(tag))
    numbers = _PLACEHOLDER.findall(question)
    if not numbers:
        return "<image>" * len(images) + question, images, bool(images)
    if not any(numbers) and len(numbers) == len(images):
        return _PLACEHOLDER.sub("<image>", question), images, False
    if len(images) == 1 and all(numbers):
        head, _, tail = _PLACEHOLDER.split(question, maxsplit=1)
        return f"{head}<image>" + _PLACEHOLDER.sub(r"(picture \1)", tail), images, False
    is_short = all(0 < len(number) <= _MAX_DIGITS for number in numbers)
    if not is_short or sorted(map(int, numbers)) != list(range(1, len(images) + 1)):
        raise Unusable(
            "images and placeholders differ in number", f"{len(images)} and {len(numbers)}"
        )
    return _PLACEHOLDER.sub("<image>", question), [images[int(k) - 1] for k in numbers], False
