"""MathVerse: plane and solid geometry and functions, each problem in five versions of its text.

Published rules: one judge extracts the answer, another compares it with the gold answer. Here a
choice is scored by its letter or by the text of its option, parsed from the question. A free answer
is scored by equivalence (`answers`); if it is wrong, a judge can be asked (`evaluate.judge_url`).

Release: `CaraJ/MathVerse-lmmseval`, configuration testmini (or the five of `AI4Math/MathVerse`).
"""

from __future__ import annotations

import re
import string
from typing import Any

from care_jax.benchmarks import letters, response
from care_jax.benchmarks.rows import Question, gold_of
from care_jax.rewards import answers
from care_jax.rewards.verifier import extract_answer

# A:..., (A) ..., A. ...; one per line or several on a line.
_OPTION = re.compile(r"(?:^|(?<=[\s.,;)]))(?:\(([A-H])\)|([A-H])\s*[:：.．、)])\s*")


def parse(answer: str, row: dict[str, Any]) -> str | None:
    """The letter an answer names, or the text of a free answer; None if there is neither."""
    text, is_span = response.span_of(answer)
    options = read_choices(row)
    # The span is the answer as a whole, of which the rules for responses would take a part.
    letter = "" if is_span else letters.parse_letter(answer, options, has_marker=True)
    if options and letter:
        return letter
    text = text if is_span else extract_answer(text)
    box = response.last_box(text)
    return (text if box is None else box) or None


def is_correct(answer: str, row: dict[str, Any]) -> bool:
    """Whether the answer is correct for the row."""
    parsed, gold = parse(answer, row), gold_of(row).strip()
    if parsed is None or not gold:
        return False
    options = read_choices(row)
    return parsed == gold or answers.is_equivalent(parsed, gold, choices=options)


def read_choices(row: dict[str, Any]) -> tuple[str, ...]:
    """The options listed in the question of a multiple-choice row; empty for other rows."""
    if row.get("question_type") not in ("multi-choice", "multi_choice"):
        return ()
    text = row.get("question_for_eval") or row.get("question") or ""
    _, marker, listed = text.rpartition("Choices:")
    text = listed if marker else text
    marks = [(m.group(1) or m.group(2), m.start(), m.end()) for m in _OPTION.finditer(text)]
    # Marks must form the sequence A, B, C, ...; any other letter is text of its option.
    run: list[tuple[int, int]] = []
    for letter, start, end in marks:
        if letter == "A" and len(run) < 2:
            run = []
        if letter == string.ascii_uppercase[len(run)]:
            run.append((start, end))
    ends = [start for start, _ in run[1:]] + [len(text)]
    options = [text[begin:end].strip() for (_, begin), end in zip(run, ends, strict=False)]
    return tuple(options) if len(options) > 1 else ()


def question(row: dict[str, Any]) -> Question:
    """The prompt: the release's query that does not ask for a chain of thought."""
    text = row.get("query_wo") or row["question"]
    images = ("image",) if row.get("image") else ()  # the text-only version has none
    return Question("<image>" * len(images) + text, images, read_choices(row))
