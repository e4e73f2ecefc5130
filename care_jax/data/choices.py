"""The choices of a multiple-choice question, and whether an answer names one of them."""

from __future__ import annotations

import ast
import json
import unicodedata
from collections.abc import Sequence
from typing import Any

from care_jax.batch import Unusable
from care_jax.data.texts import number_text, shown
from care_jax.rewards import answers
from care_jax.rewards.equivalence import notation, options
from care_jax.rewards.equivalence.options import LETTERS
from care_jax.rewards.symbolic import is_equal

_NOT_CHOICES = "choices are not a list of texts and numbers"
_INTEGER = "an integer answer to choices may count from 0 or 1; write a letter or a choice's text"
_MAX_CHARS = 16_384  # of a list written as text


def choices_of(value: Any) -> tuple[str, ...]:
    """The choices as texts, without their own letters.

    Args:
        value: a list of texts and numbers, such a list written as text, an object {"A": ...} or
            lines "A. ..."; anything empty for none.
    """
    found = _listed(value) if isinstance(value, str | dict) else value or []
    is_list = isinstance(found, list | tuple)
    if not is_list or not all(isinstance(choice, str | int | float) for choice in found):
        raise Unusable(_NOT_CHOICES, shown(value))
    if len(found) > len(LETTERS):
        raise Unusable("more than 26 choices")
    texts = tuple(
        choice.strip() if isinstance(choice, str) else number_text(choice, "a choice")
        for choice in found
    )
    return _unlettered(texts) or texts


def check_answer(answer: Any, text: str, choices: Sequence[str]) -> None:
    """Raises `Unusable` if an answer, whose text is given too, names none of the choices."""
    is_integer = isinstance(answer, int) or (isinstance(answer, float) and answer.is_integer())
    if is_integer and 0 <= answer <= len(choices):  # a float in a column of pandas with gaps
        raise Unusable(_INTEGER, shown(answer))
    outcomes = (answers.compare(text, choice) for choice in choices)
    is_choice = any(isinstance(each, str) and is_equal(each) for each in outcomes)
    if not is_choice and not _are_letters(notation.clean(text), len(choices)):
        raise Unusable("answer not among the choices", shown(text))


def _are_letters(text: str, num_choices: int) -> bool:
    """Whether a text is letters of choices, `B`, `B. 45`, `A, C` or `AC`.

    `Point C` and `BAD` are not: letters that are not separated must be in alphabetical order.
    """
    if options.choice_letter(text, num_choices):
        return len(text.strip("()[]. ")) == 1 or bool(options.letter_of(text))
    letters = options.spelled_letters(text)
    is_ordered = letters != text or list(letters) == sorted(letters)
    return bool(options.choice_letters(letters, num_choices)) and is_ordered


def _unlettered(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts without their letters; () if these are not A, B, ... in order."""
    labels = [options.label(text) for text in texts]
    is_lettered = "".join(letter for letter, _ in labels) == LETTERS[: len(labels)]
    return tuple(rest for _, rest in labels) if is_lettered else ()


def _listed(value: str | dict[str, Any]) -> Any:
    """The list that an object by letters, a literal or lines stand for; None for any other."""
    if isinstance(value, dict):  # a column of structs has all letters in every row
        filled = {letter: choice for letter, choice in value.items() if choice is not None}
        is_lettered = "".join(sorted(filled)) == LETTERS[: len(filled)]
        return [filled[letter] for letter in sorted(filled)] if is_lettered else None
    text = value.strip()
    if text[:1] == "[":
        return _literal(text)
    lines = list(filter(None, map(str.strip, text.splitlines())))
    return lines if not lines or (len(lines) > 1 and _unlettered(lines)) else None


def _literal(text: str) -> Any:
    """A list in JSON or Python; None for anything else, or escapes such as the \\f of \\frac."""
    if len(text) > _MAX_CHARS:
        return None
    try:
        try:
            found = json.loads(text)
        except ValueError:
            found = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    said = "".join(each for each in found if isinstance(each, str))
    return None if any(unicodedata.category(c) == "Cc" for c in said) else found
