"""What `exact \\approx rounded` states: whether the second side is the first one, rounded."""

from __future__ import annotations

import math
from fractions import Fraction

from care_jax.rewards.equivalence import assignments, notation, quantities

_TOLERANCE = 0.005


def sides(text: str) -> list[tuple[str, str]]:
    """The exact and the rounded side of each item that has both; names are left out."""
    if "\\approx" not in text or notation.has_relation(text):
        return []
    listed = notation.split_list(text)
    found = []
    for item in listed[1] if listed else [text]:
        exact, sign, rounded = (part.strip() for part in item.partition("\\approx"))
        name, _ = assignments.split(item)
        if sign and exact and name != exact:  # `x \approx 11` assigns
            found.append((assignments.split(exact)[1], rounded))
    return found


def agree(exact: str, rounded: str) -> bool | None:
    """Whether a number is rounded as given; None if the exact side is a formula.

    Two different units are not converted: such sides agree.
    """
    number, other = quantities.read_number(exact), quantities.read_number(rounded)
    if other is None or number is None:
        return False if other is None else None
    if number.unit and other.unit and number.unit != other.unit:
        return True
    return is_rounded(_plain(number), decimal(rounded))


def decimal(rounded: str, exact: str = "") -> str:
    """A rounded side as a decimal without percent sign and unit; "" if it is no number.

    The degrees of `\\arctan 2 \\approx 63.4` degrees are in radians.
    """
    number = quantities.read_number(rounded)
    if number is None:
        return ""
    value = _plain(number)
    if number.unit == "degrees" and ("arc" in exact or "^{-1}" in exact):
        return str(float(value) * math.pi / 180)
    return str(value) if value.denominator == 1 else str(float(value))


def _plain(number: quantities.Number) -> Fraction:
    return number.value / (100 if number.is_percent else 1)


def is_rounded(value: Fraction | complex, rounded: str) -> bool:
    """Whether a value is a decimal within 0.5%, or in all its digits."""
    error = abs(value - float(rounded))
    half_digit = 0.5 * 10.0 ** -len(rounded.partition(".")[2])
    return error <= max(_TOLERANCE * abs(float(rounded)), half_digit)
