"""Compares two answers: by text rules in microseconds, or else by computer algebra.

`compare` returns "equal: ..." or "different: ...", each with the rule that decided, "refused: ...",
or a `Question` for `symbolic.SymbolicPool`. It compares text, choices, numbers with commas, percent
signs and units, and lists of these, and evaluates nothing. Only undecided mathematics becomes a
question.
Answers come from a policy that is rewarded for agreement. An answer that hedges or gives several
values is therefore "different", and one that is too expensive to evaluate is refused.
"""

from __future__ import annotations

import atexit
import functools
import re
from collections.abc import Sequence

from care_jax.rewards import notation, quantities
from care_jax.rewards.symbolic import Question, SymbolicPool

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MAX_SYMBOLIC_CHARS = 400
_MAX_DEPTH = 12  # of nested brackets
_NUM_DECIMALS = 6  # of the symbolic comparison, so that 0.333333 equals 1/3

# Lower-case words allowed in mathematics; any other one of three or more letters means prose.
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "log", "ln", "lg", "exp", "sqrt", "pi", "max", "min", "gcd", "lcm", "mod", "deg",
    "det", "abs", "infty", "inf", "and", "or", "degrees",
})  # fmt: skip
_WORD = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[a-zA-Z]+|[a-zA-Z]{2,}")
_EXPENSIVE = re.compile(
    r"!(?!=)|\\(?:sum|int|oint|prod|lim|binom|dbinom|tbinom|choose)(?![a-z])|factorial|binomial"
)
_EXPONENT = re.compile(r"(?:\^|\*\*) ?(?:\{([^{}]*)(\{)?|\(([^()]*)(\()?|(\d+|.))")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d{2,}")
_TWO_NUMBERS = re.compile(r"(?<!_)\d \d")
# Factorials and binomials small enough to compute.
_SMALL = re.compile(r"(?<![\d^)}])\d{1,2}!(?!!)|\\[dt]?binom\{\d{1,2}\}\{\d{1,2}\}")
_FIRST_CJK = "\u2e80"
_NUMBER_ABOVE = re.compile(r"\d{3,}")


def is_equivalent(
    prediction: str,
    gold: str,
    *,
    choices: Sequence[str] = (),
    tolerance: float = 0.0,
    num_decimals: int | None = None,
) -> bool:
    """Whether a predicted answer is equivalent to the gold answer.

    Args:
        prediction: the content of an answer span, LaTeX or text.
        gold: the reference answer; with `choices` the letter or the text of an option.
        choices: options in order (A, B, ...); an option's letter and its text are equivalent.
        tolerance: relative error allowed between numbers; ChartQA uses 0.05.
        num_decimals: numbers that round to the same value are equal. None is exact, but rounds to
            six decimals against fractions such as 1/3 and in computer algebra.

    Returns:
        False also if the comparison was refused, timed out or crashed.
    """
    outcome = compare(
        prediction, gold, choices=choices, tolerance=tolerance, num_decimals=num_decimals
    )
    if isinstance(outcome, Question):
        (outcome,) = _shared_pool().ask([outcome])
    return is_equal(outcome)


def is_equal(outcome: str) -> bool:
    """Whether an outcome of `compare` or of a `SymbolicPool` means equal."""
    return outcome.startswith("equal")


@functools.cache
def _shared_pool() -> SymbolicPool:
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
) -> str | Question:
    """Compares by text rules, without computer algebra; arguments as in `is_equivalent`.

    Returns:
        "equal: ...", "different: ..." or "refused: ..." with a short reason; or a question for
        computer algebra.
    """
    same = functools.partial(_compare_clean, tolerance=tolerance, num_decimals=num_decimals)
    prediction, gold = notation.clean(prediction), _clean_gold(gold)
    if not prediction:
        return "different: empty"
    if choices:
        return _compare_choice(prediction, gold, _clean_choices(tuple(choices)), same)
    return same(prediction, gold)


# Each gold answer is compared with a whole group of rollouts, so it is cached.
_clean_gold = functools.lru_cache(maxsize=4096)(notation.clean)


@functools.lru_cache(maxsize=4096)
def _clean_choices(choices: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The cleaned choices, and their lookup keys."""
    cleaned = [notation.clean(choice) for choice in choices]
    return cleaned, [notation.key(choice) for choice in cleaned]


def _compare_choice(prediction, gold, cleaned, same) -> str | Question:
    """Compares options; both sides may name one by its letter or its text."""
    choices, texts = cleaned

    def option(text: str) -> int:
        if texts.count(notation.key(text)) == 1:
            return texts.index(notation.key(text))
        letter = notation.choice_letter(text, len(choices))
        return _LETTERS.index(letter) if letter else -1

    gold_index, index = option(gold), option(prediction)
    if gold_index >= 0 and index >= 0:
        return _outcome(index == gold_index, "option")
    if gold_index >= 0:
        if notation.key(choices[gold_index]) == _LETTERS[gold_index].lower():
            return "different: no option"  # options shown as pictures have no text to compare
        return same(prediction, choices[gold_index])
    return same(choices[index] if index >= 0 else prediction, gold)


def _compare_clean(
    prediction: str, gold: str, *, tolerance: float, num_decimals: int | None
) -> str | Question:
    if notation.key(prediction) == notation.key(gold):
        return "equal: same text"
    limits = {"tolerance": tolerance, "num_decimals": num_decimals}
    decided, rule = _compare_parts(prediction, gold, **limits)
    if decided is not None:
        if rule == "number" and tolerance:
            within = f"within {100 * tolerance:g}%"
            return f"equal: number {within}" if decided else f"different: no number {within}"
        return _outcome(decided, rule)
    (body, unit), (gold_body, gold_unit) = map(quantities.split_unit, (prediction, gold))
    if unit and gold_unit and unit != gold_unit:
        return "different: another unit"
    if (body, gold_body) != (prediction, gold):
        return _compare_clean(body, gold_body, **limits)
    if not _is_mathematics(gold) or not _is_mathematics(prediction):
        return "different: other words"
    if notation.has_relation(prediction) and not (
        notation.has_relation(gold) or re.search(r"[\[(].*,.*[\])]", gold)
    ):
        return "different: a relation, no value"  # such as `\neq 7` or `> 6`
    if refusal := _refusal(prediction, gold):
        return f"refused: {refusal}"
    if "=" not in gold:
        _, prediction = notation.split_assignment(prediction)
        if "=" in prediction and notation.split_list(prediction) is None:
            return "different: an equation, no value"  # in `9 = 7` neither side is the answer
    return Question(
        gold=gold,
        prediction=prediction,
        num_decimals=_NUM_DECIMALS if num_decimals is None else num_decimals,
    )


def _outcome(is_same: bool, what: str) -> str:
    return f"equal: same {what}" if is_same else f"different: another {what}"


def _compare_values(
    prediction: str, gold: str, *, tolerance: float, num_decimals: int | None
) -> bool | None:
    """Compares numbers, lists and assignments of them; None if undecided."""
    if notation.key(prediction) == notation.key(gold):
        return True
    limits = {"tolerance": tolerance, "num_decimals": num_decimals}
    return _compare_parts(prediction, gold, **limits)[0]


def _compare_parts(
    prediction: str, gold: str, *, tolerance: float, num_decimals: int | None
) -> tuple[bool | None, str]:
    """`_compare_values` for texts with different keys, and what they were compared as."""
    limits = {"tolerance": tolerance, "num_decimals": num_decimals}
    texts = prediction, gold
    numbers = quantities.read_number(prediction), quantities.read_number(gold)
    if numbers[0] and numbers[1]:
        return quantities.is_close(numbers[0], numbers[1], **limits), "number"
    lists = notation.split_list(prediction), notation.split_list(gold)
    if lists[0] and lists[1]:
        return _compare_lists(lists[0], lists[1], **limits), "list"
    if any(lists) and any(numbers):
        # "2,3" is two numbers; "1,22" compared with a single number has a decimal comma.
        if any(_DECIMAL_COMMA.fullmatch(text) for text in texts):
            decided = _compare_values(*(text.replace(",", ".") for text in texts), **limits)
            return decided, "number"
        return None if "\\pm" in prediction + gold else False, "number of values"
    names, values = zip(
        *(
            ("", text) if items else notation.split_assignment(text)
            for text, items in zip(texts, lists, strict=True)
        ),
        strict=True,
    )
    if all(names) and notation.key(names[0]) != notation.key(names[1]):
        return False, "variable"
    # `x = value` is compared by its value; an equation on either side is left undecided.
    is_equation = ["=" in text and not name for text, name in zip(texts, names, strict=True)]
    if not any(names) or any(is_equation):
        return None, ""
    return _compare_values(*values, **limits), "value"


def _compare_lists(
    prediction: tuple[str, list[str]],
    gold: tuple[str, list[str]],
    *,
    tolerance: float,
    num_decimals: int | None,
) -> bool | None:
    (brackets, items), (gold_brackets, gold_items) = prediction, gold
    same = functools.partial(_compare_values, tolerance=tolerance, num_decimals=num_decimals)
    is_unordered = {brackets, gold_brackets} <= {"", "{}"}
    if is_unordered:
        items, gold_items = (
            list({notation.key(item): item for item in given}.values())
            for given in (items, gold_items)
        )
    if len(items) != len(gold_items):
        # `\pm` makes one item two values; `p = 5, q = 2; p = 7, q = 2` may equal two (p, q) pairs.
        is_open = any("\\pm" in item or item.startswith("(") for item in items + gold_items)
        return None if is_open else False
    if is_unordered:
        is_equal = [[same(item, other) for item in items] for other in gold_items]
        if any(value is None for row in is_equal for value in row):
            return None
        left = set(range(len(items)))
        for row in is_equal:
            match = next((i for i in left if row[i]), None)
            if match is None:
                return False
            left.remove(match)
        return True
    if brackets and gold_brackets and brackets != gold_brackets:
        return False
    outcomes = [same(item, other) for item, other in zip(items, gold_items, strict=True)]
    if False in outcomes:
        return False
    return None if None in outcomes else True


def _is_mathematics(text: str) -> bool:
    """Whether a text is plausible input for computer algebra: neither prose nor program code."""
    if any(c in text for c in '"`@#?…') or "__" in text or _TWO_NUMBERS.search(text):
        return False
    if any(c >= _FIRST_CJK for c in text):
        return False
    # Two letters are a product or a segment; up to four capitals name the corners of a figure.
    return all(
        word.startswith("\\") or word in _FUNCTIONS or len(word) <= (2 if word.islower() else 4)
        for word in _WORD.findall(text)
    )


def _refusal(prediction: str, gold: str) -> str:
    """Why a prediction is too expensive, or "". Constructs that the gold also has are allowed."""
    if max(len(prediction), len(gold)) > _MAX_SYMBOLIC_CHARS:
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
    if _has_tower(prediction) and not _has_tower(gold):
        return "exponent"
    return ""


def _has_tower(text: str) -> bool:
    """Whether an exponent contains another exponent or a number above 99."""
    for match in _EXPONENT.finditer(text):
        exponent = match.group().lstrip("^* ")
        rest = text[match.end() :].lstrip()
        if "^" in exponent or "**" in exponent or rest[:1] == "^" or rest[:2] == "**":
            return True
        if _NUMBER_ABOVE.search(exponent):
            return True
    return False
