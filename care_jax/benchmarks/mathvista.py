"""MathVista: figures, charts and diagrams with typed answers.

Published rules: a judge extracts the answer from the response. A choice is read as a letter, or
else as the option nearest in edit distance; an integer as int(x); a float is rounded to
`precision`. Results are compared as strings. Here rules replace the judge: they remove a tag, box
or sentence around the answer, and take the option that it is equivalent to, if there is one. If
they find no answer, it is unparsable and wrong (the published code without a judge picks the
shortest option).

Release: `AI4Math/MathVista`, testmini.
"""

from __future__ import annotations

import ast
import re
import string
from fractions import Fraction
from typing import Any

from care_jax.benchmarks import letters, response
from care_jax.benchmarks.rows import Question, gold_of, read_options
from care_jax.rewards import answers
from care_jax.rewards.equivalence import notation, options, quantities

_MAX_EXTRACTION = 200  # characters of an extracted answer; a longer text is a response
_BRACKETED = re.compile(r"\(([a-zA-Z])\)")
_WORD = re.compile(r"[^\W\d_]{2,}")
_NUMBER = re.compile(r"(?<![\w.])[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?![\w])")
_PHRASE = re.compile(
    r"(?:answer|option|choice)\**(?: is| would be| should be)?\s*:?\s*\**\s*(.+)", re.IGNORECASE
)
_LETTER = re.compile(r"[\W_]*([A-Z])(?![\w'])")
_LISTED = re.compile(r"[,;<>]|(?<![a-zA-Z])(?:and|or|not)(?![a-zA-Z])|\\(?:ne|le|ge)")
_FIRST_CLAUSE = re.compile(r"(.+?)(?:[,;:(]|\.(?: |$)| (?:because|since|as) )")
_LARGE_EXPONENT = re.compile(r"[eE][-+]?[\d_]{4,}")  # as Fraction reads it
_HINTS = {
    "integer": "requiring an integer answer and provide the final value, e.g., 1, 2, 3",
    "float1": "requiring a floating-point number with one decimal place and provide the final "
              "value, e.g., 1.2, 1.3, 1.4",
    "float2": "requiring a floating-point number with two decimal places and provide the final "
              "value, e.g., 1.23, 1.34, 1.45",
    "list": "requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], "
            "[1.2, 1.3, 1.4]",
    "choice": "and provide the correct option letter, e.g., A, B, C, D",
}  # fmt: skip


def parse(answer: str, row: dict[str, Any]) -> str | None:
    """The answer in the format of the gold answer; None if there is none."""
    text, is_span = response.span_of(answer)
    boxed = response.last_box(text)
    is_wrapped = is_span or boxed is not None
    text = text if boxed is None else boxed
    if not text:
        return None
    if choices := read_options(row):
        return _parse_choice(text, choices)
    if row["answer_type"] == "list":
        return _parse_list(text)
    value = _number(text, row)
    if value is None and (read := _read_assigned(text)) and (is_wrapped or not read.unit):
        whole, parts = read.value.as_integer_ratio()
        value = _number(str(whole if parts == 1 else float(read.value)), row)
    if value is None and len(_WORD.findall(text)) >= 3:
        value = _number(_last_number(text), row)
    return value


def is_correct(answer: str, row: dict[str, Any]) -> bool:
    """Whether the answer is correct for the row."""
    found = parse(answer, row)
    return found is not None and found.strip() == gold_of(row).strip()


def question(row: dict[str, Any]) -> Question:
    """The prompt of the official harness; "reason first" is left to `data.instruction`.

    ValueError: the harness has no hint for such an answer.
    """
    choices = read_options(row)
    kind = "choice" if choices else row["answer_type"]
    precision = row.get("precision")
    if kind == "float" and isinstance(precision, int | float | None):
        kind = f"float{precision or 1:g}"
    if kind not in _HINTS:
        raise ValueError(
            "expected choices, or the answer_type integer, float (precision 1 or 2) or list, got "
            f"{row['answer_type']!r:.60} (precision {precision!r:.60})"
        )
    lines = [f"Hint: Please answer the question {_HINTS[kind]}, at the end."]
    unit = f" (Unit: {row['unit']})" if row.get("unit") else ""
    lines.append(f"Question: {row['question']}{unit}")
    if choices:
        lines += ["Choices:", *letters.labelled(choices, "({}) {}")]
    return Question("<image>" + "\n".join(lines), ("decoded_image",), choices)


def _parse_choice(text: str, choices: tuple[str, ...]) -> str | None:
    named = string.ascii_uppercase[: len(choices)]
    if text in choices:
        return text
    if (bare := text.strip("(). ")) and len(bare) == 1 and bare in named:
        return choices[named.index(bare)]
    settled = _settled(text, choices, named)
    is_response = len(text) > _MAX_EXTRACTION or "\n" in text
    if is_response and settled is None:
        return None
    if settled is not None and (is_response or not _BRACKETED.search(text)):
        text = settled
    text = text.strip()
    bracketed = _BRACKETED.findall(text)
    text = bracketed[0].upper() if bracketed else text
    if (lone := letters.lone_letter(text)) and lone in named:
        return choices[named.index(lone)]
    if (letter := options.letter_of(text)) and letter in named:
        choice = choices[named.index(letter)]
        label, rest = options.label(text)
        return choice if not label or _stated(rest, choices) in (None, choice) else None
    if (stated := _stated(text, choices)) is not None:
        return stated
    found = nearest(text, choices)
    # The published code takes the shortest option where nothing is in common.
    return found if edit_distance(text, found) < max(len(text), len(found)) else None


def _stated(text: str, choices: tuple[str, ...]) -> str | None:
    """The one choice that the first clause of a text, or else all of it, is equivalent to."""
    clause = _FIRST_CLAUSE.match(text)
    for part in ([clause.group(1)] if clause else []) + [text]:
        plain = part.strip().casefold()
        same = [choice for choice in choices if choice.strip().casefold() == plain]
        same = same or [choice for choice in choices if answers.is_equivalent(part, choice)]
        if len(same) == 1:
            return same[0]
    return None


def _settled(text: str, choices: tuple[str, ...], named: str) -> str | None:
    """The letter or option after the last "answer is" of a response, or its last "(A)"."""
    for phrase in reversed(_PHRASE.findall(text)):
        plain = phrase.strip(" .*\"'`$").casefold()
        for choice in choices:
            if plain == choice.strip().casefold():
                return choice
        if (match := _LETTER.match(phrase)) and match.group(1) in named:
            return match.group(1)
    bracketed = [letter for letter in _BRACKETED.findall(text) if letter.upper() in named]
    return bracketed[-1].upper() if bracketed else None


def nearest(text: str, choices: tuple[str, ...]) -> str:
    """The first choice at the smallest edit distance from the text."""
    return min(choices, key=lambda choice: edit_distance(text, choice))


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def _number(text: str, row: dict[str, Any]) -> str | None:
    """The number in the format of the gold answer; None if the text is not such a number."""
    if len(text) > _MAX_EXTRACTION or _LARGE_EXPONENT.search(text):
        return None
    try:
        if row["answer_type"] == "float":
            return str(round(float(text), _precision(row)))
        # int(float("1.50")) would be 1; the recorded verdicts reject such an answer.
        value = Fraction(text.strip())
        return str(value.numerator) if value.denominator == 1 else None
    except (ValueError, OverflowError, ZeroDivisionError):
        return None


def _read_assigned(text: str) -> quantities.Number | None:
    """The number of `**14**`, `x = 14` or `So 20 - 6 = 14`; None for any other text."""
    if len(text) > _MAX_EXTRACTION:
        return None
    text = notation.clean(text.replace("**", ""))
    return quantities.read_number(text if _LISTED.search(text) else text.rpartition("=")[2])


def _precision(row: dict[str, Any]) -> int:
    # The parquet files store a float, which round() rejects.
    return int(row.get("precision") or 1)


def _last_number(text: str) -> str:
    found = [number for number in _NUMBER.findall(text) if any(map(str.isdigit, number))]
    return found[-1].replace(",", "").replace("−", "-") if found else ""


def _parse_list(text: str) -> str:
    found = re.findall(r"\[[^\[\]]*\]", text)
    try:
        # The parser fails on deeply nested expressions, which only a long text has.
        is_short = found and len(found[-1]) <= _MAX_EXTRACTION
        return str(list(ast.literal_eval(found[-1]))) if is_short else text
    except (SyntaxError, ValueError, TypeError):
        return text
