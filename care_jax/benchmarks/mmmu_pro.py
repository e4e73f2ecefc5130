"""MMMU-Pro: up to ten options, in two forms.

*standard*: question, options and up to seven images. *vision*: one screenshot that shows the
question and its options; the text only asks for the letter. Both are scored by `letters`, which
tries the text after "Answer:" first. The official harness requires a vision response to be the
letter alone; here both forms are parsed the same way.

Release: `MMMU/MMMU_Pro`, configurations "standard (10 options)" and "vision"; `options` is a Python
literal.
"""

from __future__ import annotations

from typing import Any

from care_jax.benchmarks import letters
from care_jax.benchmarks.rows import Question, gold_of, place_images, read_options

INSTRUCTION = "Answer with the option letter from the given choices directly."


def parse(answer: str, row: dict[str, Any]) -> str | None:
    """The letter an answer names; None if it names none."""
    return letters.parse_letter(answer, read_options(row), has_marker=True) or None


def is_correct(answer: str, row: dict[str, Any]) -> bool:
    """Whether the answer names the correct option."""
    return parse(answer, row) == gold_of(row).strip()


def question(row: dict[str, Any]) -> Question:
    """The prompt, worded as in the official harness."""
    options = read_options(row)
    if "question" not in row:
        return Question(f"<image>{INSTRUCTION}", ("image",), options)
    text = "\n".join([row["question"], *letters.labelled(options)])
    return Question(*place_images(f"{text}\n\n{INSTRUCTION}"), options)
