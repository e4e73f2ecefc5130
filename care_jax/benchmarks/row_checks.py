"""Checks all rows of a benchmark when it is opened.

A row of another release, or without a gold answer, would count as a wrong answer and be noticed
only in the accuracy.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from typing import Any

from care_jax.benchmarks.releases import Release
from care_jax.benchmarks.rows import Question, gold_of, read_options
from care_jax.data.rows import images_of
from care_jax.prompts.images import AnyImage, image_size

# Share of the rows whose gold answer may be one that the published rules never accept. Releases
# have a few; a split without answers has no other.
_MOST_UNSCORED = 0.5
_TEXTS = ("question", "query_wo", "question_for_eval", "unit", "question_type", "answer_type")


def check_rows(
    name: str, release: Release, rows: Iterable[tuple[str, str, dict[str, Any]]]
) -> list[str]:
    """Notes on what is unusual about the rows of a benchmark, each a (place, id, row).

    Raises:
        ValueError: a row is of another release, cannot be asked, or has the id of another row; or
            more than half have no gold answer that is scored as correct.
    """
    places: dict[str, str] = {}
    unscored, num_options = [], 0
    for place, id, row in rows:
        try:
            question = _checked(release, row)
            if id in places:
                raise ValueError(f"expected ids that occur once, got {id!r} of {places[id]} again")
        except ValueError as error:
            # Only sources to train on have the option that a reason may name.
            reason = str(error).removesuffix(", which needs images_outside")
            detail = getattr(error, "detail", "")
            raise ValueError(
                f"{place} is no row of {name}: {reason}{detail and f' ({detail})'}; "
                f"{release.advice}"
            ) from error
        places[id] = place
        num_options = max(num_options, len(question.options))
        if not _is_scored(release, row):
            unscored.append(f"{place} has the answer {gold_of(row)!r:.60} to {_kind(question)}")
    if not places:
        raise ValueError(f"expected rows of {name}, got none; {release.advice}")
    if num_options < release.min_options:
        raise ValueError(
            f"expected up to 10 options in the rows of {name}, got at most {num_options}; take the "
            f"files under {release.configuration!r}"
        )
    if len(unscored) > _MOST_UNSCORED * len(places):
        raise ValueError(
            f"expected gold answers in {name}, which its rules accept, got {len(unscored)} of "
            f"{len(places)} that they do not: {unscored[0]}; take the split {release.split!r}: "
            f"{release.advice}"
        )
    return [*_notes(name, release, len(places), unscored)]


def find_images(row: dict[str, Any], field: str) -> list[AnyImage]:
    """The file or bytes of the image in a field; `image` is the path of that in `decoded_image`."""
    found = images_of(row.get(field), row["folder"]) or images_of(row.get("image"), row["folder"])
    if len(found) != 1:
        raise ValueError(f"expected an image in its field {field!r}, got {len(found)}")
    return found


def _checked(release: Release, row: dict[str, Any]) -> Question:
    """The question of a row whose fields and images are as in the release."""
    if not set(release.fields) <= set(row):
        given = ", ".join(sorted(row.keys() - {"folder"}))
        raise ValueError(f"expected the fields {', '.join(release.fields)}, got {given}")
    for field in _TEXTS:
        if not isinstance(row.get(field), str | None):
            raise ValueError(f"expected text in its field {field!r}, got {row[field]!r:.60}")
    text, has_text = row.get("query_wo") or row.get("question") or "", "question" in release.fields
    if bool(text.strip()) != has_text:
        what = "text" if has_text else "no text"
        raise ValueError(f"expected {what} in its field 'question', got {row['question']!r:.60}")
    if not isinstance(row.get("metadata"), dict | None):
        raise ValueError(f"expected an object as its metadata, got {row['metadata']!r:.60}")
    if not isinstance(row["answer"], str | int | float | None):
        raise ValueError(f"expected text or a number as its answer, got {row['answer']!r:.60}")
    question = release.scorer.question(row)
    for field in question.images:
        for image in find_images(row, field):
            image_size(image)
    return question


def _is_scored(release: Release, row: dict[str, Any]) -> bool:
    """Whether the gold answer names an option, if there are any, and is scored as correct."""
    gold, options = gold_of(row).strip(), read_options(row)
    if options and gold not in (*string.ascii_uppercase[: len(options)], *options):
        return False
    return bool(gold.strip("? ")) and release.scorer.is_correct(f"<answer>{gold}</answer>", row)


def _kind(question: Question) -> str:
    return f"the options {question.options!r:.200}" if question.options else "an open question"


def _notes(name: str, release: Release, num_rows: int, unscored: list[str]) -> Iterator[str]:
    if num_rows != release.num_rows:
        what = "a partial download" if num_rows < release.num_rows else "of another version"
        yield f"{name} has {num_rows:,} rows, {what}: {release.num_rows:,} are published"
    if unscored:
        yield (
            f"{len(unscored)} rows of {name} have gold answers that its rules do not accept, and "
            f"count as wrong: {unscored[0]}"
        )
