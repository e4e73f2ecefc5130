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
import re
from collections.abc import Sequence

from absl import logging

from care_jax.batch import Example
from care_jax.rewards.choices import clean_choices, compare_choice
from care_jax.rewards.equivalence import (
    assignments,
    formulas,
    free_text,
    joined,
    matrices,
    notation,
    options,
    parts,
    quantities,
    relations,
    rounding,
)
from care_jax.rewards.equivalence.parts import Limits
from care_jax.rewards.symbolic import Comparison, SymbolicPool, is_equal, outcome_of

_NUM_DECIMALS = 6  # of the symbolic comparison, so that 0.333333 equals 1/3
_MAX_UNITS = 8  # at the end of an answer

_NO_BRACKETS = ("", "or")  # of a list
_DOUBLED_SIGN = re.compile(r"[+-] ?[+-]")


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
    limits = Limits(tolerance, num_decimals, units_matter)
    try:
        return _compare(prediction, gold, choices, limits)
    except Exception as error:  # a sampled answer must not end a run
        texts = f"{prediction[:200]!r} with {gold[:200]!r}"
        logging.log_first_n(logging.WARNING, "Comparing %s failed: %r", 10, texts, error)
        return f"refused: {type(error).__name__}"


def compare_example(answer: str, example: Example) -> str | Comparison:
    """`compare` with the gold answer of an example, which is text, by the example's rules."""
    return compare(
        answer,
        example.answer,
        choices=example.choices,
        tolerance=example.tolerance,
        units_matter=example.units == "matter",
    )


def _compare(
    prediction: str, gold: str, choices: Sequence[str], limits: Limits
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
    return same(_blanks(prediction), _blanks(gold))


_NUMBERED = re.compile(r"(?:^|[,;.]? |[,;])\(?([1-9]|[a-h])\) ?")


def _blanks(text: str) -> str:
    """The sequence `3; 5` of `(1) 3 (2) 5`."""
    before, *rest = _NUMBERED.split(text)
    labels, items = "".join(rest[::2]), [item.strip(" ,;.") for item in rest[1::2]]
    is_run = labels in ("123456789"[: len(items)], "abcdefgh"[: len(items)])
    sequence = "; ".join(items)
    is_blanks = not before and is_run and all(items) and notation.is_sequence(sequence)
    return sequence if is_blanks else text


# Each gold answer is compared with a whole group of rollouts, so it is cached.
_clean_gold = functools.lru_cache(maxsize=4096)(notation.clean)


def _compare_clean(prediction: str, gold: str, limits: Limits) -> str | Comparison:
    """The outcome of cleaned texts; in `exact \\approx rounded` both sides must be right."""
    sides = rounding.sides(prediction) if prediction != gold else []
    agreed = [rounding.agree(exact, rounded) for exact, rounded in sides]
    if False in agreed:
        return "different: rounded otherwise"
    if len(sides) != 1 or notation.split_list(prediction):
        return _compare_exact(prediction, gold, limits)
    ((exact, rounded),) = sides
    outcome = _compare_exact(prediction.partition("\\approx")[0].strip(), gold, limits)
    number = quantities.read_number(gold)
    if number and number.is_decimal and parts.compare_values(rounded, gold, limits):
        outcome = "equal: number"  # the gold answer is the rounded side
    if agreed == [True] or (isinstance(outcome, str) and not is_equal(outcome)):
        return outcome
    if isinstance(outcome, str):
        formula = formulas.as_latex(quantities.split_unit(exact)[0])
        outcome = Comparison(formula, formula, _NUM_DECIMALS)
    return outcome._replace(rounded=rounding.decimal(rounded, exact))


def _compare_exact(prediction: str, gold: str, limits: Limits) -> str | Comparison:
    limits = limits.of(gold)
    functions, domains = zip(*map(assignments.split_domain, (prediction, gold)), strict=True)
    if not all(domains) or parts.compare_values(domains[0], domains[1], limits):
        prediction, gold = functions  # one side may omit the domain
    prediction, gold = formulas.align(prediction, gold, limits.units_matter)
    for _ in range(_MAX_UNITS):
        if prediction == gold:
            return "equal: same text"
        if bool(_DOUBLED_SIGN.search(prediction)) != bool(_DOUBLED_SIGN.search(gold)):
            return "different: a doubled sign"
        decided, rule = parts.compare_parts(prediction, gold, limits)
        if decided is not None:
            if rule == "number" and limits.tolerance:
                within = f"within {100 * limits.tolerance:g}%"
                return f"equal: number {within}" if decided else f"different: no number {within}"
            return outcome_of(decided, rule)
        split = [quantities.split_unit(text) for text in (prediction, gold)]
        (body, unit), (gold_body, gold_unit) = split
        # In `\pi r^2 h` the last letter is a variable.
        if any(
            quantities.are_letters(name) and formulas.has_variable(assignments.split(rest)[1])
            for rest, name in split
        ):
            break
        if unit and gold_unit and unit != gold_unit:
            body = _converted(body, unit, gold_unit)
            if not body:
                return "different: another unit"
        if limits.units_matter and bool(unit) != bool(gold_unit):
            return "different: a unit on one side"
        if (body, gold_body) == (prediction, gold):
            break
        prediction, gold = body, gold_body
    return _for_algebra(prediction, gold, limits)


def _converted(text: str, unit: str, other: str) -> str:
    """A formula in another unit of its quantity; "" for another quantity, lists and equations."""
    factor = quantities.conversion(unit, other)
    name, value = assignments.split(text)
    if factor is None or "=" in value or notation.split_list(value):
        return ""
    value = f"\\frac{{{factor.numerator}}}{{{factor.denominator}}} \\cdot ({value})"
    return f"{name} = {value}" if name else value


def _for_algebra(prediction: str, gold: str, limits: Limits) -> str | Comparison:
    """The comparison for computer algebra, or the outcome if none is needed."""
    if regions := parts.read_both(relations.read_region, prediction, gold):
        prediction, gold = (region.latex() for region in regions)
    elif pair := matrices.read_pair(prediction, gold):
        prediction, gold = map(matrices.as_latex, pair)
    if outcome := _without_algebra(prediction, gold):
        return outcome
    prediction, gold = _formulas(prediction, gold)
    is_list = "=" in gold and notation.split_list(prediction)
    if prediction.count("=") > gold.count("=") and not is_list:
        return "different: an equation, no value"  # in `9 = 7` neither side is the answer
    return Comparison(
        gold=formulas.as_latex(gold),
        prediction=formulas.as_latex(prediction),
        num_decimals=_NUM_DECIMALS if limits.num_decimals is None else limits.num_decimals,
        tolerance=limits.tolerance,
    )


def _without_algebra(prediction: str, gold: str) -> str | None:
    """The outcome of what computer algebra would misread or not read; None for all else."""
    if not parts.are_mathematics(prediction, gold):
        return "different: other words"
    if any(clock and clock.is_certain for clock in map(joined.read_clock, (prediction, gold))):
        return "different: another time"
    if joined.is_range(gold):
        return "different: another range or date"  # and no difference, such as -11 for 18-29
    value, gold_value = (assignments.split(text)[1] for text in (prediction, gold))
    if refusal := formulas.refusal(value, gold):
        return f"refused: {refusal}"
    if (is_same := joined.same_statements(prediction, gold)) is not None:
        return outcome_of(is_same, "set of statements")
    if formulas.has_vector_product(prediction, gold):
        return "different: another product of vectors"  # for computer algebra it commutes
    if notation.has_relation(prediction) and not (
        notation.has_relation(gold) or re.search(r"[\[(].*,.*[\])]", gold)
    ):
        return "different: a relation, no value"  # such as `\neq 7` or `> 6`
    if _is_unsolved(prediction, gold):
        return "different: a relation, not solved"  # `x + 2 > 7` for `x > 5`
    if _is_values(prediction) and notation.has_relation(gold) and not notation.split_list(gold):
        return "different: values, no interval"  # computer algebra takes `1, 2` for (1, 2)
    if _several_values(prediction, gold) or _several_values(gold, prediction):
        return "different: another number of values"
    has_marks = any(mark in prediction + gold for mark in "'^")
    if has_marks and notation.marked(value) != notation.marked(gold_value):
        return "different: other primes"  # computer algebra ignores them
    if joined.ratios_as_latex(value, gold_value) is None:
        return "different: another ratio"
    return None


def _formulas(prediction: str, gold: str) -> tuple[str, str]:
    """Both texts without the names that only one has, ratios as quotients, sequences as tuples."""
    if notation.is_sequence(gold) and (items := notation.split_list(prediction)):
        return _as_tuple(items[1]), f"({gold.replace(';', ',')})"
    (name, value), (_, gold_value) = map(assignments.split, (prediction, gold))
    ratios = joined.ratios_as_latex(value, gold_value)
    if ratios and ratios != (value, gold_value):  # never None after `_without_algebra`
        prediction, gold = ratios
    listed = notation.split_list(prediction) if "=" in prediction else None
    if "=" not in gold:
        items = listed[1] if listed and listed[0] in _NO_BRACKETS else [prediction]
        prediction = ", ".join(assignments.split(item)[1] for item in items)
    elif name and not listed and prediction.count("=") > gold.count("="):
        prediction = f"{name} = {value}"
    return prediction, gold


def _as_tuple(items: list[str]) -> str:
    """The values of a list in their order, which computer algebra ignores without brackets."""
    return f"({', '.join(assignments.split(item)[1] for item in items)})"


def _is_unsolved(prediction: str, gold: str) -> bool:
    """Whether a relation is not solved for the variable of the gold answer, which has bounds."""
    region = relations.read_region(gold)
    if region is None or not (region.variable and notation.has_relation(prediction)):
        return False
    bounds = [bound for interval in region.intervals for bound in (interval.low, interval.high)]
    _, items = notation.split_list(prediction) or ("", [prediction])
    return any(parts.is_unsolved(item, region.variable, bounds) for item in items)


def _is_values(text: str) -> bool:
    """Whether a text is a list of values in any order, such as the roots of an equation."""
    listed = notation.split_list(text)
    is_unordered = listed is not None and listed[0] in (*_NO_BRACKETS, "{}")
    return is_unordered and not notation.has_relation(text)


def _several_values(text: str, other: str) -> bool:
    """Whether a text assigns several values, `x = 1, x = 2`, and the other has a single one.

    Computer algebra would take the last of them.
    """
    listed = notation.split_list(text) if "=" in text else None
    is_several = listed is not None and listed[0] in _NO_BRACKETS
    return is_several and not (
        notation.split_list(other) or notation.has_relation(text + other) or "\\pm" in text + other
    )
