"""Compares numerals joined by signs or units: times, dates, ranges, scores, sizes, ratios, sums.

Works on cleaned text and evaluates nothing.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from typing import NamedTuple

from care_jax.rewards.equivalence import quantities

_CLOCK = re.compile(
    r"(\d{1,2})(?: ?[:.] ?(\d{2}))?(?: ?: ?(\d{2}))?(?: ?h)? ?(a\.? ?m\.?|p\.? ?m\.?|o'?clock)?",
    re.IGNORECASE,
)
_NAMED_HOURS = {"noon": "12:00 pm", "midday": "12:00 pm", "midnight": "12:00 am"}
_CHINESE_CLOCK = re.compile(r"(上午|下午)?(\d{1,2}) ?[时点](?:(\d{1,2}) ?分)?")


class Clock(NamedTuple):
    """A time of day in seconds since midnight, and whether its text is unambiguous."""

    seconds: int
    is_certain: bool


def read_clock(text: str) -> Clock | None:
    """A time of day; None for any other text.

    3:15 may also be a ratio; 3:15 PM, 3:05, 03:15:00 and 3 o'clock may not. Without AM or PM a time
    is in 24-hour format.
    """
    text = _NAMED_HOURS.get(text.casefold(), text)
    chinese = _CHINESE_CLOCK.fullmatch(text.strip())
    if chinese:
        half, hours, minutes = chinese.groups("")
        text = f"{hours}:{minutes:0>2}" + {"上午": " am", "下午": " pm"}.get(half, "")
    match = _CLOCK.fullmatch(text.strip())
    if match is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups()[:3])
    half = (match.group(4) or "")[:1].lower()
    is_certain = bool(
        chinese or half or match.group(3) or text[0] == "0" or (match.group(2) or "")[:1] == "0"
    )
    is_written = bool(match.group(2)) and (":" in text or half in ("a", "p"))
    if not (is_written or half) or minutes > 59 or seconds > 59:
        return None
    if hours > 23 or (half and not 1 <= hours <= 12):
        return None
    if half in ("a", "p"):
        hours = hours % 12 + 12 * (half == "p")
    return Clock(3600 * hours + 60 * minutes + seconds, is_certain)


_SUMMAND = re.compile(r"(\d[\d.,/]*)( ?(?:[^\W\d]+|'{1,2}|\"))(?:,? (?:and )?|(?=\d)|$)")
_CHINESE_MINUTES = re.compile(r"(?<=时)( ?\d+ ?)分(?!钟)")
_ARC = {"degrees": 3600, "'": 60, "''": 1, '"': 1}
_MAX_SUMMANDS = 4


def read_compound(text: str) -> quantities.Number | None:
    """A quantity in several units, ever smaller, such as 5 ft 6 in; None for any other text.

    Its unit is the first one. In 5° 30' the others are minutes and seconds of arc.
    """
    text = _CHINESE_MINUTES.sub(r"\1分钟", text)
    parts: list[quantities.Number] = []
    end = 0
    while end < len(text):
        match = _SUMMAND.match(text, end)
        if match is None or len(parts) == _MAX_SUMMANDS:
            return None
        part = quantities.read_number("".join(match.groups()))
        if part is None or not part.unit:
            return None
        parts.append(part)
        end = match.end()
    units = [part.unit for part in parts]
    sizes = _ARC if units[:1] == ["degrees"] else quantities.sizes_of(units)
    if len(parts) < 2 or sizes is None or not set(units) <= sizes.keys():
        return None
    if any(part.is_percent for part in parts):
        return None
    if any(sizes[one] <= sizes[other] for one, other in itertools.pairwise(units)):
        return None
    total = sum(part.value * sizes[part.unit] for part in parts)
    is_decimal = any(part.is_decimal for part in parts)
    return quantities.Number(Fraction(total) / sizes[units[0]], False, units[0], is_decimal)


_NAMES = ("january", "february", "march", "april", "may", "june", "july", "august", "september",
          "october", "november", "december", "monday", "tuesday", "wednesday", "thursday", "friday",
          "saturday", "sunday")  # fmt: skip
_NAME = r"(?P<name>[a-z]{3,9})\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_DATE_ORDERS = [
    re.compile(order, re.IGNORECASE)
    for order in (
        rf"(?:(?:in|on) )?{_NAME}(?: {_DAY})?(?:,? {_YEAR})?",
        rf"{_DAY} (?:of )?{_NAME}(?:,? {_YEAR})?",
        rf"{_YEAR},? {_NAME}(?: {_DAY})?",
    )
]


def _read_date(text: str) -> tuple[str, str | None, int] | None:
    """The name of the month or weekday, the year and the day, of which all but one may be absent.

    A name may be abbreviated to three letters or more.
    """
    for match in filter(None, (order.fullmatch(text) for order in _DATE_ORDERS)):
        parts = match.groupdict()
        for name in _NAMES:
            if name.startswith(parts["name"].lower()):
                return name, parts.get("year"), int(parts.get("day") or 0)
    return None


# An unsigned number; a price may have a scale, $30k-$40k.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,60})(?:\.\d{1,60})?[kKmMbB]?"
_SCALES = {"k": "e3", "m": "e6", "b": "e9"}
_WITHOUT_SIGNS = str.maketrans("", "", "$%")
_COLON = re.compile(r":(?![^()\[\]{}]*[)\]}])")  # outside of brackets
_TWO_COLONS = re.compile(r":[^,;]*:")
_JOINED = re.compile(rf"(?:{_DIGITS} ?[-/:x] ?)+{_DIGITS}")
_TIMES = re.compile(r" (?:by|\\times) | ?\\times ")
_STARTS = set("$0123456789")
_JOINT = re.compile(r"[-/:x]")


def is_range(text: str) -> bool:
    """Whether a text is numerals joined by hyphens, or a date such as 1/2/2010."""
    return re.search(r"-|/[^:]*/", text) is not None and _JOINED.fullmatch(text) is not None


def _scaled(numeral: str) -> str:
    """A numeral as Python reads it: 30k is 30e3."""
    numeral = numeral.replace(",", "").strip().lower()
    return numeral[:-1] + _SCALES[numeral[-1]] if numeral[-1] in _SCALES else numeral


def same_joined(one: str, other: str) -> bool | None:
    """Whether two ranges, dates, scores, sizes or ratios are the same; None for other texts.

    `18-24` is no difference and `12/5/2010` no quotient, so their numerals are compared one by one.
    Only ratios may be multiples of each other, unless both may be times of day. The month of a date
    may be in words.
    """
    if (date := _read_date(one)) and (other_date := _read_date(other)):
        return date == other_date
    if not {one[:1], other[:1]} <= _STARTS:
        return None
    to = ":" if ":" in one + other else "-"
    texts = [
        _TIMES.sub("x", text.replace(" to ", to)).translate(_WITHOUT_SIGNS) for text in (one, other)
    ]
    if not all(map(_JOINED.fullmatch, texts)):
        return None
    signs = [set(text) & {"$", "%"} for text in (one, other)]
    if all(signs) and signs[0] != signs[1]:
        return False
    joints, other_joints = map(_JOINT.findall, texts)
    if "/" in joints + other_joints and joints.count(":") == other_joints.count(":") > 0:
        return None  # a ratio of fractions
    if joints != other_joints:
        return False
    if any(c.isalpha() and c != "x" for c in "".join(texts)) and "$" not in one + other:
        return None  # 3k-2k is a difference
    values, other_values = (
        [Fraction(_scaled(part)) for part in _JOINT.split(text)] for text in texts
    )
    is_ratio = set(joints) == {":"} and all(values) and all(other_values)
    if is_ratio and not all(map(read_clock, texts)):
        return all(
            value * other_values[0] == other_value * values[0]
            for value, other_value in zip(values, other_values, strict=True)
        )
    return values == other_values


def ratios_as_latex(one: str, other: str) -> tuple[str, str] | None:
    """Both texts, with a ratio a:b as the quotient and a:b:c as (b/a, c/a).

    None if they cannot be the same: ratios of other numbers of terms, or terms in several units.
    """
    ratios = _ratio(one), _ratio(other)
    lengths = [len(terms) for terms in ratios]
    if 0 in lengths or (lengths[0] != lengths[1] and max(lengths) > 2):
        return None
    return _proportion(ratios[0]), _proportion(ratios[1])


def _ratio(text: str) -> list[str]:
    """The terms of a ratio without their unit, of any other text itself; [] for what is neither.

    Computer algebra would misread a list of ratios, and a first term of 0.
    """
    split = [quantities.split_unit(part.strip()) for part in _COLON.split(text)]
    terms, units = [term for term, _ in split], [unit for _, unit in split]
    if len(terms) == 1 or not all(terms) or set(text) & set("=<>,;"):
        return [] if _TWO_COLONS.search(text) else [text]
    # In 2:3 cm the unit is of both.
    is_mixed = len(set(units[:-1])) > 1 or (any(units[:-1]) and units[-1] not in ("", units[0]))
    return [] if is_mixed or terms[0] == "0" else terms


def _proportion(terms: list[str]) -> str:
    """A ratio as one value in LaTeX; a text that is none as it is."""
    first, *others = terms
    quotients = [f"\\frac{{{other}}}{{{first}}}" for other in others]
    if len(terms) == 2:
        return f"\\frac{{{first}}}{{{others[0]}}}"
    return f"({', '.join(quotients)})" if quotients else first


_STATEMENTS = re.compile(r"(?:\(\d{1,2}\)(?:, ?| and | )?)+")


def is_statement(text: str) -> bool:
    """Whether a text is the number of a statement, such as `(1)`."""
    return _STATEMENTS.fullmatch(text) is not None


def same_statements(one: str, other: str) -> bool | None:
    """Whether two texts such as `(1)(3)` name the same statements; None for other texts."""
    if not all(map(_STATEMENTS.fullmatch, (one, other))):
        return None
    numbers, others = (sorted(re.findall(r"\d+", text)) for text in (one, other))
    return numbers == others


_BASE = re.compile(r"\d\)?_ ?\{? ?\(?\d")
_BASED = re.compile(r"\(?(\d+)\)?_ ?\{? ?\(?(\d+)\)? ?\}?")


def same_numeral(prediction: str, gold: str) -> bool | None:
    """Whether two numerals are the same in one base, such as `101_2`; None if none has a base.

    A prediction without a base is taken to be in that of the gold answer.
    """
    if not (_BASE.search(prediction) or _BASE.search(gold)):
        return None
    found = (_BASED.fullmatch(text) for text in (prediction, gold))
    numerals, bases = zip(
        *(
            match.groups() if match else (text, "")
            for match, text in zip(found, (prediction, gold), strict=True)
        ),
        strict=True,
    )
    return numerals[0] == numerals[1] and bases[0] in ("", bases[1])
