"""Takes apart `name = value`: names, chains of equations, computations, functions with a domain."""

from __future__ import annotations

import re

from care_jax.rewards.equivalence import notation, quantities

_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|\w)")
_NEXT_NAME = re.compile(r" ?(?:\\\\| ) ?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?$")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_POINT = re.compile(r"([A-Z](?:'|_\w)?) ?(\((?=[^()]*\d)[^(),]*,[^()]*\))")
_DOMAIN = re.compile(r"([^,]+?)(?:, ?| ?\()([^(),=]+)\)?")
_OPERATOR = re.compile(
    r"[\w)}] ?(?:[-+*/^(]|\\(?:times|cdot|div|pi)(?![a-z]))|\\(?:sqrt|frac)(?![a-z])"
)
_CONSTANT = re.compile(r"\\(?:times|cdot|div|sqrt|frac|pi)(?![a-z])|degrees")
_ARGUMENT = re.compile(r"(?<=[a-zA-Z'])\([^()]*\)")
# The numbers of `\\angle 1`, `\\cos 60` and `R2` are part of a name.
_NUMBER_IN_NAME = re.compile(
    r"(angle|sin|cos|tan|cot|sec|csc|log|ln|lg) ?\{?\d+(?:\.\d+)?\}?|(?<=[a-zA-Z])\d+"
)
# `\sqrt{x} = 5` and `|x| = 5` are equations, while `\tan x`, `|AB|` and `|k|` may be asked for.
_FUNCTION_OF = re.compile(
    r"(?:sqrt|log|ln|lg|exp|abs)(?![a-z]) ?[({]? ?[a-zA-Z\\]|(?:\||vert) ?[xy] ?(?:\||\\r?vert)"
)
# What says in a name that the value is in doubt, or another one's: `maybe x`, `half of x`.
_NO_NAME = re.compile(
    r"(?<![a-zA-Z])(?i:not|never|cannot|maybe|perhaps|possibly|probably|(?-i:[Ii]f)|unless"
    r"|anything but|none$|wrong(?=:)|^(?:let|for|suppos\w*|assum\w*)"
    r"|twice|thrice|(?:two|three|four|five|six|ten) times"
    r"|(?:half|(?:a|one)[ -](?:third|quarter|fifth)|root|square|cube|double"
    r"|opposite|negative|reciprocal) of"
    r"|(?:double|triple|half|minus|negative) (?:the(?![a-z])|[a-zA-Z]{1,2}$)"
    r"|(?<!in )[a-zA-Z]{1,2} (?:squared|cubed|doubled)$)(?![a-zA-Z])"
    r"|不[是为]|不等?于?$|并非|可能(?![性的值])|也许|大概|如果|^[设若当](?=[a-zA-Z])"
    r"|的(?:一半|平方|立方|.倍|相反数|倒数)$|分之.$"
)
_TURN = re.compile(r"(?<![a-zA-Z])(?:not|but|vs|rather than|instead of|as well as)(?![a-zA-Z])")
_NUMERIC = re.compile(r"[-+]? ?(?:\d|\\(?:frac|sqrt|pi)(?![a-z]))")
# After a number, the start of another statement: `3 (y`, `3 | x`, `3时y` and `3 \\Rightarrow y`.
_NEXT_STATEMENT = re.compile(
    r"\([^()]*$|[|:] ?\\?[a-zA-Z]\w*$|[\d})] ?[\u2e80-\u9fff]+(?: ?[a-zA-Z]\w*)?$|[⇒⟹⇔]"
    r"|\\(?:(?:[lL]ong)?(?:[lL]eft)?[rR]ightarrow|implies|iff|vee|lor)(?![a-z])"
)
_FACTOR_WORD = r"(?:times|plus|minus|over|divided|by|of)(?![a-z])"
_WORD = re.compile(
    rf"(?<= )(?!{_FACTOR_WORD}|(?:the|(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|ln|lg|sqrt|pi) )"
    rf"[^\W\dA-Z_]{{2,}}(?= (?!{_FACTOR_WORD}|[-+*/]|\\(?:times|cdot|div)(?![a-z])))"
)


def split(text: str) -> tuple[str, str]:
    """(name, value) of `name = ... = value`; ("", text) if the left side is not a name.

    In `exact \\approx rounded` the value is the exact side, or the rounded one if that is absent. A
    point, `P(1, 2)`, is named like an assignment, and so is the last side of a computation.
    """
    if point := _POINT.fullmatch(text):
        return point.group(1), point.group(2)
    if "=" not in text and "\\approx" not in text:
        return "", text.strip()
    exact, _, rounded = text.partition("\\approx")
    exact = text if not rounded or notation.has_relation(text) else exact
    parts = [part.strip() for part in (exact if exact.strip() else rounded).split("=")]
    name = _SUBSCRIPT.sub("", parts[0])
    # `x \approx 11` assigns to x, as `x = 11` does.
    if rounded and len(parts) == 1 and exact.strip() and _is_name(name):
        return parts[0], rounded.strip()
    if notation.has_relation(text) or len(parts) == 1:
        return "", parts[0] if len(parts) == 1 else text
    is_chain = all(_continues(part, parts[-1]) for part in parts[1:-1])
    if all(_is_computation(part, parts[-1]) for part in parts[:-1]):
        return parts[0], parts[-1]
    return (parts[0], parts[-1]) if is_chain and _is_name(name) else ("", text)


def split_domain(text: str) -> tuple[str, str]:
    """(function, domain) of `y = 6/x (x > 0)` or `y = 6/x, x > 0`; (text, "") without a domain."""
    match = _DOMAIN.fullmatch(text)
    if (
        match is None
        or not notation.has_relation(match.group(2))
        or notation.has_relation(match.group(1))
    ):
        return text, ""
    function, domain = match.groups()
    names = set(_VARIABLE.findall(split(function)[1]))
    return (function, domain) if names & set(_VARIABLE.findall(domain)) else (text, "")


def variable(name: str) -> str:
    """The key of a name without its indices."""
    return notation.key(_SUBSCRIPT.sub("", name))


def _is_computation(text: str, value: str) -> bool:
    """Whether a text combines numbers, as `180 - 45`, or is the number after it, as in `6/8 = 3/4`.

    The side after it is then its value.
    """
    number, last = quantities.read_number(text), quantities.read_number(value)
    if number and last:
        return _is_rounded(number, last)
    return _OPERATOR.search(text) is not None and not re.search(
        r"[a-zA-Z]", _CONSTANT.sub("", text)
    )


def _continues(part: str, value: str) -> bool:
    """Whether `name = part = value` may hold: not in `x = 6 = 5` and `x = 6 but y = 5`."""
    number, last = quantities.read_number(part), quantities.read_number(value)
    if number and last:
        return _is_rounded(number, last)
    if number:
        return bool(number.unit)  # as in 30^\circ = \frac{\pi}{6}
    if _TURN.search(part) or _is_followed(part):
        return False
    if not (name := _NEXT_NAME.search(part)):
        return True
    # In `6 y` and `6 cm BC` a name follows a value; `r^2 h` is a product.
    before = part[: name.start()]
    is_constant = before[-1:] in "0123456789})" and not _VARIABLE.search(before)
    return not (is_constant or quantities.read_number(before))


def _is_followed(part: str) -> bool:
    """Whether a number is followed by the start of another statement, as in `3 when y`."""
    is_word = any(word not in quantities.UNIT_NAMES for word in _WORD.findall(part))
    is_statement = is_word or _NEXT_STATEMENT.search(part) is not None
    return is_statement and _NUMERIC.match(part) is not None


def _is_rounded(number: quantities.Number, last: quantities.Number) -> bool:
    """Whether `number = last` may hold, as 10/3 = 3.33 does."""
    return quantities.is_close(number, last, tolerance=0.005, num_decimals=None)


def _is_name(text: str) -> bool:
    if _FUNCTION_OF.search(text) or _NO_NAME.search(text):
        return False
    text = _NUMBER_IN_NAME.sub(r"\1", _ARGUMENT.sub("", text))
    return (
        0 < len(text) <= 40
        and any(c.isalpha() for c in text)
        and not any(c.isdigit() or c in "+-*^" for c in text)
    )
