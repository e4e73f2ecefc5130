"""MMMU: college questions in thirty subjects, multiple choice and open.

Multiple choice is scored by `letters`. The candidates of an open response are, for each line, the
shortest text after "is", "so", "answer" and the like, and the numbers in it. The response is
correct if a candidate text contains the gold answer, or a candidate number equals it at two
decimals.

Release: `MMMU/MMMU` (or `lmms-lab/MMMU`), validation; `options` is a Python literal, and so is the
gold answer of an open question with several gold answers.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from typing import Any

from care_jax.benchmarks import letters, response
from care_jax.benchmarks.rows import Question, gold_of, place_images, read_options

CHOICE_INSTRUCTION = "Answer with the option's letter from the given choices directly."
OPEN_INSTRUCTION = "Answer the question using a single word or phrase."

_MAX_CHARS = 20_000  # of a response; the end is kept
# The text after the last occurrence of one of these in a line is a candidate.
_INDICATORS = (
    "could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ",
)  # fmt: skip
_TRIVIAL = frozenset({":", ",", ".", "!", "?", ";", "'"})
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    # A number begins at the first of its digits; without the lookbehind a search is quadratic.
    re.compile(r"-?(?<!\d)\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:(?<!\d)\d+\.\d+|\.\d+|(?<!\d)\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


def parse(answer: str, row: dict[str, Any]) -> str | frozenset[str | float] | None:
    """The letter or the candidates of an answer; None if there are none."""
    if is_choice(row):
        return letters.parse_letter(answer, read_options(row), has_marker=False) or None
    return frozenset(_candidates(response.unwrap(answer)[-_MAX_CHARS:])) or None


def is_correct(answer: str, row: dict[str, Any]) -> bool:
    """Whether the answer names the correct option, or contains the open gold answer."""
    parsed = parse(answer, row)
    if parsed is None or isinstance(parsed, str):
        return parsed == gold_of(row).strip()
    golds = {value for gold in _open_golds(row) for value in _normalize(gold)}
    texts = [gold for gold in golds if isinstance(gold, str)]
    return any(
        any(text in candidate for text in texts)
        if isinstance(candidate, str)
        else candidate in golds
        for candidate in parsed
    )


def is_choice(row: dict[str, Any]) -> bool:
    """Whether the row has options to choose from."""
    kind = row.get("question_type")
    return kind == "multiple-choice" if kind else bool(read_options(row))


def question(row: dict[str, Any]) -> Question:
    """The prompt, worded as in the official harness."""
    if not is_choice(row):
        return Question(*place_images(f"{row['question']}\n\n{OPEN_INSTRUCTION}"))
    options = read_options(row)
    text = "\n".join([row["question"], *letters.labelled(options)])
    return Question(*place_images(f"{text}\n\n{CHOICE_INSTRUCTION}"), options)


def _open_golds(row: dict[str, Any]) -> list[str]:
    gold = gold_of(row)
    with contextlib.suppress(SyntaxError, ValueError):
        if gold.startswith("[") and gold.endswith("]"):
            return [str(value) for value in ast.literal_eval(gold)]
    return [gold]


def _candidates(text: str) -> Iterator[str | float]:
    text = text.strip().strip(".").lower()
    if not text:
        return
    *lines, last = text.split("\n")
    tails = [tail for line in lines if (tail := _tail(line, _INDICATORS))]
    # The last line may be an equation.
    tails += [tail] if (tail := _tail(last, (*_INDICATORS, "="))) else []
    for tail in tails or [text]:
        yield from _normalize(tail)
        for pattern in _NUMBERS:
            for number in pattern.findall(tail):
                yield from _normalize(number)


def _tail(line: str, indicators: tuple[str, ...]) -> str:
    """The shortest text after an indicator; empty without one."""
    found = [line.rpartition(word)[2].strip() for word in indicators if word in line]
    # An empty tail is replaced by the next one, as published.
    shortest = ""
    for tail in found:
        if not shortest or len(tail) < len(shortest):
            shortest = tail
    return "" if shortest in _TRIVIAL else shortest


def _normalize(text: str) -> list[str | float]:
    """A number at two decimals, or lower-case text; one character matches only next to a space."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
    return [f" {text}", f"{text} "] if len(text) == 1 else [text]
