"""Rewrites formulas into the LaTeX that computer algebra reads, and refuses expensive ones.

Policies write products without a sign, functions without a backslash and angles in degrees. The
parser of math_verify reads only some of these, and misreads others. Works on text and evaluates
nothing; every scan is linear in the length of the text.
"""

from __future__ import annotations

import re
import zlib

from care_jax.rewards.equivalence import boxes, free_text, notation, quantities
from care_jax.rewards.equivalence.characters import GREEK

_MAX_CHARS = 400
_MAX_DEPTH = 12  # of nested brackets
_MAX_EXPONENT = 99

_FUNCTIONS = (
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc",
    "log", "ln", "lg", "exp",
)  # fmt: skip
# Lower-case words allowed in mathematics; any other one of three or more letters means prose.
_WORDS = frozenset({
    *_FUNCTIONS, "sqrt", "pi", "max", "min", "gcd", "lcm", "mod", "deg", "det", "abs", "infty",
    "inf", "and", "or", "degrees",
})  # fmt: skip
_WORD = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[a-zA-Z]+|[a-zA-Z]{2,}")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
_LETTER = re.compile(rf"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])|\\(?:{GREEK})(?![a-z])")
_COEFFICIENT = re.compile(r"(?<=\d)[a-zA-Z][a-z]{2,3}(?![a-zA-Z])")
# A word such as Male; Mgh, without a vowel, is a product.
_TITLE = re.compile(r"[A-Z](?=[a-z]*[aeiouy])[a-z]+|[AEIOU][a-z]+")
# Words that may stand before a number in a formula.
_BEFORE_NUMBER = "".join(
    f"(?<!{word})" for word in (*_FUNCTIONS, "sqrt", "pi", "mod", "gcd", "lcm", "and", "or")
)
_PREPOSITION = "as|at|by|if|in|is|no|of|on|per|so|to|up|vs"
# Two numbers, an outline number such as 1.0.25, a Roman numeral such as II, a number after a word
# as in `5 ft 6 in` and `4 r 3`, and short words as in `2 in 5` and `30 N of W`; `v + at` is a sum.
_NO_FORMULA = re.compile(
    rf"(?<!_)\d \d|\d\.\d+\.\d|II|(?<![\\a-zA-Z_^])[a-zA-Z]+{_BEFORE_NUMBER} \d"
    rf"|(?<=[\w)}}'] )(?:{_PREPOSITION}) (?=[\w\\-])|^(?:in|is|it|no|of|ok|on|or|so|to|up)$"
    r"|\\circ(?![a-z])"  # functions composed, which do not commute
)
_ORDER = re.compile(r"[A-Z](?:_?\d)?(?:(?: ?- ?| )[A-Z](?:_?\d)?){2,}")  # such as A-C-B
# Three or more capitals with plain numbers, such as C2H5OH or Ca(OH)2, whose order matters.
_CHEMICAL = re.compile(r"(?=.*[a-zA-Z)]\d)\d*(?:\(?[A-Z][a-z]?\d*(?:\)\d*)?){3,}")
_VECTOR_PRODUCT = re.compile(r"\\(?:vec|hat|overrightarrow)(?![a-z])[^=,]*\\times(?![a-z])")
_PRODUCT_SIGN = re.compile(r"\\(?:times|cdot)(?![a-z])")
_FIRST_CJK = "\u2e80"
_FIGURE = re.compile(r"(?:(?:m ?(?=\\?angle))?\\?(angle|triangle|square) ?)?\{? ?([A-Z]{3,4}) ?\}?")
_SYMMETRIC = re.compile(r"\\(?:parallel|perp|cap|cup|cong|sim|wedge|vee)(?![a-z])")

_ANGLE_NAME = re.compile(r"\\angle ?([A-Z])([A-Z])([A-Z])(?![a-zA-Z])")
_PLAIN_NAME = re.compile(
    rf"(?<![\\a-zA-Z])([a-zA-Z]{{0,2}}?)({'|'.join(_FUNCTIONS)})(?=[A-Zxyz]?(?![a-zA-Z]))"
)
# In `\\sin 2x/3` and `\\ln 2 \\cdot k` the argument ends; `\\sin\\pi/6` is of 30 degrees.
_SCRIPT = r"(?:\w|\{[^{}]*\})"
_SYMBOL = rf"(?:\\(?:{GREEK})(?![a-z])|[a-zA-Z])(?: ?_ ?{_SCRIPT})?"
_ARGUMENT = re.compile(
    rf"(\\(?:{'|'.join(_FUNCTIONS)})(?![a-zA-Z])(?: ?[_^] ?{_SCRIPT}){{0,2}}) {{0,2}}"
    rf"(\d+(?:\.\d+)?|\\(?:frac ?\{{[^{{}}]*\}}|sqrt) ?\{{[^{{}}]*\}}"
    rf"|(?:\d+(?:\.\d+)? ?)?{_SYMBOL}(?: ?\^ ?{_SCRIPT})?)"
    rf"(?= ?(?:/|\*|\\(?:cdot|times|{'|'.join(_FUNCTIONS)})(?![a-zA-Z])))"
)
_PLAIN_ROOT = re.compile(r"(?<![\\a-zA-Z])([a-zA-Z]{0,2})sqrt ?(\d+)?(?![a-zA-Z])")
# 1 3/4 before a symbol is a sum, and in 1/2 x the symbol is no part of the denominator.
_MIXED = re.compile(r"(?<![\w.^}\]])(\d+) ?\\frac\{(\d{1,9})\}\{(\d{1,9})\}")
_SLASH = re.compile(r"(?<![\w.^)}\]])(\d+)/(\d+)(?= ?(?:[a-zA-Z]|\\(?!times|cdot|div)))")
_ROOT_OF_BRACKET = re.compile(r"(\\sqrt(?:\[\w\])?) ?\(")
_CAPITAL_I = re.compile(r"\\[a-zA-Z]+|(I)")
_INDEXED = re.compile(r"\\[a-zA-Z]+|(?<![\^_])([a-zA-Z])(\d+)(?![\d.])")
_POWER = re.compile(r"\^ ?(?:\(([^()]*)\)|(-?\d{2,}|-\w))")
_DECIMAL_POWER = re.compile(r"\^ ?(?:\{ ?(-?\d{0,2})\.(\d{1,3}) ?\}|(-?\d{0,2})\.(\d{1,3})(?!\d))")
_EXPONENT_OF_TEN = re.compile(r"(?<=\d)[eE]\+?(-?\d{1,2})(?!\d)")
_BRACKETS_SIDE_BY_SIDE = re.compile(r"(?<=\)) ?(?=\()|(?<![\^_\d.])(\d+(?:\.\d+)?) ?(?=\()")
_TRIGONOMETRIC = re.compile(r"(?<!arc)(?:sin|cos|tan|cot|sec|csc)(?![a-gi-z])(?! ?\^ ?\{? ?-)")
_ANGLE = re.compile(
    r"(\d+(?:\.\d+)?|\\?[a-zA-Z]+|\([^()]*\)|\\frac\{[^{}]*\}\{[^{}]*\}) ?(?:degrees?|deg)(?![a-z])"
)
_RADIANS = r"(\\frac{\1 \\pi}{180})"

# `30^0` beside degrees, and degrees in a formula before its end, which are not those of `25 ° C`.
_POWER_OF_ZERO = re.compile(r"(?<=[\d)]) ?\^ ?0(?!\d)")
_INNER_DEGREES = re.compile(r" ?degrees ?(?=[-+*/(){}]|\\(?:times|cdot))")

_MARKED_LETTER = re.compile(r"\\vec\{(\w|\\[a-z]+)\}")
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_LEADING_PLUS_MINUS = re.compile(r"(^|[=({,]) ?\\pm(?![a-z]) ?")

# The parser would differentiate, and every rate is 0 for it.
_DERIVATIVE = re.compile(
    r"\\frac\{ ?(?:d|\\partial)(?: ?\^ ?\{?\d\}?)? ?(?:\\?[a-zA-Z]+)? ?\}"
    r"\{ ?(?:d|\\partial) ?\\?[a-zA-Z]+(?: ?\^ ?\{?\d\}?)? ?\}"
)
# One symbol: in `\\frac{\\Delta v}{\\Delta t}` no factor cancels.
_DIFFERENCE = re.compile(rf"\\[dD]elta ?{_SYMBOL}")
_EXPENSIVE = re.compile(
    r"!(?!=)|\\(?:sum|int|oint|prod|lim|binom|dbinom|tbinom|choose)(?![a-z])|factorial|binomial|"
    + _DERIVATIVE.pattern
)
_EXPONENT = re.compile(r"(?:\^|\*\*) ?(?:\{([^{}]*)(\{)?|\(([^()]*)(\()?|(\d+|.))")
# Factorials and binomials small enough to compute.
_SMALL = re.compile(r"(?<![\d^)}])\d{1,2}!(?!!)|\\[dt]?binom\{\d{1,2}\}\{\d{1,2}\}")


def is_mathematics(text: str, other: str) -> bool:
    """Whether a text is plausible input for computer algebra: neither prose nor program code.

    A short word counts as a product of variables after a digit, or if the other text has its
    letters as variables; one such as Male also in a formula. Three capitals joined by hyphens or
    spaces, as in the other text, are an order.
    """
    if any(c in text for c in '"`@#?…') or "__" in text or _NO_FORMULA.search(text):
        return False
    if any(c >= _FIRST_CJK for c in text) or _CHEMICAL.fullmatch(text):
        return False
    if _ORDER.fullmatch(text) and _ORDER.fullmatch(other):
        return False
    is_formula = free_text.FORMULA_SIGN.search(text) is not None
    text = _PLAIN_ROOT.sub(r"\1\\sqrt ", _PLAIN_NAME.sub(r"\1\\\2 ", _COEFFICIENT.sub("", text)))
    variables = set(_VARIABLE.findall(other))
    # Two letters are a product or a segment; up to four capitals name the corners of a figure.
    return all(
        word.startswith("\\")
        or word in _WORDS
        or len(word) <= 2
        or (len(word) <= 4 and not word.islower() and (is_formula or not _TITLE.fullmatch(word)))
        or (len(word) <= 4 and set(word) <= variables)
        for word in _WORD.findall(text)
    )


def has_variable(text: str) -> bool:
    """Whether the text has a single letter, Latin or Greek, as a name."""
    return _LETTER.search(text) is not None


def align(one: str, other: str, units_matter: bool) -> list[str]:
    """Both texts in one notation of angles and vectors, as the two together show it."""
    texts = [one, other]
    if "degrees" in one + other:
        texts = _align_angles(one, other, units_matter)
    if ("\\vec" in one) != ("\\vec" in other) and not any(map(_PRODUCT_SIGN.search, texts)):
        texts = [_MARKED_LETTER.sub(r"\1", text) for text in texts]
    return [_both_signs(text) for text in texts]


def _align_angles(one: str, other: str, units_matter: bool) -> list[str]:
    """Both texts with degrees as multiples of π beside one, or without.

    A formula may omit them, as `180 - 2x` does, unless a trigonometric function needs them.
    """
    texts = [_POWER_OF_ZERO.sub(" degrees", text) for text in (one, other)]
    units = {quantities.split_unit(text)[1] for text in texts} - {"", "degrees"}
    if units - {"rad"}:
        return texts
    if {("degrees" in each, "\\pi" in each) for each in texts} == {(True, False), (False, True)}:
        return [_ANGLE.sub(_RADIANS, text) for text in texts]
    is_needed = any("\\pi" in text or _TRIGONOMETRIC.search(text) for text in texts)
    if units or units_matter or is_needed:
        return texts
    return [_INNER_DEGREES.sub("", text) if has_variable(text) else text for text in texts]


def _both_signs(text: str) -> str:
    """The two values of `a \\pm b`; a text with several such signs, or with a list, as it is."""
    if len(_PLUS_MINUS.findall(text)) != 1 or "\\mp" in text:
        return text
    listed = notation.split_list(text)
    if listed and listed[0] != "()":
        return text
    plus = _PLUS_MINUS.sub("+", _LEADING_PLUS_MINUS.sub(r"\1", text))
    return f"{plus}, {_PLUS_MINUS.sub('-', text)}"


def has_vector_product(one: str, other: str) -> bool:
    """Whether two products are compared of which one is of vectors, where the order matters."""
    is_product = all(map(_PRODUCT_SIGN.search, (one, other)))
    return is_product and any(map(_VECTOR_PRODUCT.search, (one, other)))


def same_figure(one: str, other: str) -> bool | None:
    """Whether two names by corners, such as `\\angle ABC`, name the same; None for other texts.

    So do both orders of a relation such as `AB \\perp CD`.
    """
    signs = _SYMMETRIC.findall(one)
    if len(signs) == 1 and signs == _SYMMETRIC.findall(other):
        sides = (sorted(map(notation.key, _SYMMETRIC.split(text))) for text in (one, other))
        is_same = next(sides) == next(sides)
        return is_same or _corresponding(one) == _corresponding(other) != set() or None
    name, other_name = _FIGURE.fullmatch(one), _FIGURE.fullmatch(other)
    if not (name and other_name):
        return None
    (kind, corners), (other_kind, others) = name.groups(""), other_name.groups("")
    if len(corners) != len(others) or (kind and other_kind and kind != other_kind):
        return False
    kind = kind or other_kind
    if kind in ("triangle", "square"):  # they start at any corner
        corners *= 2
    return others in corners or (kind != "" and others[::-1] in corners)


def _corresponding(text: str) -> set[frozenset[tuple[str, str]]]:
    """The pairs of corners in `\\triangle ABC \\sim \\triangle DEF`, from both sides."""
    figures = [_FIGURE.fullmatch(side.strip()) for side in _SYMMETRIC.split(text)]
    corners = [figure.group(2) for figure in figures if figure and figure.group(1) == "triangle"]
    if len(corners) != 2 or any(len(each) != 3 for each in corners):
        return set()
    return {frozenset(zip(*each, strict=True)) for each in (corners, corners[::-1])}


def as_latex(text: str) -> str:
    """The same formula with functions, roots, powers, products and degrees written out in LaTeX."""
    text = _ANGLE_NAME.sub(_angle_as_symbol, text)
    text = _PLAIN_ROOT.sub(
        lambda m: f"{m.group(1)}\\sqrt{{{m.group(2)}}}" if m.group(2) else f"{m.group(1)}\\sqrt ",
        _PLAIN_NAME.sub(r"\1\\\2 ", text.replace("**", "^")),
    )
    text = _EXPONENT_OF_TEN.sub(r" \\times 10^{\1}", text)
    # The parser takes I for the imaginary unit, and drops its index and its power.
    text = _CAPITAL_I.sub(lambda m: "\\mathit{I}" if m.group(1) else m.group(), text)
    text = _INDEXED.sub(  # x2 is x_2, and not 2x
        lambda m: f"{m.group(1)}_{{{m.group(2)}}}" if m.group(1) else m.group(), text
    )
    text = _DECIMAL_POWER.sub(_as_fraction, text)
    text = _POWER.sub(lambda match: f"^{{{match.group(1) or match.group(2)}}}", text)
    text = _brace_roots(text)
    text = _DIFFERENCE.sub(_as_symbol, _DERIVATIVE.sub(_as_symbol, text))
    text = _SLASH.sub(r"\\frac{\1}{\2}", text)
    text = _MIXED.sub(_mixed_number, text).replace("\\lg", "\\log_{10}")
    if _TRIGONOMETRIC.search(text):  # degrees are the unit of its argument
        text = _ANGLE.sub(_RADIANS, text)
    text = _ARGUMENT.sub(r"\1(\2)", text)
    if "," not in text:
        text = _BRACKETS_SIDE_BY_SIDE.sub(r"\1 \\cdot ", text)
    return text


def _angle_as_symbol(angle: re.Match) -> str:
    """A symbol for `\\angle ABC`, the same for CBA, as its letters are no product."""
    side, vertex, other = angle.groups()
    key = f"{min(side, other)}{vertex}{max(side, other)}"
    return f"\\theta_{{{zlib.crc32(key.encode())}}}"


def _as_fraction(power: re.Match) -> str:
    """The exponent 0.5 as 1/2, as computer algebra rounds a decimal."""
    whole, decimals = power.groups()[:2] if power.group(2) else power.groups()[2:]
    return f"^{{\\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}}}"


def _as_symbol(match: re.Match) -> str:
    """A symbol for a part of a formula, the same for each of its spacings."""
    return f"D_{{{zlib.crc32(re.sub('[ {}]', '', match.group()).encode())}}}"


def _mixed_number(match: re.Match) -> str:
    """`1\\frac{3}{4}` as a sum; an improper fraction is a factor."""
    whole, top, bottom = match.groups()
    sign = "+" if int(top) < int(bottom) else " \\cdot "
    return f"({whole}{sign}\\frac{{{top}}}{{{bottom}}})"


def _brace_roots(text: str) -> str:
    """`\\sqrt(x)` as `\\sqrt{x}`."""
    while match := _ROOT_OF_BRACKET.search(text):
        end = boxes.closing(text, match.end(), "(")
        if end < 0:
            break
        text = f"{text[: match.end(1)]}{{{text[match.end() : end]}}}{text[end + 1 :]}"
    return text


def refusal(prediction: str, gold: str) -> str:
    """Why a prediction is too expensive, or "". Constructs that the gold also has are allowed."""
    if max(len(prediction), len(gold)) > _MAX_CHARS:
        return "length"
    depth = deepest = 0
    for c in prediction:
        depth += (c in "([{") - (c in ")]}")
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        return "nesting"
    licensed = set(_EXPENSIVE.findall(gold))
    for construct in _EXPENSIVE.findall(_SMALL.sub("", prediction)):
        if construct not in licensed:
            return construct.lstrip("\\")
    if _largest_exponent(prediction) > max(_MAX_EXPONENT, _largest_exponent(gold)):
        return "exponent"
    return ""


def _largest_exponent(text: str) -> float:
    """The largest number in an exponent; infinite if an exponent contains another one."""
    largest = 0.0
    for match in _EXPONENT.finditer(text):
        exponent = match.group().lstrip("^* ")
        rest = text[match.end() :].lstrip()
        if "^" in exponent or "**" in exponent or rest[:1] == "^" or rest[:2] == "**":
            return float("inf")
        largest = max([largest, *(float(number) for number in re.findall(r"\d+", exponent))])
    return largest
