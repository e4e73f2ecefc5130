"""Parses numbers in answers: with commas, fractions, percent signs, currencies and units.

Converts text to exact Fractions and evaluates nothing. Every scan is linear in the text length.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

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
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {  # without the plural s
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6,
    "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12,
    "sixteenth": 16, "twentieth": 20, "hundredth": 100,
    **{f"{scale}th": size for scale, size in _SCALES.items()},
}  # fmt: skip
_SCALES |= {"百": 100, "千": 10**3, "万": 10**4, "亿": 10**8}
_SHORT_SCALES = {"k": 10**3, "m": 10**6, "mn": 10**6, "b": 10**9, "bn": 10**9}
_SHORT_SCALE = re.compile(r" ?(mn|bn|[kmb])(?![a-z])\s*", re.IGNORECASE)
_SCALE = re.compile(rf"(?:({'|'.join(_SCALES)})|({'|'.join(_PARTS)}))s?(?![a-zA-Z])\s*")
_UNITS = {
    "degrees": "degrees degree deg 度",
    "cm": "cm centimeter centimeters centimetre centimetres 厘米", "dm": "dm 分米",
    "m": "m meter meters metre metres 米", "mm": "mm millimeter millimeters 毫米",
    "μm": "μm micrometer micrometers", "nm": "nm nanometer nanometers",
    "km": "km kilometer kilometers kilometre kilometres 公里", "in": "in inch inches",
    "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "kg": "kg kilogram kilograms 公斤", "Mg": "Mg", "g": "g gram grams 克",
    "mg": "mg milligram milligrams 毫克",
    "lb": "lb lbs pound pounds",
    "rad": "rad radian radians", "ns": "ns nanosecond nanoseconds",
    "μs": "μs microsecond microseconds", "ms": "ms millisecond milliseconds",
    "s": "s sec secs second seconds 秒",
    "min": "min mins minute minutes 分钟", "h": "h hr hrs hour hours 小时",
    "day": "day days 天", "week": "week weeks",
    "l": "L l liter liters litre litres 升", "ml": "mL ml 毫升", "oz": "oz ounce ounces",
    "": "unit units",
    "square": "square sq", "cubic": "cubic", "per": "per",
    "mi per h": "mph", "km per h": "kph", "N m": "Nm",
    "$": "$ US$ USD dollar dollars", "cents": "¢ cent cents", "€": "€ EUR euro euros",
    "£": "£ GBP", "¥": "¥ CNY RMB 元", "Rs": "₹ Rs Rs. INR rupee rupees",
    "C": "C celsius", "F": "F fahrenheit", "K": "K kelvin kelvins",
    "KB": "KB", "MB": "MB", "GB": "GB", "TB": "TB", "'": "'", '"': '" \'\'',
}  # fmt: skip
# Units with prefixes, such as kW, and their names without one.
_PREFIXES = {"m": 1, "": 10**3, "k": 10**6, "M": 10**9, "G": 10**12}
_PREFIXED = {
    "N": "newton newtons", "J": "joule joules", "W": "watt watts", "V": "volt volts",
    "A": "amp amps ampere amperes", "Ω": "ohm ohms", "Hz": "hertz", "Pa": "pascal pascals",
    "eV": "", "Wh": "",
}  # fmt: skip
_UNITS |= {f"{prefix}{unit}": f"{prefix}{unit}" for unit in _PREFIXED for prefix in _PREFIXES}
_UNITS |= {unit: f"{unit} {names}" for unit, names in _PREFIXED.items()}
_UNIT_NAMES = {alias: name for name, aliases in _UNITS.items() for alias in aliases.split()}
_LOWER_UNIT_NAMES = {alias.lower(): name for alias, name in _UNIT_NAMES.items()}
_CURRENCIES = ("$", "€", "£", "¥", "Rs")
# The size of each unit, in the smallest unit of its group.
_SIZES_OF_UNITS = (
    {"nm": 1, "μm": 10**3, "mm": 10**6, "cm": 10**7, "dm": 10**8, "m": 10**9, "km": 10**12},
    {"in": 1, "ft": 12, "yd": 36, "mi": 63360},
    {"oz": 1, "lb": 16},
    {"mg": 1, "g": 1000, "kg": 10**6, "Mg": 10**9},
    {"ns": 1, "μs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9,
     "day": 86400 * 10**9, "week": 604800 * 10**9},
    {"ml": 1, "l": 1000},
    *({f"{prefix}{unit}": size for prefix, size in _PREFIXES.items()} for unit in _PREFIXED),
    {"cents": 1, "$": 100},
    {"cents": 1, "€": 100},
    # A name or sign that stands for several units.
    {"£": 1, "lb": 1}, {"¥": 1, "yen": 1}, {"¥": 1, "yuan": 1},
    {"degrees": 1, "C": 1}, {"degrees": 1, "F": 1},
    {"'": 1, "ft": 1}, {"'": 1, "min": 1}, {'"': 1, "in": 1}, {'"': 1, "s": 1},
)  # fmt: skip
# Other units of three or four letters; any other such word directly after a number is a product.
_SHORT_UNITS = ("year", "mol", "mmol", "ohm", "amp", "volt", "watt", "cal", "psi", "bar", "torr",
                "lux", "amu", "kip", "rpm", "bpm", "fps", "bit", "bits", "byte", "yuan", "euro",
                "yen", "rmb", "gal", "cups", "pcs", "ppm", "ton", "tons", "atm", "kcal",
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
    "does", "has", "always", "as", "yes", "cos",
})  # fmt: skip
# Number words: 7 quadrillion, 3 tens, 4 thousandish.
_VAGUE = re.compile(
    rf".*ish|.*illi?[oó]n(?:s|es)?|(?:hundred|dozen|{'|'.join(_SCALES)}).*|fort(?:y|ies|ieths?)|(?:one|two|"
    r"three|thir|four|five|fif|six|seven|eight?|nine?|ten|eleven|twelve|twelf|twen)"
    r"(?:s|ths?|teen(?:s|ths?)?|t(?:y|ies|ieths?))?"
)
# Directly after a number, three or four letters and capitals are a product of variables.
_ATTACHED = {*_SHORT_UNITS, *(alias for alias, name in _UNIT_NAMES.items()
                              if name != alias or not alias.isupper())}  # fmt: skip
_PRODUCT = re.compile(
    rf"(?!(?:{'|'.join(map(re.escape, _ATTACHED))})$)(?:[a-z]{{3,4}}|[A-Z]{{1,4}})"
)
_INVERSE = re.compile(r"([^\W\d_]+) ?\^ ?\{? ?-(\d) ?\}?")
_UNIT_NOTATION = ((" ^", "^"), ("^1", ""), ("/", " per "), (".", " "), ("\\cdot", " "), ("(", ""),
                  (")", ""), ("\\Omega", "Ω"), ("\\mu ", "μ"), (" squared", "^2"),
                  (" cubed", "^3"), ("平方", "square "), ("立方", "cubic "))  # fmt: skip
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

    After a gold number up to 1 any word is a unit: `1 apple`. In an answer it may be `1 less`.
    """
    text = text.strip()
    if _DECADE.fullmatch(text):  # not seconds
        return None
    for _ in range(_MAX_BRACKETS):
        if len(text) > 2 and text[0] == "(" and text[-1] == ")" and "," not in text:
            text = text[1:-1].strip()  # (1,234) is a point
    is_negative = text.startswith("-")
    body = text[1:] if text[:1] in ("-", "+") else text
    sign = _CURRENCY.match(body)
    assert sign  # it may be empty
    currency = _UNIT_NAMES.get(sign.group(1), "")
    body = body[sign.end() :]
    read = _read_magnitude(body)
    if read is None:
        return None
    value, end = read
    tail = body[end:].strip()
    for _ in range(_MAX_SCALES):
        if scale := _SCALE.match(tail):
            whole, part = scale.groups()
            value = value * _SCALES[whole] if whole else value / _PARTS[part]
            tail = tail[scale.end() :]
    if (scale := _SHORT_SCALE.match(tail)) and (currency or len(scale.group(1)) == 2):
        value, tail = value * _SHORT_SCALES[scale.group(1).lower()], tail[scale.end() :]
    is_percent = tail.startswith("%")
    unit = _read_unit(tail[is_percent:].strip(), is_one=is_gold and value <= 1)
    if unit is None or (tail == body[end:] and _PRODUCT.fullmatch(tail)):
        return None
    if currency and unit != currency:
        unit = f"{currency} {unit}".strip()
    return Number(-value if is_negative else value, is_percent, unit, "." in body[:end])


def _read_magnitude(text: str) -> tuple[Fraction, int] | None:
    """The unsigned number at the start of the text, and its end index."""
    if match := _REPEATING.match(text):
        whole, fixed, repeated = match.groups()
        numerator = int(whole + fixed + repeated) - int(whole + fixed)
        return Fraction(numerator, 10 ** len(fixed) * (10 ** len(repeated) - 1)), match.end()
    if match := _LATEX_FRACTION.match(text) or _MIXED.match(text):
        whole, top, bottom = match.groups()
        value = _divide(top, bottom)
        return None if value is None else (Fraction(whole or 0) + value, match.end())
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


def _read_unit(text: str, is_one: bool = False) -> str | None:
    """Canonical name of a unit, "" for no unit; None if the text is not a unit.

    Any words may be one if they end in a plural or follow "per". In "5 wrong" and "2010 May" the
    word is no unit; `is_one` means that the unit may be a singular.
    """
    if text.startswith("\\cdot"):  # a product
        return None
    text = _INVERSE.sub(r" per \1^\2", text)
    for written, plain in _UNIT_NOTATION:
        text = text.replace(written, plain)
    names: list[str] = []
    is_counted = True
    for word in text.split()[:8]:
        match = _UNIT_WORD.fullmatch(word)
        if match is None:
            return None
        lower = match.group(1).lower()
        if lower in _NOT_UNITS or _VAGUE.fullmatch(lower):
            return None
        name = _UNIT_NAMES.get(match.group(1))
        if name is None:
            # One or two letters are a variable, unless they are a known unit.
            if len(lower) < 3 and lower.isascii():
                return None
            name = _LOWER_UNIT_NAMES.get(lower, lower)
        is_counted = (
            is_one
            or (name in _UNITS and name not in ("square", "cubic", "per"))
            or names[-1:] == ["per"]
            or _COUNTED.fullmatch(lower) is not None
        )
        power = match.group(2) or match.group(3)
        if power and name != name.lower():  # in mV^2 the V is a variable
            return None
        names.append({"2": "square ", "3": "cubic ", None: ""}[power] + name)
    unit = " ".join(names).replace("degrees C", "C").replace("degrees F", "F")
    return unit if len(names) <= 5 and is_counted else None


def is_close(
    prediction: Number,
    gold: Number,
    *,
    tolerance: float,
    num_decimals: int | None,
    units_matter: bool = False,
) -> bool:
    """Whether two numbers agree. If only one has a percent sign, 50% equals 50, 0.5 and 1/2.

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
        factor = _conversion(prediction.unit, gold.unit)
        if factor is None:
            return False
        prediction = prediction._replace(value=prediction.value * factor)
    pairs = [(prediction.value, gold.value)]
    if prediction.is_percent != gold.is_percent:
        one, other = (each.value / (100 if each.is_percent else 1) for each in (prediction, gold))
        plain = gold if prediction.is_percent else prediction
        is_fraction = not plain.is_decimal and 0 < abs(plain.value) < 1  # 1/2 is not 0.5%
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


def _conversion(unit: str, other: str) -> Fraction | None:
    """Factor from `unit` to `other`; None if they measure different quantities."""
    short, long = sorted((unit, other), key=len)
    if short in _CURRENCIES and long.startswith(f"{short} ") and long[len(short) :].islower():
        return Fraction(1)  # $60 per month for $60, but not $5 K for $5
    if " per " in unit and " per " in other:
        tops, bottoms = zip(unit.split(" per ", 1), other.split(" per ", 1), strict=True)
        top, bottom = (
            Fraction(1) if one == two else _conversion(one, two) for one, two in (tops, bottoms)
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
    return next((sizes for sizes in _SIZES_OF_UNITS if sizes.keys() >= set(units)), None)


def split_unit(text: str) -> tuple[str, str]:
    """An expression and the name of the unit after it; (text, "") without one.

    Single letters may be variables, so they count as a unit only after a space. Degrees after the
    argument of a trigonometric function are part of it.
    """
    match = _UNIT_AT_END.search(text)
    if match is None or (match.group().strip() in _DEGREES and _ANGLE.search(text)):
        return text, ""
    unit = _read_unit(match.group().strip())
    return (text, "") if unit is None else (text[: match.start()].strip(), unit)


_DEGREES = _UNITS["degrees"].split()
_ANGLE = re.compile(r"(?<!arc)(?:sin|cos|tan|cot|sec|csc)(?![a-gi-z])(?! ?\^ ?\{? ?-)[^=,]*$")
_NOT_AT_END = ("per", "square", "sq", "cubic", "'", "''", '"')
_ALIASES = sorted(
    (alias for alias in _UNIT_NAMES if alias not in _NOT_AT_END), key=len, reverse=True
)
_UNIT_AT_END = re.compile(
    r"(?<=[\w})\])] )(?:square |cubic |sq )?(?:" + "|".join(map(re.escape, _ALIASES)) + r")"
    r"(?: ?\^ ?\{? ?[23] ?\}?)?$|(?<=[\d})\]])(?:"
    + "|".join(re.escape(alias) for alias in _ALIASES if len(alias) > 1 and not alias.isupper())
    + r")(?: ?\^ ?\{? ?[23] ?\}?)?$"
)
