"""Writes numbers in English or Chinese words as digits: `twenty-five`, `two and a half`, `三`.

A closed grammar of cardinals, mixed numbers and ordinals. Any other text stays as it is, and so
does a fraction alone, `one half`, which the recorded cases tell from 1/2.
"""

from __future__ import annotations

import re
from fractions import Fraction

SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
PARTS = {  # without the plural s
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6,
    "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12,
    "sixteenth": 16, "twentieth": 20, "hundredth": 100,
    **{f"{scale}th": size for scale, size in SCALES.items()},
}  # fmt: skip
_DIGITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_SMALL = ["zero", *_DIGITS, "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen",
          "seventeen", "eighteen", "nineteen"]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SIZES = {word: size for size, word in enumerate(_SMALL)}
_SIZES |= {word: 10 * size for size, word in enumerate(_TENS, start=2)}
_SIZES |= {"a": 1, "an": 1}
_COLLECTIONS = {"hundred": 100, "dozen": 12}
_IRREGULAR = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
              "nine": "ninth", "twelve": "twelfth"}  # fmt: skip

_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[ -](?:{'|'.join(_DIGITS)}))?|{'|'.join(_SMALL[::-1])})"
_BELOW_1000 = (
    rf"(?:(?:{_BELOW_100} |an? )?(?:{'|'.join(_COLLECTIONS)})(?:(?: and)? {_BELOW_100})?"
    rf"|{_BELOW_100})"
)
_SCALE = rf" (?:{'|'.join(SCALES)})"
_CARDINAL = rf"(?:{_BELOW_1000}|an?(?={_SCALE}))(?:{_SCALE}(?:,? (?:and )?{_BELOW_1000})?)*"
_PART = rf"(?:{'|'.join(PARTS)})"
_NUMBER = re.compile(
    rf"({_CARDINAL}|\d+(?= and ))(?: and (an?|{_BELOW_100})[ -]({_PART})s?)?"
    rf"(?![a-z]|[ -]{_PART})",
    re.IGNORECASE | re.ASCII,  # not `sıx`, which `_SIZES` lacks
)
_RESTATED = re.compile(r"([^()]+) \(([^()]+)\)")
_SIGN = re.compile(r"(?:minus|negative)[ -]|负", re.IGNORECASE)

_CHINESE_DIGITS = {"一": 1, "二": 2, "两": 2, "三": 3, "四": 4, "五": 5, "六": 6, "七": 7, "八": 8,
                   "九": 9, "零": 0}  # fmt: skip
_CHINESE_TENS = {"十": 10, "百": 100, "千": 1000}
# Numerals below 10, 100, 1000 and 10,000, without 一百五, which may be 105 or 150.
_1 = "[一二两三四五六七八九]"
_2 = f"(?:{_1}?十{_1}?|{_1})"
_3 = f"(?:{_1}百(?:零{_1}|{_1}十{_1}?)?|{_2})"
_4 = f"(?:{_1}千(?:零{_2}|{_1}百(?:零{_1}|{_1}十{_1}?)?)?|{_3}|零)"
_CHINESE = re.compile(rf"{_4}(?![一二两三四五六七八九十百千零])")
_CHINESE_FRACTION = re.compile(rf"(百|\d+|{_4})分之(\d+(?:\.\d+)?|{_4})")


def in_digits(text: str) -> str:
    """The text with the number at its start, and the sign of it, in digits."""
    if restated := _RESTATED.fullmatch(text):  # `five (5)`, but not `5 (5)`
        one, other = map(in_digits, restated.groups())
        return one if one == other and restated[1] != restated[2] else text
    sign = _SIGN.match(text)
    text = text[sign.end() :] if sign else text
    if match := _CHINESE_FRACTION.match(text):
        bottom, top = map(_chinese_digits, match.groups())
        text = f"{top}%" if bottom == "100" else f"{top}/{bottom}"
        text += match.string[match.end() :]
    elif match := _CHINESE.match(text):
        text = f"{_chinese_digits(match.group())}{text[match.end() :]}"
    elif match := _NUMBER.match(text):
        whole, top, part = match.groups()
        value = _value(whole) + (Fraction(_value(top), PARTS[part.lower()]) if part else 0)
        text = f"{value}{text[match.end() :]}"
    return f"-{text}" if sign else text


def _chinese_digits(numeral: str) -> str:
    """A Chinese numeral in digits; one in digits as it is."""
    if numeral[0] not in _CHINESE_DIGITS and numeral[0] not in _CHINESE_TENS:
        return numeral
    total = digit = 0
    for c in numeral:
        if c in _CHINESE_TENS:
            total, digit = total + (digit or 1) * _CHINESE_TENS[c], 0
        else:
            digit = _CHINESE_DIGITS[c]
    return str(total + digit)


def _value(words: str) -> int:
    total = group = 0
    for word in re.findall(r"\w+", words.lower()):
        if word in SCALES:
            total, group = total + max(group, 1) * SCALES[word], 0
        elif word in _COLLECTIONS:
            group = max(group, 1) * _COLLECTIONS[word]
        elif word != "and":
            group += _SIZES[word] if word in _SIZES else int(word)
    return total + group


def _ordinals() -> dict[str, str]:
    """`first` to `ninety-ninth`, and their forms with digits."""
    tens = [ten + digit for ten in _TENS for digit in ["", *(f"-{each}" for each in _DIGITS)]]
    ordinals = {}
    for size, cardinal in enumerate(_SMALL + tens):
        start, hyphen, last = cardinal.rpartition("-")
        last = _IRREGULAR.get(last) or f"{last.removesuffix('y')}{'ie' * last.endswith('y')}th"
        ending = "th" if 10 < size < 20 else {1: "st", 2: "nd", 3: "rd"}.get(size % 10, "th")
        ordinals[f"{start}{hyphen}{last}"] = f"{size}{ending}"
    return ordinals


ORDINALS = _ordinals()
