"""The numeric value of LaTeX arithmetic, by a recursive-descent parser that never calls eval.

The official scorer of MATH-Vision parses the longest LaTeX prefix that its grammar accepts, prints
it as Python and evaluates that. This parser covers the numeric part of that grammar and keeps its
conventions: text after the expression is ignored if a closing bracket, a full stop or the like
ends the expression; juxtaposition binds tighter than a slash (6/2(3) is 1); a colon divides; 2 1/2
is a product; sums and products of integers are int, a quotient is a float. Letters, relations,
lists and symbols outside the grammar have no value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

_MAX_CHARS = 400
_MAX_BITS = 2048  # of an integer power
_MAX_FACTORIAL = 170

_SPACES = re.compile(r"\\(?:displaystyle|quad|qquad|,)|[~$\s]")
_SIZES = re.compile(r"\\(?:left|right)(?![a-zA-Z])")
_TOKEN = re.compile(
    r" *(?:(?P<number>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?(?:E[-+]?\d+)?|\d*\.?\d+(?:E[-+]?\d+)?)"
    r"|(?P<command>\\(?:[a-zA-Z]+|[{}|%]))"
    r"|(?P<sign>[-+*/:^!(){}\[\]|.'_&]|\\\\))"
)
_STOPS = frozenset({")", "}", "]", ".", "_", "&", "\\}", "\\\\", "\\choose", ""})
_CLOSING = {
    "(": ")", "{": "}", "[": "]", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil",
}  # fmt: skip
_TIMES = ("*", "\\times", "\\cdot")
_OVER = ("/", "\\div", ":")
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "\\sin": math.sin, "\\cos": math.cos, "\\tan": math.tan, "\\arcsin": math.asin,
    "\\arccos": math.acos, "\\arctan": math.atan, "\\sinh": math.sinh, "\\cosh": math.cosh,
    "\\tanh": math.tanh, "\\log": math.log10,
}  # fmt: skip
_STARTS = frozenset({
    "(", "{", "[", "\\{", "\\lfloor", "\\lceil", "\\frac", "\\sqrt", "\\binom", "\\pi", *_FUNCTIONS,
})  # fmt: skip


class _NoValue(Exception):
    """The text is not arithmetic with a value."""


def value(text: str) -> int | float | None:
    """The value of the expression at the start of a LaTeX text; None if none, or over 400 chars."""
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = _SPACES.sub(" ", _SIZES.sub("", text)).strip()
    if not text or len(text) > _MAX_CHARS:
        return None
    try:
        reader = _Reader(text)
        result = reader.sum()
        if reader.peek() not in _STOPS:
            return None
        return result if math.isfinite(result) else None
    except (_NoValue, ArithmeticError, ValueError, RecursionError):
        return None


class _Reader:
    """Parses one expression; each method consumes what it is named for and returns its value."""

    def __init__(self, text: str):
        self._tokens: list[tuple[str | None, str]] = []  # kind and text
        position = 0
        while match := _TOKEN.match(text, position):
            self._tokens.append((match.lastgroup, match.group().strip()))
            position = match.end()
        self._tokens.append(("unknown" if text[position:].strip() else "end", ""))
        self._position = 0

    def peek(self) -> str:
        """The next token; empty at the end."""
        kind, token = self._tokens[self._position]
        if kind == "unknown":
            raise _NoValue
        return token

    def _is_number(self) -> bool:
        return self._tokens[self._position][0] == "number"

    def _take(self, *allowed: str) -> str:
        """Consumes the next token if it is among `allowed`, by default any; else returns ""."""
        token = self.peek()
        if allowed and token not in allowed:
            return ""
        if not token:
            raise _NoValue
        self._position += 1
        return token

    def sum(self) -> int | float:
        total = self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            total = total + term if sign == "+" else total - term
        return total

    def _product(self, *, in_function: bool = False) -> int | float:
        result = self._signed(in_function)
        while sign := self._take(*_TIMES, *_OVER):
            factor = self._signed(in_function)
            result = result * factor if sign in _TIMES else result / factor
        return result

    def _signed(self, in_function: bool) -> int | float:
        if sign := self._take("+", "-"):
            return -self._signed(in_function) if sign == "-" else self._signed(in_function)
        result = self._power()
        while self._starts_factor(in_function):
            result *= self._power()
        return result

    def _starts_factor(self, in_function: bool) -> bool:
        token, kind = self.peek(), self._tokens[self._position][0]
        if in_function and token in _FUNCTIONS:
            return False
        # An unknown command also starts a factor, for which `_atom` raises.
        is_other = kind == "command" and token not in (
            *_STOPS, *_TIMES, *_OVER, "\\rfloor", "\\rceil",
        )  # fmt: skip
        return kind == "number" or token in _STARTS or is_other

    def _power(self) -> int | float:
        result = self._postfix(self._atom())
        return self._postfix(_raise(result, self._exponent())) if self._take("^") else result

    def _exponent(self) -> int | float:
        if self._is_number():
            return _literal(self._take())
        if self.peek() != "{":
            raise _NoValue
        return self._group()

    def _postfix(self, result: int | float) -> int | float:
        while sign := self._take("!", "'"):
            # A prime is a transpose, which leaves a number unchanged.
            result = math.factorial(_whole(result)) if sign == "!" else result
        return result

    def _atom(self) -> int | float:
        if self._is_number():
            number = _literal(self._take())
            return number / 100 if self._take("\\%") else number
        if self.peek() in _CLOSING:
            return self._group()
        token = self._take()
        if token == "\\pi":
            return math.pi
        if token == "\\frac":
            return self._group() / self._group()
        if token == "\\binom":
            return math.comb(_whole(self._group()), _whole(self._group()))
        if token == "\\sqrt":
            index = self._group() if self.peek() == "[" else 2
            radicand = self._group()
            return math.sqrt(radicand) if index == 2 else _raise(radicand, 1 / index)
        if token in _FUNCTIONS:
            return self._function(token)
        raise _NoValue

    def _function(self, name: str) -> float:
        base = self._exponent() if name == "\\log" and self._take("_") else None
        power = self._exponent() if self._take("^") else None
        # An argument is one bracket, or else the whole product up to the next function.
        argument = self._group() if self.peek() == "(" else self._product(in_function=True)
        if base is not None:
            return math.log(argument) / math.log(base)
        if power == -1:
            name, power = name.replace("\\", "\\arc"), None
        if name not in _FUNCTIONS:
            raise _NoValue
        result = _FUNCTIONS[name](argument)
        return result if power is None else _raise(result, power)

    def _group(self) -> int | float:
        opening = self._take()
        if opening not in _CLOSING:
            raise _NoValue
        result = self.sum()
        if not self._take(_CLOSING[opening]):
            raise _NoValue
        if opening in ("\\lfloor", "\\lceil"):
            return math.floor(result) if opening == "\\lfloor" else math.ceil(result)
        return result


def _literal(text: str) -> int | float:
    number, _, exponent = text.replace(",", "").partition("E")
    if len(number) > 60 or len(exponent) > 4:
        raise _NoValue
    exact = Fraction(number) * Fraction(10) ** int(exponent or 0)
    return exact.numerator if exact.denominator == 1 else exact.numerator / exact.denominator


def _raise(base: float, exponent: float) -> int | float:
    if isinstance(base, int) and abs(exponent) * base.bit_length() > _MAX_BITS:
        raise _NoValue
    result = base**exponent
    if isinstance(result, complex):
        raise _NoValue
    return result


def _whole(number: float) -> int:
    if number != int(number) or not 0 <= number <= _MAX_FACTORIAL:
        raise _NoValue
    return int(number)
