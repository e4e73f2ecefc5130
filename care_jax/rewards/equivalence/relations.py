"""Parses inequalities, intervals and unions as sets of one variable: `1 < x` is (1, infinity).

Works on cleaned text and evaluates nothing: bounds remain text, so that a huge one costs nothing.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

from care_jax.rewards.equivalence import quantities

_SET_BUILDER = re.compile(
    r"\\?\{ ?([a-zA-Z]|\\[a-z]+)(?: ?\\in ?[^|:\\]*(?:\\mathbb ?\{? ?R ?\}?|\\R)?)? ?"
    r"(?:\\mid|\\vert|\||:) ?(.+?) ?\\?\}"
)
_MEMBER = re.compile(r"([a-zA-Z]|\\(?:alpha|beta|theta|lambda))(?:_\w)? ?\\in(?![a-z]) ?(.+)")
_UNION = re.compile(r"\\cup(?![a-z])|(?<![a-zA-Z\\])(?:or|U)(?![a-zA-Z])|\\(?:vee|lor)(?![a-z])|∨")
_BOTH = re.compile(r"(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:wedge|land)(?![a-z])|∧|&&|,")
_SIGN = re.compile(r"\\(le|ge|neq?|lt|gt)(?![a-zA-Z])|([<>])")
_SIGNS = {"le": "<=", "ge": ">=", "ne": "!=", "neq": "!=", "lt": "<", "gt": ">", "<": "<", ">": ">"}
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_VARIABLE = re.compile(r"(?:[a-zA-Z]|\\(?:alpha|beta|theta|lambda))(?:_(?:\w|\{\w+\}))?")
_INTERVAL = re.compile(r"([(\[\]]) ?([^,;=]+?) ?[,;] ?([^,;=]+?) ?([)\]\[])")
_INFINITY = re.compile(r"\+? ?(-?) ?(?:\\infty|\\infin|oo|inf|infinity|infty)(?![a-zA-Z])")
_REALS = re.compile(r"\\mathbb ?\{? ?R ?\}?|\\R|all real numbers", re.IGNORECASE)
_MAX_PARTS = 16


class Interval(NamedTuple):
    """Bounds as text; `brackets` are "(" or "[" and ")" or "]"."""

    brackets: str
    low: str
    high: str


class Region(NamedTuple):
    """A union of intervals, and its variable if the text names one.

    `is_certain` means that the text is unambiguous; `(1, 2)` may be a point.
    """

    variable: str
    intervals: tuple[Interval, ...]
    is_certain: bool

    def latex(self) -> str:
        """The union in interval notation."""
        return " \\cup ".join(f"{i.brackets[0]}{i.low},{i.high}{i.brackets[1]}"
                              for i in self.intervals)  # fmt: skip


def read_region(text: str) -> Region | None:
    """Parses a text that is a region as a whole; None for any other text."""
    text, variable = text.strip(), ""
    if match := _SET_BUILDER.fullmatch(text):
        variable, text = match.groups()
    if match := _MEMBER.fullmatch(text):
        if variable not in ("", match.group(1)):
            return None
        variable, text = match.groups()
    if _REALS.fullmatch(text):
        return Region(variable, (Interval("()", "-\\infty", "\\infty"),), is_certain=True)
    parts = [part.strip() for part in _UNION.split(text)]
    if len(parts) > _MAX_PARTS:
        return None
    intervals: list[Interval] = []
    is_certain = bool(variable) or len(parts) > 1
    for part in parts:
        read = _read_interval(part) or _read_relations(part)
        if read is None or (variable and read[0] and variable != read[0]):
            return None
        variable = variable or read[0]
        intervals += read[1]
        is_certain |= read[2]
    return Region(variable, tuple(intervals), is_certain)


def _read_interval(text: str) -> tuple[str, list[Interval], bool] | None:
    match = _INTERVAL.fullmatch(text)
    if match is None:
        return None
    opening, low, high, closing = match.groups()
    # `]1, 2[` is the open interval.
    brackets = {"]": "("}.get(opening, opening) + {"[": ")"}.get(closing, closing)
    interval = Interval(brackets, _bound(low), _bound(high))
    is_certain = "\\infty" in interval.low + interval.high or opening == "]" or closing == "["
    return "", [interval], is_certain


def _read_relations(text: str) -> tuple[str, list[Interval], bool] | None:
    """A relation, a chain such as `1 < x < 2`, or a conjunction of two relations."""
    parts = [part.strip() for part in _BOTH.split(text)]
    read = [_read_chain(part) for part in parts]
    if len(read) > 2 or any(part is None for part in read):
        return None
    (variable, intervals), *rest = [part for part in read if part]
    if rest:
        ((other, others),) = rest
        one, two = sorted((intervals, others), key=len)
        if variable != other or len(one) != 1:
            return None
        both = _intersect(one[0], two[0])
        found = _without(one[0], two[0].high) if len(two) == 2 else [both] if both else None
        return (variable, found, True) if found else None
    return variable, intervals, True


def _read_chain(text: str) -> tuple[str, list[Interval]] | None:
    pieces = [piece.strip() for piece in _SIGN.sub(r" \0 ", text).split("\0")]
    signs = [_SIGNS[name or mark] for name, mark in _SIGN.findall(text)]
    if "=" in text or len(pieces) != len(signs) + 1 or not all(pieces[1:-1]):
        return None
    if len(signs) == 2 and _VARIABLE.fullmatch(pieces[1]) and "!=" not in signs:
        left = _one_sided(pieces[1], _MIRRORED[signs[0]], pieces[0])
        right = _one_sided(pieces[1], signs[1], pieces[2])
        both = _intersect(left[1][0], right[1][0]) if left and right else None
        return (pieces[1], [both]) if both else None
    if len(signs) != 1 or sum(bool(_VARIABLE.fullmatch(piece)) for piece in pieces) > 1:
        return None
    left, right = pieces
    if not left or _VARIABLE.fullmatch(left):
        return _one_sided(left, signs[0], right)
    if _VARIABLE.fullmatch(right):
        return _one_sided(right, _MIRRORED[signs[0]], left)
    return None


def _one_sided(variable: str, sign: str, bound: str) -> tuple[str, list[Interval]] | None:
    """The values of the variable for which `variable sign bound` holds."""
    bound = _bound(bound)
    if not bound or (
        variable and re.search(rf"(?<![\\a-zA-Z]){re.escape(variable)}(?![a-zA-Z])", bound)
    ):
        return None
    below, above = Interval("()", "-\\infty", bound), Interval("()", bound, "\\infty")
    return variable, {
        "<": [below], ">": [above], "!=": [below, above],
        "<=": [below._replace(brackets="(]")], ">=": [above._replace(brackets="[)")],
    }[sign]  # fmt: skip


def _intersect(one: Interval, other: Interval) -> Interval | None:
    """The intersection of two half-lines; None if both are bounded on the same side."""
    if one.low == "-\\infty":
        one, other = other, one
    if one.low == "-\\infty" or one.high != "\\infty" or other.low != "-\\infty":
        return None
    return Interval(one.brackets[0] + other.brackets[1], one.low, other.high)


def _without(interval: Interval, point: str) -> list[Interval] | None:
    """The two parts of an interval around a point of it, as in `x > 1 and x != 3`."""
    low, value, high = map(_value, (interval.low, point, interval.high))
    if low is None or value is None or high is None or not low < value < high:
        return None
    opening, closing = interval.brackets
    below = Interval(f"{opening})", interval.low, point)
    return [below, Interval(f"({closing}", point, interval.high)]


def _value(bound: str) -> Fraction | float | None:
    if "\\infty" in bound:
        return {"\\infty": math.inf, "-\\infty": -math.inf}.get(bound)
    number = quantities.read_number(bound)
    return number.value if number else None


def _bound(text: str) -> str:
    text = text.strip()
    match = _INFINITY.fullmatch(text)
    return f"{match.group(1)}\\infty" if match else text
