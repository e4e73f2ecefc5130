"""Parses numbers in answers: with commas, fractions, percent signs, currencies and units.

Converts text to exact Fractions and evaluates nothing. Every scan is linear in the text length.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from care_jax.rewards.equivalence.number_words import PARTS, SCALES, in_digits
from care_jax.rewards.equivalence.units import (
    CURRENCIES,
    LENGTHS,
    SIZES_OF_UNITS,
    UNIT_NAMES,
    UNITS,
)

_MAX_BRACKETS = 12  # around a number
_MAX_DIGITS = 60  # limit on digits and on |power of ten|, so that Fractions stay small
_MAX_SCALES = 3  # words such as "million" after a number

_DECIMAL = r"(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)|\d+)?(?:\.\d*)?"
_SCIENTIFIC = re.compile(
    rf"({_DECIMAL})(?:[eE]([+-]?\d+)| ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?\{{? ?([+-]?\d+) ?\}}?)?"
)
_SLASH = re.compile(rf" ?/ ?({_DECIMAL})(?![a-zA-Z])")
_MIXED = re.compile(r"(\d+) (\d+)/(\d+)")
_REPEATING = re.compile(r"(\d{1,20})\.(\d{0,20})\\(?:overline|bar|dot) ?\{?(\d{1,20})\}?")
_LATEX_FRACTION = re.compile(rf"(\d*) ?\\frac\{{(-?{_DECIMAL})\}}\{{({_DECIMAL})\}}")
_SCALES = SCALES | {"百": 100, "千": 10**3, "万": 10**4, "亿": 10**8}
_SHORT_SCALES = {"k": 10**3, "m": 10**6, "mn": 10**6, "b": 10**9, "bn": 10**9}
_SHORT_SCALE = re.compile(r" ?(mn|bn|[kmb])(?![a-z])\s*", re.IGNORECASE | re.ASCII)
_SCALED = re.compile(r"\d[\d.,]*[kKMB]")
_SCALE = re.compile(
    rf"(?:({'|'.join(_SCALES)})|({'|'.join(PARTS)}))s?(?![a-zA-Z])\s*",
    re.IGNORECASE | re.ASCII,
)
_LOWER_UNIT_NAMES = {name.lower(): unit for name, unit in UNIT_NAMES.items()}
# Other units of three or four letters; any other such word directly after a number is a product.
_SHORT_UNITS = ("psi", "ksi", "bar", "torr", "lux", "amu", "kip", "bpm", "fps", "bit", "bits",
                "byte", "yuan", "yen", "rmb", "cups", "pcs", "ppm", "ton", "tons", "atm",
                "mmhg")  # fmt: skip
# Plurals, short units, words after a unit, and what is counted in Chinese.
_COUNTED = re.compile(
    rf"[a-z]+[a-hj-rtv-z]s|{'|'.join(_SHORT_UNITS)}|people|men|women|children|feet|teeth|mice"
    r"|geese|oxen|dice|radii|fish|sheep|aircraft|old|long|wide|high|tall|deep|each|total"
    r"|[个人次名只条张本页棵辆台件块岁年月分角吨支枝种组队箱袋瓶杯]"
)
# Words after a number that change or retract it.
_NOT_UNITS = frozenset({
    "and", "or", "not", "no", "nor", "to", "plus", "minus", "times", "over", "by", "of", "point",
    "pi", "than", "between", "hundred", "thousand", "million", "billion", "trillion", "dozen",
    "half", "halves", "third", "thirds", "quarter", "quarters", "is", "are", "was", "but", "if",
    "maybe", "approximately", "about", "then", "else", "lakh", "lakhs", "crore", "crores",
    "squared", "cubed", "factorial", "doubled", "tripled", "negative", "mod", "modulo", "root",
    "choose", "divided", "pair", "pairs", "couple", "couples", "score", "scores", "wrong",
    "incorrect", "false", "except", "perhaps", "possibly", "probably", "below", "above", "under",
    "does", "has", "always", "as", "yes", "cos", "less", "fewer", "more", "off", "away", "short",
    "apart", "left", "unknown", "undefined", "infinity", "infinite", "none", "guess",
})  # fmt: skip
# Number words: 7 quadrillion, 3 tens, 4 thousandish.
_VAGUE = re.compile(
    rf".*ish|.*illi?[oó]n(?:s|es)?|(?:hundred|dozen|{'|'.join(_SCALES)}).*|fort(?:y|ies|ieths?)|(?:one|two|"
    r"three|thir|four|five|fif|six|seven|eight?|nine?|ten|eleven|twelve|twelf|twen)"
    r"(?:s|ths?|teen(?:s|ths?)?|t(?:y|ies|ieths?))?"
)
# Directly after a number, three or four letters and capitals are a product of variables.
_ATTACHED = {*_SHORT_UNITS, *(alias for alias, name in UNIT_NAMES.items()
                              if name != alias or not alias.isupper())}  # fmt: skip
_PRODUCT = re.compile(
    rf"(?!(?:{'|'.join(map(re.escape, _ATTACHED))})$)(?:[a-z]{{3,4}}|[A-Z]{{1,4}})"
)
_INVERSE = re.compile(r"([^\W\d_]+) ?\^ ?\{? ?-(\d) ?\}?")
_SYMBOL = "|".join(sorted((name for name in UNIT_NAMES if name.isalpha() and len(name) < 4),
                          key=len, reverse=True))  # fmt: skip
_TWO_SYMBOLS = re.compile(rf"({_SYMBOL})({_SYMBOL})")
_UNIT_NOTATION = ((" ^", "^"), ("^1", ""), ("/", " per "), (".", " "), ("\\cdot", " "), ("(", ""),
                  (")", ""), (" squared", "^2"), (" cubed", "^3"), ("平方", "square "),
                  ("立方", "cubic "), ("每", " per "))  # fmt: skip
_OHM = re.compile(r"(?:(?<![^\W\d_])([mkMG]) ?)?\\Omega(?![a-z]) ?")
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])")
_LETTER_PRODUCT = re.compile(r"N [ms]|A [hms]|V [Ams]|[WJ] s|C m|T m|Wh")
_TEMPERATURE = re.compile(r"deg(?:rees?)? ?(?=(?:C|F|celsius|fahrenheit)(?![a-z]))", re.IGNORECASE)
_UNIT_WORD = re.compile(
    r"([^\W\d_]+|[$€£¥₹¢\"]|'{1,2})(?: ?\^ ?\{? ?([23]) ?\}?|([23])(?![\d\w]))?$"
)
_CURRENCY = re.compile(r"(?: |((?:US)?\$|[€£¥₹]|(?:USD|EUR|GBP|CNY|INR|Rs\.?)(?= ?[$\d.])))*")


# 2010, 1990s, the season 2010/11, 2010 (year), 2010年.
_YEAR = re.compile(r"(?:1[5-9]|20)\d\d(?:'?s|/\d\d| ?\(?year\)?| ?年)?")
_DECADE = re.compile(r"(?:1[89]|20)\d0'?s")


def is_year(text: str) -> bool:
    """Whether a text is a calendar year, a decade or a season; `2,020` and `2020.5` are not."""
    return _YEAR.fullmatch(text) is not None


class Number(NamedTuple):
    """A number as written.

    Attributes:
        value: the exact value; "million", "tenths" and the like are applied, a percent sign is not.
        is_percent: followed by a percent sign.
        unit: canonical name of the currency before it and of the unit after it; empty for none.
        is_decimal: written with a decimal point.
    """

    value: Fraction
    is_percent: bool
    unit: str
    is_decimal: bool


@functools.lru_cache(maxsize=16384)  # rollouts of one question often give the same answer
def read_number(text: str, is_gold: bool = False) -> Number | None:
    """Parses a cleaned text that is a number as a whole; None for any other text.

    After 1, and a gold number below it, any word may be a unit: `1 apple`, `1/2 apple`. The mg of
    a gold 2mg is a weight.
    """
    is_word = text.strip().startswith("一")  # such as 一样
    text = in_digits(text.strip())
    if _DECADE.fullmatch(text):  # not seconds
        return None
    for _ in range(_MAX_BRACKETS):
        if len(text) > 2 and text[0] == "(" and text[-1] == ")" and "," not in text:
            text = text[1:-1].strip()  # (1,234) is a point
    is_negative = text.startswith("-")
    body = text[1:] if text[:1] in ("-", "+") else text
    sign = _CURRENCY.match(body)
    assert sign  # it may be empty
    currency = UNIT_NAMES.get(sign.group(1), "")
    body = body[sign.end() :]
    read = _read_magnitude(body)
    if read is None:
        return None
    value, end = read
    tail = body[end:].strip()
    for _ in range(_MAX_SCALES):
        if scale := _SCALE.match(tail):
            whole, part = scale.groups()
            value = value * _SCALES[whole.lower()] if whole else value / PARTS[part.lower()]
            tail = tail[scale.end() :]
    if (scale := _SHORT_SCALE.match(tail)) and (currency or len(scale.group(1)) == 2):
        value, tail = value * _SHORT_SCALES[scale.group(1).lower()], tail[scale.end() :]
    is_percent = tail.startswith("%")
    is_one = not is_word and (value == 1 or (is_gold and value < 1))
    unit = _read_unit(tail[is_percent:].strip(), is_one)
    is_product = _PRODUCT.fullmatch(tail) or (is_gold and tail == "mg")
    if unit is None or (tail == body[end:] and is_product):
        return None
    if currency and unit != currency:
        unit = f"{currency} {unit}".strip()
    return Number(-value if is_negative else value, is_percent, unit, "." in body[:end])


def read_pair(one: str, gold: str) -> tuple[Number | None, Number | None]:
    """An answer and a gold answer as numbers.

    Beside a plain number the letter of `12k` and `1.5M` is a scale.
    """
    number, gold_number = read_number(one), read_number(gold, is_gold=True)
    if number and not number.unit and gold_number is None:
        return number, _read_scaled(gold)
    if gold_number and not gold_number.unit and number is None:
        return _read_scaled(one), gold_number
    return number, gold_number


def _read_scaled(text: str) -> Number | None:
    """A number with k, M or B, as after a currency."""
    number = read_number(f"${text}") if _SCALED.fullmatch(text) else None
    return number and number._replace(unit="")


def _read_magnitude(text: str) -> tuple[Fraction, int] | None:
    """The unsigned number at the start of the text, and its end index."""
    if match := _REPEATING.match(text):
        whole, fixed, repeated = match.groups()
        numerator = int(whole + fixed + repeated) - int(whole + fixed)
        return Fraction(numerator, 10 ** len(fixed) * (10 ** len(repeated) - 1)), match.end()
    if match := _LATEX_FRACTION.match(text) or _MIXED.match(text):
        whole, top, bottom = match.groups()
        value = _divide(top, bottom)
        if value is None or (whole and not 0 < value < 1):  # a product, and no mixed number
            return None
        return Fraction(whole or 0) + value, match.end()
    match = _SCIENTIFIC.match(text)
    assert match  # every part of it is optional
    digits, *exponents = match.groups()
    value = _fraction(digits)
    exponent = int((exponents[0] or exponents[1] or "0")[:9])
    if value is None or abs(exponent) > _MAX_DIGITS:
        return None
    value *= Fraction(10) ** exponent if exponent else 1
    if slash := _SLASH.match(text, match.end()):
        value = _divide(str(value), slash.group(1))
        return None if value is None else (value, slash.end())
    return value, match.end()


def _divide(top: str, bottom: str) -> Fraction | None:
    numerator, denominator = _fraction(top), _fraction(bottom)
    return numerator / denominator if numerator is not None and denominator else None


def _fraction(digits: str) -> Fraction | None:
    digits = digits.replace(",", "").replace(" ", "")
    if len(digits) > _MAX_DIGITS or not any(c.isdigit() for c in digits):
        return None
    return Fraction(digits.rstrip("."))


def _read_unit(text: str, is_one: bool = False, is_known: bool = False) -> str | None:
    """Canonical name of a unit, "" for no unit; None if the text is not a unit.

    Any words may be one if they end in a plural or follow "per", unless it must be known. In "5
    wrong" and "2010 May" the word is no unit; `is_one` means that the unit may be a singular.
    """
    if text in ("times", "倍") and not is_known:
        return "times"
    if text.startswith("\\cdot"):  # a product
        return None
    text = _TEMPERATURE.sub("", _OHM.sub(r"\1Ω ", re.sub(r"\\mu(?![a-z]) ?", "μ", text)))
    text = _INVERSE.sub(_per, _HYPHEN.sub(" ", text))
    for written, plain in _UNIT_NOTATION:
        text = text.replace(written, plain)
    names: list[str] = []
    is_counted = True
    words = text.split()[:8]
    for word in words:
        match = _UNIT_WORD.fullmatch(word)
        if match is None:
            return None
        lower = match.group(1).lower()
        name = UNIT_NAMES.get(match.group(1))
        if lower in _NOT_UNITS or (name is None and _VAGUE.fullmatch(lower)):  # 千克 is kg
            return None
        if name is None:
            # One or two letters are a variable, unless they are a known unit.
            if len(lower) < 3 and lower.isascii():
                return None
            name = _LOWER_UNIT_NAMES.get(lower, None if is_known else lower)
            if name is None:
                return None
        is_counted = (
            is_one
            or (name in UNITS and name not in ("square", "cubic", "per"))
            or names[-1:] == ["per"]
            or _COUNTED.fullmatch(lower) is not None
        )
        power = match.group(2) or match.group(3)
        is_squarable = name in LENGTHS or ("per" in words and name == name.lower())
        if power and not is_squarable:  # in 6s^2 and mV^2 the last letter is a variable
            return None
        name = {"2": "square ", "3": "cubic ", None: ""}[power] + name
        if names[-1:] in (["square"], ["cubic"]):
            name = f"{names.pop()} {name}"
        names.append(name)
    if "per" in names:  # J/(kg K) is J/kg/K
        first = names.index("per")
        below = sorted(name for name in names[first:] if name != "per")
        names[first + 1 :] = ["square s"] if below == ["s", "s"] else below
    unit = " ".join(names).replace("W h", "Wh").strip()
    if len(names) > 1 and all(len(name) == 1 for name in names):
        # 2 m g is a weight, and F s / 2 work.
        return unit if _LETTER_PRODUCT.fullmatch(unit) else None
    return unit if len(names) <= 5 and is_counted else None


def _per(inverse: re.Match) -> str:
    """`s^{-1}` as ` per s^1`. In `ms^{-1}` and `kgm^{-3}` it is of the last of two symbols."""
    word, power = inverse.groups()
    two = _TWO_SYMBOLS.fullmatch(word) if word in ("ms", "Nm") or word not in UNIT_NAMES else None
    top, bottom = two.groups() if two else ("", word)
    return f"{top} per {bottom}^{power}"


def is_close(
    prediction: Number,
    gold: Number,
    *,
    tolerance: float,
    num_decimals: int | None,
    units_matter: bool = False,
) -> bool:
    """Whether two numbers agree. If only one has a percent sign, 50% equals 50, 0.5 and 1/2.

    A number below 1 is then a fraction: 0.39 is 39%, and not 0.39%.

    Args:
        units_matter: a number without a unit differs from one with a unit.
        tolerance: allowed |prediction - gold| / |gold|; 0 is exact.
        num_decimals: numbers that round to the same value agree too. None is six within 0.1%, and
            only if one is a decimal and the other a fraction with no finite decimal expansion.
    """
    if units_matter and bool(prediction.unit) != bool(gold.unit):
        return False
    if prediction.is_percent != gold.is_percent and (prediction.unit or gold.unit):
        return False
    if prediction.unit and gold.unit and prediction.unit != gold.unit:
        factor = conversion(prediction.unit, gold.unit)
        if factor is None:
            return False
        prediction = prediction._replace(value=prediction.value * factor)
    pairs = [(prediction.value, gold.value)]
    if prediction.is_percent != gold.is_percent:
        one, other = (each.value / (100 if each.is_percent else 1) for each in (prediction, gold))
        plain = gold if prediction.is_percent else prediction
        is_fraction = 0 < abs(plain.value) < 1  # 1/2 is not 0.5%
        pairs = [(one, other)] if is_fraction else [*pairs, (one, other)]
    is_default = num_decimals is None
    if is_default and prediction.is_decimal != gold.is_decimal:
        exact = gold.value if prediction.is_decimal else prediction.value
        # A finite decimal expansion: no prime but 2 and 5 divides the denominator.
        is_finite = 10 ** exact.denominator.bit_length() % exact.denominator == 0
        num_decimals = None if is_finite else 6
    for p, g in pairs:
        is_far = is_default and abs(p - g) > abs(g) / 1000  # of numbers below the sixth decimal
        if p == g or (tolerance > 0 and abs(p - g) <= Fraction(tolerance) * abs(g)):
            return True
        if num_decimals is None or is_far:
            continue
        if round(p, num_decimals) == round(g, num_decimals):
            return True
    return False


def conversion(unit: str, other: str) -> Fraction | None:
    """Factor from `unit` to `other`; None if they measure different quantities."""
    short, long = sorted((unit, other), key=len)
    if short in CURRENCIES and long.startswith(f"{short} ") and long[len(short) :].islower():
        return Fraction(1)  # $60 per month for $60, but not $5 K for $5
    if " per " in unit and " per " in other:
        tops, bottoms = zip(unit.split(" per ", 1), other.split(" per ", 1), strict=True)
        top, bottom = (
            Fraction(1) if one == two else conversion(one, two) for one, two in (tops, bottoms)
        )
        return top / bottom if top and bottom else None
    for prefix, power in (("square ", 2), ("cubic ", 3), ("", 1)):
        if unit.startswith(prefix) and other.startswith(prefix):
            unit, other = unit.removeprefix(prefix), other.removeprefix(prefix)
            if sizes := sizes_of((unit, other)):
                return Fraction(sizes[unit], sizes[other]) ** power
    return None


def sizes_of(units: Iterable[str]) -> dict[str, int] | None:
    """The sizes of all units of one quantity; None if the given ones measure different ones."""
    return next((sizes for sizes in SIZES_OF_UNITS if sizes.keys() >= set(units)), None)


@functools.lru_cache(maxsize=16384)
def split_unit(text: str) -> tuple[str, str]:
    """An expression and the name of the known unit after it; (text, "") without one.

    Single letters may be variables, so they count as a unit only after a space. Degrees after the
    argument of a trigonometric function are part of it.
    """
    if _UNIT_BEFORE_COLON.search(text):  # 5 cm:2 m has two units
        return text, ""
    for match in _UNIT_START.finditer(text, max(0, len(text) - _MAX_UNIT_CHARS)):
        body, tail = text[: match.end()], text[match.end() :]
        if tail in _DEGREES and _ANGLE.search(text):
            break
        if len(tail) < 3 and _SYMBOL_AT_END.search(body):
            break
        if _NO_UNIT_TAIL.search(tail) or (body[-1] != " " and not _may_be_attached(tail)):
            continue
        unit = _read_unit(tail, is_known=True)
        is_product = are_letters(unit or "") and not _LETTER_UNIT.fullmatch(unit or "")
        if unit is not None and not is_product:
            return body.strip(), unit
    return text, ""


def are_letters(unit: str) -> bool:
    """Whether the symbols of a unit are letters that may be variables, such as m per s."""
    symbols = [name for name in unit.split() if name not in ("per", "square", "cubic")]
    return bool(symbols) and all(len(name) == 1 for name in symbols)


def _may_be_attached(unit: str) -> bool:
    """Whether a unit may follow a formula without a space; mg would be a product."""
    if not unit[0].isalpha() or unit[0] >= _FIRST_CJK:
        return True
    word = re.split(r"[\W\d_]", unit, maxsplit=1)[0]
    return len(word) > 1 and word != "mg" and word in UNIT_NAMES and not word.isupper()


_FIRST_CJK = "\u2e80"
_MAX_UNIT_CHARS = 40
_DEGREES = [name for name, unit in UNIT_NAMES.items() if unit == "degrees"]
_ANGLE = re.compile(r"(?<!arc)(?:sin|cos|tan|cot|sec|csc)(?![a-gi-z])(?! ?\^ ?\{? ?-)[^=,]*$")
_SYMBOL_AT_END = re.compile(r"\\(?!pi )[a-zA-Z]+ $")  # \mu mg is a product
_UNIT_START = re.compile(
    r"(?:(?<=[\w})\]]) |(?<=[\d})\]])|(?<=[a-z])(?=[\u2e80-\u9fff]))"
    r"(?=[^\W\d_]|[$€£¥₹¢]|\\(?:mu|Omega)(?![a-z]))"
)
_UNIT_BEFORE_COLON = re.compile(r"[^\W\d_] ?:")
# Units of single letters after a formula; m g and F/m may be products and quotients.
_LETTER_UNIT = re.compile(
    r"(?:square |cubic )?\w|[mNJWVACTK](?: m)? per (?:square )?s|N m"
    r"|[NVJCAWT] per (?:(?:square |cubic )?m|C|K)"
)
# Quotes are primes, and an unopened bracket is that of the formula.
_NO_UNIT_TAIL = re.compile(r"['\"]|^[^({]*[)}]")
