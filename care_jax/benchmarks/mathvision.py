"""MATH-Vision: competition mathematics with figures, five-way choices and free answers.

Published rules: the answer is a letter at the end of the response, the text after "the answer is",
or the last box. Units, degrees and spacing are removed. It is correct if it equals the gold letter,
option or answer: as text, as a tuple or list with elements rounded to two decimals, or as a value
rounded to two decimals. `latex_value` reads the values.

Release: `MathLLMs/MathVision`, test and testmini.
"""

from __future__ import annotations

import contextlib
import re
import string
from typing import Any

from care_jax.benchmarks import letters, response
from care_jax.benchmarks.latex_value import value
from care_jax.benchmarks.rows import Question, gold_of, read_options

INSTRUCTION = 'Please solve the problem step by step and put your answer in one "\\boxed{}".'
CHOICE_INSTRUCTION = "Answer the question with the option's letter from the given choices directly."

_MAX_CHARS = 50_000  # of a response; the end is kept
_PHRASES = (
    "the final answer is", "The final answer is", "the answer is", "The answer is",
    "the correct answer is", "The correct answer is", "the answer should be",
    "The answer should be",
)  # fmt: skip
# The order matters: each removal changes what later ones match.
_REMOVED = (
    " ", "\\,", "+\\infty", "\n", "\\text", "\\mbox", "\\left", "\\right", "^{\\circ}", "^\\circ",
    "{m}^3", "m^3", "{units}", "units", "{km}", "km", "\\!", "\\$", "$", "\\%",
)  # fmt: skip
_LETTER = re.compile(r"\(([a-e])\)|\{([a-e])\}")
_SLASH = re.compile(r"(-?\d+)/(-?\d+)")
_ROOT = re.compile(r"\\sqrt(?=[^{])(.)")


def parse(answer: str, row: dict[str, Any]) -> str | None:
    """The final answer, lower-cased, without units and formatting; None if nothing is left."""
    text, _ = response.span_of(answer)
    return _stripped(_settled(text[-_MAX_CHARS:])) or None


def is_correct(answer: str, row: dict[str, Any]) -> bool:
    """Whether the answer is correct for the row."""
    gold, options = gold_of(row), read_options(row)
    golds = [gold]
    if options and gold in string.ascii_uppercase[: len(options)]:
        golds.append(options[string.ascii_uppercase.index(gold)])
        if _plain(response.unwrap(answer)) == _plain(golds[1]):
            return True
    parsed = parse(answer, row)
    return parsed is not None and any(_is_equal(gold, parsed) for gold in golds)


def question(row: dict[str, Any]) -> Question:
    """The prompt, worded as in the official harness."""
    options = read_options(row)
    text = INSTRUCTION + row["question"]
    if options:
        text += "\nChoices: " + "\n".join([*letters.labelled(options), CHOICE_INSTRUCTION])
    return Question(f"<image>{text}", ("decoded_image",), options)


def _plain(text: str) -> str:
    return "".join(text.split()).strip("$.").casefold()


def _settled(text: str) -> str:
    text = text.strip()
    for letter in "ABCDE":
        if text.endswith((f" {letter}.", f" ({letter}).")) or text.startswith(
            (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        ):
            text = letter
    tail = text.rpartition("is ")[2].rstrip(".")
    with contextlib.suppress(ValueError):  # if it is a number
        float(tail)
        text = tail
    if "oxed{" in text:
        box = text.rpartition("oxed{")[2]
        return "\\boxed{" + box if text.count("oxed{") > 1 else text
    for phrase in _PHRASES:
        _, found, rest = text.rpartition(phrase)
        text = rest.strip()
        if found:
            text = text.partition("\n")[0].partition(". ")[0]
    return text


def _stripped(text: str) -> str:
    text = text.lower().replace("{}", "")
    _, box, content = text.partition("oxed{")
    if box and "}" in content:
        text = content.rpartition("}")[0]
    closing, opening = text.find("}"), text.find("{")
    if closing >= 0 and (opening < 0 or closing < opening):
        text = text[:closing]
    text = text.rpartition("=")[2].rpartition("\\approx")[2]
    text = text.replace("∞", "\\infty").replace("\\\\", "\\")
    for removed in _REMOVED:
        text = text.replace(removed, "\\infty" if removed == "+\\infty" else "")
    text = text.replace("bmatrix", "pmatrix").replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    if fraction := _SLASH.fullmatch(text):
        text = f"\\frac{{{fraction.group(1)}}}{{{fraction.group(2)}}}"
    # Two passes, brackets and then braces: "{(a)}" becomes "a", but "({a})" becomes "(a)".
    text = _LETTER.sub(lambda match: match.group(1) or match.group(0), text)
    text = _LETTER.sub(lambda match: match.group(2) or match.group(0), text)
    return text.rstrip(".").lstrip(":").strip()


def _is_equal(gold: str, answer: str) -> bool:
    gold, answer = gold.lower(), answer.lower()
    if not gold.strip() or not answer.strip():
        return False
    if gold.strip() == answer.strip():
        return True
    gold, answer = _by_element(gold), _by_element(answer)
    if gold == answer:
        return True
    first, second = value(gold), value(answer)
    return first is not None and second is not None and round(first, 2) == round(second, 2)


def _by_element(text: str) -> str:
    """A tuple or list with each element rounded to two decimals; any other text unchanged."""
    items = text[1:-1].split(",")
    if len(items) < 2 or text[:1] + text[-1:] not in ("()", "[]"):
        return text
    rounded = []
    for item in items:
        number = None if "infty" in item or item in ("a", "-a") else value(item)
        if number is None and not ("infty" in item or item in ("a", "-a")):
            return text
        rounded.append(item if number is None else str(round(number, 2)))
    return f"{text[0]}{','.join(rounded)}{text[-1]}"
