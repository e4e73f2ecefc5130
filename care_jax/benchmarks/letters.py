"""The option letter that a response gives as its answer, by the rules of MMMU and MMMU-Pro.

The rules, in order: letters in brackets; letters before a space; letters before a full stop; and,
in a response of more than five words, the texts of the options. Of several matches the last one
wins. Where the published parsers return a random letter, this one returns an empty string, after
two extra attempts: the content of a box, and a single letter among punctuation. A bare letter
or the text of exactly one option is accepted before any rule.

Source: MMMU `eval/eval_utils.py`, MMMU-Pro `evaluate.py`, both as lmms-eval 0.7 has them.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from care_jax.benchmarks import response
from care_jax.rewards.equivalence import notation

_PUNCTUATION = ",.!?;:'"
_MARKER = "Answer:"
_MIN_WORDS = 6  # of a response that is searched for the texts of the options
_LONE_LETTER = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)(?=\{)")


def parse_letter(answer: str, options: Sequence[str], *, has_marker: bool) -> str:
    """The capital letter of the option that an answer names; empty if it names none.

    With `has_marker` the text after the last "Answer:" is tried first, as in MMMU-Pro.
    """
    letters = string.ascii_uppercase[: len(options)]
    text = response.unwrap(answer)
    if not text:
        return ""
    if (bare := text.strip("(). ")) and len(bare) == 1 and bare in letters:
        return bare
    same = [k for k, option in enumerate(options) if _plain(option) == _plain(text)]
    if len(same) == 1:
        return letters[same[0]]
    if has_marker and (found := _after_marker(text, letters)):
        return found
    # The rules read the response unstripped, including trailing line breaks.
    if found := _by_rules(answer if answer.strip() == text else text, options, letters):
        return found
    # Of boxes within boxes a short one is the innermost; a long one may hold any number.
    box = response.last_box(text)
    if box is not None and box != text and len(box) <= notation.MAX_CHARS:
        return parse_letter(box, options, has_marker=has_marker)
    lone = lone_letter(text)
    return lone if lone and lone in letters else ""


def lone_letter(text: str) -> str:
    """The one letter of a text of punctuation and LaTeX's text commands, as a capital; else ""."""
    match = _LONE_LETTER.fullmatch(_TEXT_COMMAND.sub("", text))
    return match.group(1).upper() if match else ""


def _plain(text: str) -> str:
    return " ".join(text.split()).strip("$ .").casefold()


def _after_marker(text: str, letters: str) -> str:
    _, marker, rest = text.rpartition(_MARKER)
    found = [letter for letter in letters if letter in rest] if marker else []
    return found[0] if len(found) == 1 else ""


def _by_rules(text: str, options: Sequence[str], letters: str) -> str:
    for mark in _PUNCTUATION:
        text = text.strip(mark)
    text = f" {text} "
    # (text that makes a letter a candidate, text that locates it if there are several)
    for shows, stands in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        if found := [letter for letter in letters if shows.format(letter) in text]:
            # If none is located (all at -1), the first candidate is taken, as published.
            return max(found, key=lambda letter: text.rfind(stands.format(letter)))
    if len(text.split()) < _MIN_WORDS:
        return ""
    positions = [text.lower().rfind(option.lower()) for option in options]
    return letters[positions.index(max(positions))] if max(positions, default=-1) >= 0 else ""


def labelled(options: Sequence[str], form: str = "{}. {}") -> list[str]:
    """The options with their letters: "A. first"."""
    return [form.format(*each) for each in zip(string.ascii_uppercase, options, strict=False)]
