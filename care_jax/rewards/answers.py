"""Compares two answers: by text rules in microseconds, or else by computer algebra.

`compare` returns "equal: ..." or "different: ...", each with the rule that decided, "refused: ...",
or a `Comparison` for `symbolic.SymbolicPool`. It compares text, choices, numbers with commas,
percent signs and units, and lists of these, and evaluates nothing. Only undecided mathematics
becomes a `Comparison`.

Answers come from a policy that is rewarded for agreement. An answer that hedges or gives several
values is therefore "different", and one that is too expensive to evaluate is refused.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from absl import logging

from care_jax.rewards.choices import clean_choices, compare_choice
from care_jax.rewards.equivalence import (
    formulas,
    free_text,
    joined,
    matrices,
    named_items,
    notation,
    options,
    quantities,
    relations,
    rounding,
)
from care_jax.rewards.symbolic import Comparison, SymbolicPool, is_equal, outcome_of

_NUM_DECIMALS = 6  # of the symbolic comparison, so that 0.333333 equals 1/3
_MAX_UNITS = 8  # at the end of an answer

_DECIMAL_COMMA = re.compile(r"-?\d+,\d{2,}")
_TWO_LETTERS = re.compile(r"[a-zA-Z]{2}")
_NO_BRACKETS = ("", "or")  # of a list
_DOUBLED_SIGN = re.compile(r"[+-] ?[+-]")


class _Limits(NamedTuple):
    """How closely values must agree; see `is_equivalent`."""

    tolerance: float
    num_decimals: int | None
    units_matter: bool

    def of(self, gold: str) -> _Limits:
        """No tolerance if the gold answer is a calendar year."""
        return self._replace(tolerance=0.0) if quantities.is_year(gold) else self


def is_equivalent(
    prediction: str,
    gold: str,
    *,
    choices: Sequence[str] = (),
    tolerance: float = 0.0,
    num_decimals: int | None = None,
    units_matter: bool = False,
) -> bool:
    """Whether a predicted answer is equivalent; False if that was refused, timed out or crashed.

    Args:
        prediction: the content of an answer span, LaTeX or text.
        gold: the reference answer; with `choices` the letter or the text of an option.
        choices: options in order (A, B, ...); an option's letter and its text are equivalent.
        tolerance: relative error allowed between numbers; ChartQA uses 0.05. None is allowed
            between years (`2010`, not `2,010`), bounds (`> 50`), and parts of ranges and dates.
        num_decimals: numbers that round to the same value are equal. None is exact, but rounds to
            six decimals against fractions such as 1/3 and in computer algebra.
        units_matter: an answer without a unit differs from one with a unit.
    """
    outcome = compare(
        prediction,
        gold,
        choices=choices,
        tolerance=tolerance,
        num_decimals=num_decimals,
        units_matter=units_matter,
    )
    if isinstance(outcome, Comparison):
        (outcome,) = shared_pool().ask([outcome])
    return is_equal(outcome)


@functools.cache
def shared_pool() -> SymbolicPool:
    """The pool of this process for `is_equivalent`, of one worker that is started when needed."""
    pool = SymbolicPool(num_workers=1)
    atexit.register(pool.close)
    return pool


def compare(
    prediction: str,
    gold: str,
    *,
    choices: Sequence[str] = (),
    tolerance: float = 0.0,
    num_decimals: int | None = None,
    units_matter: bool = False,
) -> str | Comparison:
    """The outcome by text rules, or a comparison for algebra; arguments as in `is_equivalent`.

    A text on which a rule fails is refused.
    """
    limits = _Limits(tolerance, num_decimals, units_matter)
    try:
        return _compare(prediction, gold, choices, limits)
    except Exception as error:  # a sampled answer must not end a run
        texts = f"{prediction[:200]!r} with {gold[:200]!r}"
        logging.log_first_n(logging.WARNING, "Comparing %s failed: %r", 10, texts, error)
        return f"refused: {type(error).__name__}"


def _compare(
    prediction: str, gold: str, choices: Sequence[str], limits: _Limits
) -> str | Comparison:
    same = functools.partial(_compare_clean, limits=limits)
    cleaned = clean_choices(tuple(choices))
    prediction = notation.clean(prediction, not cleaned.are_sentences)
    gold = _clean_gold(gold, not cleaned.are_sentences)
    if not prediction:
        return "different: empty"
    expected = (gold, *choices)
    prediction = free_text.value_of_sentence(free_text.statement(prediction, expected), expected)
    if choices:
        return compare_choice(prediction, gold, cleaned, same)
    if options.is_letter(gold) and (letter := options.letter_of(prediction)) is not None:
        return outcome_of(letter == gold.strip("()[]"), "option")
    letters = options.spelled_letters(gold)
    if letters and letters == options.spelled_letters(prediction):
        return outcome_of(True, "set of options")
    return same(prediction, gold)


# Each gold answer is compared with a whole group of rollouts, so it is cached.
_clean_gold = functools.lru_cache(maxsize=4096)(notation.clean)


def _compare_clean(prediction: str, gold: str, limits: _Limits) -> str | Comparison:
    """The outcome of cleaned texts; in `exact \\approx rounded` both sides must be right."""
    sides = rounding.sides(prediction) if prediction != gold else []
    agreed = [rounding.agree(exact, rounded) for exact, rounded in sides]
    if False in agreed:
        return "different: rounded otherwise"
    if len(sides) != 1 or notation.split_list(prediction):
        return _compare_exact(prediction, gold, limits)
    ((exact, rounded),) = sides
    outcome = _compare_exact(prediction.partition("\\approx")[0].strip(), gold, limits)
    if agreed == [True] or (isinstance(outcome, str) and not is_equal(outcome)):
        return outcome
    if isinstance(outcome, str):
        formula = formulas.as_latex(quantities.split_unit(exact)[0])
        outcome = Comparison(formula, formula, _NUM_DECIMALS)
    return outcome._replace(rounded=rounding.decimal(rounded, exact))


def _compare_exact(prediction: str, gold: str, limits: _Limits) -> str | Comparison:
    limits = limits.of(gold)
    functions, domains = zip(*map(notation.split_domain, (prediction, gold)), strict=True)
    if not all(domains) or _compare_values(domains[0], domains[1], limits):
        prediction, gold = functions  # one side may omit the domain
    prediction, gold = formulas.align(prediction, gold, limits.units_matter)
    for _ in range(_MAX_UNITS):
        if prediction == gold:
            return "equal: same text"
        if bool(_DOUBLED_SIGN.search(prediction)) != bool(_DOUBLED_SIGN.search(gold)):
            return "different: a doubled sign"
        decided, rule = _compare_parts(prediction, gold, limits)
        if decided is not None:
            if rule == "number" and limits.tolerance:
                within = f"within {100 * limits.tolerance:g}%"
                return f"equal: number {within}" if decided else f"different: no number {within}"
            return outcome_of(decided, rule)
        split = [quantities.split_unit(text) for text in (prediction, gold)]
        (body, unit), (gold_body, gold_unit) = split
        # In `\pi r^2 h` the last letter is a variable.
        if any(
            quantities.are_letters(name)
            and formulas.has_variable(notation.split_assignment(rest)[1])
            for rest, name in split
        ):
            break
        if unit and gold_unit and unit != gold_unit:
            return "different: another unit"
        if limits.units_matter and bool(unit) != bool(gold_unit):
            return "different: a unit on one side"
        if (body, gold_body) == (prediction, gold):
            break
        prediction, gold = body, gold_body
    return _for_algebra(prediction, gold, limits)


def _for_algebra(prediction: str, gold: str, limits: _Limits) -> str | Comparison:
    """The comparison for computer algebra, or the outcome if none is needed."""
    if not _are_mathematics(prediction, gold):
        return "different: other words"
    if any(clock and clock.is_certain for clock in map(joined.read_clock, (prediction, gold))):
        return "different: another time"
    if joined.is_range(gold):
        return "different: another range or date"  # and no difference, such as -11 for 18-29
    if refusal := formulas.refusal(notation.split_assignment(prediction)[1], gold):
        return f"refused: {refusal}"
    if (is_same := joined.same_statements(prediction, gold)) is not None:
        return outcome_of(is_same, "set of statements")
    if formulas.has_vector_product(prediction, gold):
        return "different: another product of vectors"  # for computer algebra it commutes
    if regions := _certain(relations.read_region, prediction, gold):
        prediction, gold = (region.latex() for region in regions)
    elif pair := matrices.read_pair(prediction, gold):
        prediction, gold = map(matrices.as_latex, pair)
    if notation.has_relation(prediction) and not (
        notation.has_relation(gold) or re.search(r"[\[(].*,.*[\])]", gold)
    ):
        return "different: a relation, no value"  # such as `\neq 7` or `> 6`
    if _several_values(prediction, gold) or _several_values(gold, prediction):
        return "different: another number of values"
    (name, value), (_, gold_value) = map(notation.split_assignment, (prediction, gold))
    has_marks = any(mark in prediction + gold for mark in "'^")
    if has_marks and notation.marked(value) != notation.marked(gold_value):
        return "different: other primes"  # computer algebra ignores them
    if (ratios := joined.ratios_as_latex(value, gold_value)) is None:
        return "different: another ratio"
    if ratios != (value, gold_value):
        prediction, gold = ratios
    listed = notation.split_list(prediction) if "=" in prediction else None
    if "=" not in gold:
        items = listed[1] if listed and listed[0] in _NO_BRACKETS else [prediction]
        prediction = ", ".join(notation.split_assignment(item)[1] for item in items)
        listed = None
    elif name and not listed and prediction.count("=") > gold.count("="):
        prediction = f"{name} = {value}"
    if prediction.count("=") > gold.count("=") and not listed:
        return "different: an equation, no value"  # in `9 = 7` neither side is the answer
    return Comparison(
        gold=formulas.as_latex(gold),
        prediction=formulas.as_latex(prediction),
        num_decimals=_NUM_DECIMALS if limits.num_decimals is None else limits.num_decimals,
        tolerance=limits.tolerance,
    )


def _several_values(text: str, other: str) -> bool:
    """Whether a text assigns several values, `x = 1, x = 2`, and the other has a single one.

    Computer algebra would take the last of them.
    """
    listed = notation.split_list(text) if "=" in text else None
    is_several = listed is not None and listed[0] in _NO_BRACKETS
    return is_several and not (
        notation.split_list(other) or notation.has_relation(text + other) or "\\pm" in text + other
    )


def _certain(read: Callable[[str], Any], *texts: str) -> list[Any] | None:
    """Both texts as parsed by `read`, if both can be parsed and one is unambiguous."""
    found = [read(text) for text in texts]
    return found if all(found) and any(each.is_certain for each in found) else None


def _are_mathematics(prediction: str, gold: str) -> bool:
    return formulas.is_mathematics(gold, prediction) and formulas.is_mathematics(prediction, gold)


def _compare_values(prediction: str, gold: str, limits: _Limits) -> bool | None:
    """Compares two parts of answers, such as items of lists; None if undecided."""
    decided, _ = _compare_parts(prediction, gold, limits.of(gold))
    return False if decided is None and not _are_mathematics(prediction, gold) else decided


def _compare_parts(prediction: str, gold: str, limits: _Limits) -> tuple[bool | None, str]:
    """`_compare_values`, and the kind of comparison."""
    texts = prediction, gold
    numbers = quantities.read_pair(prediction, gold)
    if numbers[0] and numbers[1]:
        return quantities.is_close(numbers[0], numbers[1], **limits._asdict()), "number"
    # `5\sqrt{2} \approx 7.07` states how its value is rounded.
    stated = quantities.read_number(gold.partition("\\approx")[2])
    if numbers[0] and stated and quantities.is_close(numbers[0], stated, **limits._asdict()):
        return True, "rounded value"
    # After numbers, as mW is not MW. The unit of a number may be KW.
    key = notation.caseless_key if any(numbers) and _TWO_LETTERS.search(gold) else notation.key
    if key(prediction) == key(gold):
        return True, "text"
    compounds = joined.read_compound(prediction), joined.read_compound(gold)
    if any(compounds):
        one, other = (x or y for x, y in zip(compounds, numbers, strict=True))
        if one and other:  # 90 may not be the minutes of 1 h 30 min
            strict = limits._replace(units_matter=True)
            return quantities.is_close(one, other, **strict._asdict()), "quantity"
    if clocks := _certain(joined.read_clock, *texts):
        return clocks[0].seconds == clocks[1].seconds, "time"
    if not any(numbers) and (is_same := joined.same_joined(*texts)) is not None:
        return is_same, "range, ratio or date"
    if regions := _certain(relations.read_region, *texts):
        return _compare_regions(regions[0], regions[1], limits), "set"
    if pair := matrices.read_pair(prediction, gold):
        if [len(row) for row in pair[0]] != [len(row) for row in pair[1]]:
            return False, "matrix"
        cells = zip(*(itertools.chain(*rows) for rows in pair), strict=True)
        return _all(_compare_values(one, other, limits) for one, other in cells), "matrix"
    lists = notation.split_list(prediction), notation.split_list(gold)
    if "=" in prediction and "=" in gold:
        lists = lists[0] or notation.split_tuple(prediction), lists[1] or notation.split_tuple(gold)
    if lists[0] and lists[1]:
        return _compare_lists(lists[0], lists[1], limits), "list"
    if any(items and len(items[1]) == 1 and items[1][0][:1] not in "[{\\" for items in lists):
        one, other = (
            given[1][0] if given else text for given, text in zip(lists, texts, strict=True)
        )
        return _compare_values(one, other, limits), "value"
    if any(lists) and any(numbers):
        # "2,3" is two numbers; "1,22" compared with a single number has a decimal comma.
        if any(_DECIMAL_COMMA.fullmatch(text) for text in texts):
            one, other = (text.replace(",", ".") for text in texts)
            is_same = _compare_values(one, other, limits)
            # 30,60 is not 30.6.
            num_decimals = {len(text.partition(".")[2]) for text in (one, other)}
            return False if is_same and len(num_decimals) > 1 else is_same, "number"
        return None if "\\pm" in prediction + gold else False, "number of values"
    if (is_same := formulas.same_figure(prediction, gold)) is not None:
        return is_same, "figure"
    if "=" not in prediction + gold and (is_same := joined.same_numeral(*texts)) is not None:
        return is_same, "numeral"
    (name, value), (gold_name, gold_value) = (
        ("", text) if items else notation.split_assignment(text)
        for text, items in zip(texts, lists, strict=True)
    )
    is_other = name and gold_name and notation.key(name) != notation.key(gold_name)
    if is_other and not formulas.same_figure(name, gold_name):
        sides = [notation.key(side) for side in (name, value, gold_value, gold_name)]
        return sides[:2] == sides[2:], "variable"  # `AB = CD` is `CD = AB`
    # `x = value` is compared by its value; an equation on either side is left undecided.
    is_equation = ("=" in prediction and not name) or ("=" in gold and not gold_name)
    if is_equation or not (name or gold_name):
        return None, ""
    return _compare_values(value, gold_value, limits), "value"


def _compare_regions(
    prediction: relations.Region, gold: relations.Region, limits: _Limits
) -> bool | None:
    names = prediction.variable, gold.variable
    if all(names) and notation.key(names[0]) != notation.key(names[1]):
        return False

    def same_bound(one: str, other: str) -> bool | None:
        if "\\infty" in one + other:
            return notation.key(one) == notation.key(other)
        return _compare_values(one, other, limits._replace(tolerance=0.0))

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
    prediction: tuple[str, list[str]], gold: tuple[str, list[str]], limits: _Limits
) -> bool | None:
    (brackets, items), (gold_brackets, gold_items) = prediction, gold
    items, gold_items = named_items.with_names(items), named_items.with_names(gold_items)
    # `x = 1, y = 2` has the order of its names for `1, 2`; between two such lists the names decide.
    is_named, is_gold_named = (named_items.names_differ(given) for given in (items, gold_items))
    is_unordered = {brackets, gold_brackets} <= {"", "or", "{}"} and is_named == is_gold_named
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
    if len(items) != len(gold_items):
        # `\pm` makes one item two values; `p = 5, q = 2; p = 7, q = 2` may equal two (p, q) pairs.
        is_open = any("\\pm" in item or item.startswith("(") for item in items + gold_items)
        return None if is_open else False
    if is_unordered:
        items, gold_items = named_items.values_of_one(items, gold_items) or (items, gold_items)
        return _pair_off(
            [[_compare_values(item, other, limits) for item in items] for other in gold_items]
        )
    if brackets and gold_brackets and brackets != gold_brackets:
        return False
    if "()" in (brackets, gold_brackets):
        items, gold_items = named_items.by_name(items), named_items.by_name(gold_items)
    pairs = zip(items, gold_items, strict=True)
    return _all(_compare_values(one, other, limits) for one, other in pairs)


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
