"""Compares two parts of answers, such as items of lists, by rules in a fixed order.

Each rule reads a pair and returns its verdict with the kind of comparison, or None if the pair is
not of its kind. The first verdict counts. A verdict is True, False, or None where only computer
algebra can decide.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from care_jax.rewards.equivalence import (
    assignments,
    formulas,
    joined,
    matrices,
    named_items,
    notation,
    quantities,
    relations,
)

_DECIMAL_COMMA = re.compile(r"-?\d+,\d{2,}")
_TWO_LETTERS = re.compile(r"[a-zA-Z]{2}")
_SEGMENT = re.compile(r"[A-Z]{2}")
_ROMAN = re.compile(r"[IVX]{1,5}")
_RELATION = re.compile(r"\\(?:[lg]eq?|neq?|lt|gt)(?![a-zA-Z])|[<>=]")

Verdict = tuple[bool | None, str]  # and the kind of comparison
Items = tuple[str, list[str]]  # of a list, behind its brackets


class Limits(NamedTuple):
    """How closely values must agree; see `answers.is_equivalent`."""

    tolerance: float
    num_decimals: int | None
    units_matter: bool

    def of(self, gold: str) -> Limits:
        """No tolerance if the gold answer is a calendar year."""
        return self._replace(tolerance=0.0) if quantities.is_year(gold) else self


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Two texts, and what several rules read from them."""

    prediction: str
    gold: str
    limits: Limits

    @property
    def texts(self) -> tuple[str, str]:
        return self.prediction, self.gold

    @functools.cached_property
    def numbers(self) -> tuple[quantities.Number | None, quantities.Number | None]:
        return quantities.read_pair(self.prediction, self.gold)

    @functools.cached_property
    def lists(self) -> list[Items | None]:
        lists = [notation.split_list(text) for text in self.texts]
        if "=" in self.prediction and "=" in self.gold:
            pairs = zip(lists, self.texts, strict=True)
            lists = [items or notation.split_tuple(text) for items, text in pairs]
        return lists


def compare_values(prediction: str, gold: str, limits: Limits) -> bool | None:
    """Whether two parts are equal; None where only computer algebra can decide."""
    decided, _ = compare_parts(prediction, gold, limits.of(gold))
    return False if decided is None and not are_mathematics(prediction, gold) else decided


def compare_parts(prediction: str, gold: str, limits: Limits) -> Verdict:
    """The first verdict of the rules; undecided of no kind, (None, ""), if there is none."""
    pair = _Pair(prediction, gold, limits)
    verdicts = (rule(pair) for rule in _RULES)
    return next((verdict for verdict in verdicts if verdict is not None), (None, ""))


def are_mathematics(prediction: str, gold: str) -> bool:
    return formulas.is_mathematics(gold, prediction) and formulas.is_mathematics(prediction, gold)


def is_unsolved(text: str, name: str, values: Iterable[str]) -> bool:
    """Whether `x + 2 = 7` or `x + 2 > 7` is given where x or its bounds are constants.

    `5 = x`, `-x = -5` and `x - 5 = 0` are solved.
    """

    def has_variable(side: str) -> bool:
        return formulas.has_variable(quantities.split_unit(side)[0])

    sides = [side.strip(" -").removeprefix(name) for side in _RELATION.split(text)]
    is_solved = {"", "0"} & set(sides) and not any(map(has_variable, sides))
    return not is_solved and not any(map(has_variable, values))


def read_both(read: Callable[[str], Any], *texts: str) -> list[Any] | None:
    """Both texts as parsed by `read`, if both can be parsed and one is unambiguous."""
    found = [read(text) for text in texts]
    return found if all(found) and any(each.is_certain for each in found) else None


def _numbers(pair: _Pair) -> Verdict | None:
    one, other = pair.numbers
    if not (one and other):
        return None
    return quantities.is_close(one, other, **pair.limits._asdict()), "number"


def _rounded_value(pair: _Pair) -> Verdict | None:
    """A gold `5\\sqrt{2} \\approx 7.07` states how its value is rounded."""
    number, _ = pair.numbers
    stated = quantities.read_number(pair.gold.partition("\\approx")[2])
    is_stated = number and stated and quantities.is_close(number, stated, **pair.limits._asdict())
    return (True, "rounded value") if is_stated else None


def _same_text(pair: _Pair) -> Verdict | None:
    """After numbers, as mW is not MW. The unit of a number may be KW."""
    is_caseless = any(pair.numbers) and _TWO_LETTERS.search(pair.gold)
    key = notation.caseless_key if is_caseless else notation.key
    return (True, "text") if key(pair.prediction) == key(pair.gold) else None


def _quantity_in_several_units(pair: _Pair) -> Verdict | None:
    compounds = [joined.read_compound(text) for text in pair.texts]
    if not any(compounds):
        return None
    one, other = (x or y for x, y in zip(compounds, pair.numbers, strict=True))
    if not (one and other):
        return None
    strict = pair.limits._replace(units_matter=True)  # 90 may not be the minutes of 1 h 30 min
    return quantities.is_close(one, other, **strict._asdict()), "quantity"


def _times(pair: _Pair) -> Verdict | None:
    clocks = read_both(joined.read_clock, *pair.texts)
    return (clocks[0].seconds == clocks[1].seconds, "time") if clocks else None


def _ranges_ratios_dates(pair: _Pair) -> Verdict | None:
    is_same = None if any(pair.numbers) else joined.same_joined(*pair.texts)
    return None if is_same is None else (is_same, "range, ratio or date")


def _sets(pair: _Pair) -> Verdict | None:
    regions = read_both(relations.read_region, *pair.texts)
    return (_compare_regions(regions[0], regions[1], pair.limits), "set") if regions else None


def _matrices(pair: _Pair) -> Verdict | None:
    read = matrices.read_pair(pair.prediction, pair.gold)
    if not read:
        return None
    if [len(row) for row in read[0]] != [len(row) for row in read[1]]:
        return False, "matrix"
    cells = zip(*(itertools.chain(*rows) for rows in read), strict=True)
    return _all(compare_values(one, other, pair.limits) for one, other in cells), "matrix"


def _lists(pair: _Pair) -> Verdict | None:
    listed, gold_listed = pair.lists
    if not (listed and gold_listed):
        return None
    is_sequence = notation.is_sequence(pair.gold)
    return _compare_lists(listed, gold_listed, pair.limits, is_sequence), "list"


def _lists_of_one(pair: _Pair) -> Verdict | None:
    """`(5)` or `5,` beside a single value."""
    ones = [listed[1] for listed in pair.lists if listed and len(listed[1]) == 1]
    if all(item[:1] in "[{\\" for (item,) in ones):
        return None
    one, other = (
        listed[1][0] if listed else text
        for listed, text in zip(pair.lists, pair.texts, strict=True)
    )
    return compare_values(one, other, pair.limits), "value"


def _list_and_number(pair: _Pair) -> Verdict | None:
    if not (any(pair.lists) and any(pair.numbers)):
        return None
    # "2,3" is two numbers; "1,22" compared with a single number has a decimal comma.
    if any(_DECIMAL_COMMA.fullmatch(text) for text in pair.texts):
        one, other = (text.replace(",", ".") for text in pair.texts)
        is_same = compare_values(one, other, pair.limits)
        # 30,60 is not 30.6.
        num_decimals = {len(text.partition(".")[2]) for text in (one, other)}
        return False if is_same and len(num_decimals) > 1 else is_same, "number"
    return None if "\\pm" in pair.prediction + pair.gold else False, "number of values"


def _figures(pair: _Pair) -> Verdict | None:
    is_same = formulas.same_figure(*pair.texts)
    return None if is_same is None else (is_same, "figure")


def _numerals(pair: _Pair) -> Verdict | None:
    if all(map(_ROMAN.fullmatch, pair.texts)):
        return False, "numeral"  # and no product
    is_same = None if "=" in pair.prediction + pair.gold else joined.same_numeral(*pair.texts)
    return None if is_same is None else (is_same, "numeral")


def _assignments(pair: _Pair) -> Verdict | None:
    """`x = value` is compared by its value; an equation on either side is left undecided."""
    (name, value), (gold_name, gold_value) = (
        ("", text) if listed else assignments.split(text)
        for text, listed in zip(pair.texts, pair.lists, strict=True)
    )
    if name and gold_name and not _same_name(name, gold_name):
        # `AB = CD` is `CD = AB`
        return _same_name(name, gold_value) and _same_name(value, gold_name), "variable"
    is_one = gold_name and not (name or pair.lists[0]) and "=" in pair.prediction
    if is_one and is_unsolved(pair.prediction, gold_name, [gold_value]):
        return False, "equation"
    is_equation = ("=" in pair.prediction and not name) or ("=" in pair.gold and not gold_name)
    if is_equation or not (name or gold_name):
        return None
    if gold_name and all(map(_ROMAN.fullmatch, (value, gold_value))):
        return None  # a product, as in P = VI
    return compare_values(value, gold_value, pair.limits), "value"


def _same_name(one: str, other: str) -> bool:
    """Whether two names are the same, or of one figure or segment; AB is BA."""
    if notation.key(one) == notation.key(other) or formulas.same_figure(one, other):
        return True
    return _SEGMENT.fullmatch(one) is not None and one == other[::-1]


_RULES = (
    _numbers,
    _rounded_value,
    _same_text,
    _quantity_in_several_units,
    _times,
    _ranges_ratios_dates,
    _sets,
    _matrices,
    _lists,
    _lists_of_one,
    _list_and_number,
    _figures,
    _numerals,
    _assignments,
)


def _compare_regions(
    prediction: relations.Region, gold: relations.Region, limits: Limits
) -> bool | None:
    names = prediction.variable, gold.variable
    if all(names) and notation.key(names[0]) != notation.key(names[1]):
        return False

    def same_bound(one: str, other: str) -> bool | None:
        if "\\infty" in one + other:
            return notation.key(one) == notation.key(other)
        return compare_values(one, other, limits._replace(tolerance=0.0))

    def same(one: relations.Interval, other: relations.Interval) -> bool | None:
        if one.brackets != other.brackets:
            return False
        return _all([same_bound(one.low, other.low), same_bound(one.high, other.high)])

    if len(prediction.intervals) != len(gold.intervals):
        return None
    is_equal = [[same(one, other) for one in prediction.intervals] for other in gold.intervals]
    decided = _pair_off(is_equal)
    # `(1, 3)` may be written as a union of intervals that overlap.
    return None if decided is False and len(gold.intervals) > 1 else decided


def _compare_lists(
    prediction: Items, gold: Items, limits: Limits, is_sequence: bool
) -> bool | None:
    (brackets, items), (gold_brackets, gold_items) = prediction, gold
    items, gold_items = named_items.with_names(items), named_items.with_names(gold_items)
    # `x = 1, y = 2` has the order of its names for `1, 2`; between two such lists the names decide.
    is_named, is_gold_named = (named_items.names_differ(given) for given in (items, gold_items))
    is_unordered = {brackets, gold_brackets} <= {"", "or", "{}"} and is_named == is_gold_named
    if is_sequence:  # the gold answer; some predictions say that they have no order
        is_unordered &= brackets in ("or", "{}") or bool(named_items.values_of_one(items, items))
    if brackets != gold_brackets and "or" in (brackets, gold_brackets):
        # Alternatives are a list only if they are the values of one variable.
        is_one = is_unordered and not is_named
        if not (is_one and all(map(named_items.is_value, items + gold_items))):
            return False
    if is_unordered and "{}" in (brackets, gold_brackets):
        items, gold_items = (  # a set has each of its members once
            list({notation.key(item): item for item in given}.values())
            for given in (items, gold_items)
        )
    if brackets != gold_brackets and {brackets, gold_brackets} & {"[)", "(]"}:
        return False  # a half-open interval is no list
    is_tuple = [given in ("()", "[]") for given in (brackets, gold_brackets)]
    if is_tuple[0] != is_tuple[1] and named_items.names_repeat(
        gold_items if is_tuple[0] else items
    ):
        return False  # the roots `x = 1, x = 2` are no interval (1, 2)
    if len(items) != len(gold_items):
        # `\pm` makes one item two values; `p = 5, q = 2; p = 7, q = 2` may equal two (p, q) pairs.
        is_open = any("\\pm" in item or item.startswith("(") for item in items + gold_items)
        return None if is_open else False
    if is_unordered:
        items, gold_items = named_items.values_of_one(items, gold_items) or (items, gold_items)
        return _pair_off(
            [[compare_values(item, other, limits) for item in items] for other in gold_items]
        )
    if brackets and gold_brackets and brackets != gold_brackets:
        return False
    if "()" in (brackets, gold_brackets):
        items, gold_items = named_items.by_name(items), named_items.by_name(gold_items)
    pairs = zip(items, gold_items, strict=True)
    return _all(compare_values(one, other, limits) for one, other in pairs)


def _all(given: Iterable[bool | None]) -> bool | None:
    """Whether all are true; None if that is undecided."""
    outcomes = list(given)
    return False if False in outcomes else None if None in outcomes else True


def _pair_off(is_equal: Sequence[Sequence[bool | None]]) -> bool | None:
    """Whether each row matches a different column; None if any entry is undecided."""
    if any(value is None for row in is_equal for value in row):
        return None
    left = set(range(len(is_equal)))
    for row in is_equal:
        match = next((i for i in left if row[i]), None)
        if match is None:
            return False
        left.remove(match)
    return True
