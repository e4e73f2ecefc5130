"""Word problems drawn on demand, without images, with rationales that write out the steps.

An example is a pure function of (seed, split, index), as in `data.drawn.synthetic`. The kinds are
sums, differences, products, change, comparisons, the calendar and units. A rationale has two or
three steps. All but the last state their results; the last names only the operation that gives the
answer, so that the answer is computed and not copied.

The splits never share a calculation, whatever its wording: `crc32(kind and numbers) % 8` assigns it
to a split. Every other round of the test split has larger numbers than the training split; the
source of these examples ends in "_far", as in "word_problems/total_far". The test split repeats a
calculation only after all others of its kind; some kinds have only 14 to 17 in the training range.

In the rows with the repair cue, the context is a rationale with a slip in one step, and the cue; it
is not trained on. The response is the right rationale. A slip must change the answer; problems
where none does, such as most comparisons, have no repair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from care_jax.batch import Example
from care_jax.data.drawn import splits_and_repairs

FAR = "_far"  # suffix of `source` for numbers outside the training range
NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Grace", "Hugo", "Iris", "Jack")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# (large unit, small unit, small units in a large one)
UNITS = (
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("metres", "centimetres", 100),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
)
_NOTES = (20, 50, 100, 200)  # dollars paid
_MAX_REPEATS = 1000  # draws in a row without a new calculation, after which all count as drawn

# kind -> wordings; `x` and `y` are names, `things` what is counted.
_QUESTIONS = {
    "total": (
        "{x} has {a} {things} and gets {b} more. How many {things} does {x} have now?",
        "There are {a} {things} in one box and {b} in another. How many are there in all?",
        "{x} found {a} {things} and {y} found {b}. How many did they find together?",
    ),
    "left": (
        "{x} had {a} {things} and gave {b} of them to {y}. How many are left?",
        "A shop has {a} {things} and sells {b}. How many {things} remain?",
        "{x} has {a} {things}, {y} has {b}. How many more does {x} have?",
    ),
    "groups": (
        "There are {n} boxes with {a} {things} in each. How many {things} are there?",
        "{x} buys {n} bags of {a} {things}. How many {things} is that?",
        "{n} children have {a} {things} each. How many {things} do they have together?",
    ),
    "change": (
        "{x} buys {n} tickets for {a} dollars each and pays with {p} dollars. How many dollars "
        "does {x} get back?",
        "One ticket costs {a} dollars. {x} has {p} dollars and buys {n}. How many dollars remain?",
        "From {p} dollars {x} pays for {n} tickets at {a} dollars each. How much is the change?",
    ),
    "compare": (
        "{x} has {n} packs of {a} {things}, {y} has {m} packs of {b}. Who has more {things}?",
        "{x} fills {n} bags with {a} {things} each, {y} fills {m} with {b} each. Who uses more?",
    ),
    "calendar": (
        "Today is {day}. What day of the week is it in {d} days?",
        "A parcel was sent on a {day} and arrives {d} days later. On what day does it arrive?",
        "{x} leaves on a {day} and is back {d} days later. What day of the week is that?",
    ),
    "units": (
        "How many {small} are {n} {large} and {b} {small}?",
        "Write {n} {large} and {b} {small} in {small}.",
    ),
}
KINDS = tuple(_QUESTIONS)

# Writes a step, such as "40 + 70 = 110.", and returns its result: `value`, unless there is a slip.
Step = Callable[[str, int], int]


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A problem without its wording; `solve` calls its argument for all steps but the last."""

    numbers: tuple[int, ...]  # determine the calculation, within a kind
    fields: dict[str, Any]  # of the format strings
    solve: Callable[[Step], tuple[str, str]]  # returns the last step and the answer


@dataclasses.dataclass(frozen=True)
class WordProblems(Sequence[Example]):
    """A random-access sequence of drawn word problems; the fields are as in `SyntheticSource`."""

    num_examples: int
    seed: int = 0
    split: str = "train"  # shares no calculation with "test", whatever the seeds
    cue_share: float = 0.0  # of responses that repair a rationale with a slip, if one exists
    cue: str = " Wait, that is wrong."
    think_tag: str = "think"

    def __post_init__(self):
        splits_and_repairs.check(self)

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Example:
        rng = splits_and_repairs.rng_of(self, index)
        kind, is_far = self._kind_of(index)
        problem = self._distinct[index] if self.split == "test" else self._problem(rng, index)
        x, y = _draw_names(rng)
        fields = {"x": x, "y": y, "things": THINGS[rng.integers(len(THINGS))], **problem.fields}
        question = _QUESTIONS[kind][rng.integers(len(_QUESTIONS[kind]))].format(**fields)
        rationale, answer, _ = worked(problem)
        tag = self.think_tag
        context, taught = "", f"<{tag}>{rationale}"
        if rng.random() < self.cue_share and (wrong := _wrong_rationales(problem)):
            slip = wrong[rng.integers(len(wrong))]
            context, taught = splits_and_repairs.repair(f"<{tag}>{slip}", self.cue, rationale)
        return Example(
            id=f"{self.split}-{self.seed}-{index}",
            source=f"word_problems/{kind}{FAR if is_far else ''}",
            images=(),
            question=question,
            answer=answer,
            rationale=rationale,
            response=f"{taught}</{tag}><answer>{answer}</answer>",
            context=context,
        )

    def _kind_of(self, index: int) -> tuple[str, bool]:
        """(kind, whether its numbers are larger than those of the training split)."""
        turn, number = divmod(index, len(KINDS))
        return KINDS[number], self.split == "test" and turn % 2 == 1

    def _problem(self, rng: np.random.Generator, index: int) -> _Problem:
        kind, is_far = self._kind_of(index)
        while True:
            problem = _SAMPLERS[kind](rng, is_far)
            if is_far or splits_and_repairs.split_of(f"{kind}{problem.numbers}") == self.split:
                return problem

    @functools.cached_property
    def _distinct(self) -> list[_Problem]:
        """The problems in order; none repeats before all of its kind and range were drawn."""
        problems: list[_Problem] = []
        asked: dict[tuple[str, bool], set[tuple[int, ...]]] = {}
        num_all: dict[tuple[str, bool], int] = {}  # number of calculations, once exhausted
        for index in range(self.num_examples):
            rng, kind = splits_and_repairs.rng_of(self, index), self._kind_of(index)
            seen = asked.setdefault(kind, set())
            if len(seen) == num_all.get(kind):
                seen.clear()
            for _ in range(_MAX_REPEATS):
                problem = self._problem(rng, index)
                if problem.numbers not in seen:
                    break
            else:
                num_all[kind] = len(seen)
                seen.clear()
            seen.add(problem.numbers)
            problems.append(problem)
        return problems


def worked(
    problem: _Problem, slip: tuple[int, int] | None = None
) -> tuple[str, str, tuple[int, ...]]:
    """The rationale, the answer ("" for a tie) and the results of all steps but the last.

    A slip is (step, offset of its result); later steps use the wrong result.
    """
    written: list[str] = []
    results: list[int] = []

    def step(text: str, value: int) -> int:
        if slip is not None and slip[0] == len(written):
            value += slip[1]
        written.append(f"{text} = {value}.")
        results.append(value)
        return value

    last, answer = problem.solve(step)
    return " ".join([*written, last]), answer, tuple(results)


def _wrong_rationales(problem: _Problem) -> list[str]:
    """The rationales with one slip, by 1, or by 10 in results from 20 on, that change the answer.

    Those with negative results are left out as implausible.
    """
    _, answer, results = worked(problem)
    slips = [
        (step, sign * size)
        for step, result in enumerate(results)
        for size in (1, 10)[: 1 + (result >= 20)]
        for sign in (1, -1)
    ]
    return [
        text
        for text, other, reached in (worked(problem, slip) for slip in slips)
        if other not in ("", answer) and min(reached) >= 0 and not other.startswith("-")
    ]


def _draw(rng: np.random.Generator, low: int, high: int, *, step: int = 0) -> int:
    """A number in [low, high] that is not a multiple of `step`, if that is given."""
    while True:
        number = int(rng.integers(low, high + 1))
        if not step or number % step:
            return number


def _draw_names(rng: np.random.Generator) -> tuple[str, str]:
    first, second = rng.permutation(len(NAMES))[:2]
    return NAMES[first], NAMES[second]


def _total(rng: np.random.Generator, is_far: bool) -> _Problem:
    a = _draw(rng, *((71, 99) if is_far else (11, 69)), step=10)
    b = _draw(rng, 11, 99 if is_far else 69, step=10)
    if rng.random() < 0.5:
        a, b = b, a

    def solve(step: Step) -> tuple[str, str]:
        tens = step(f"Tens: {a - a % 10} + {b - b % 10}", a - a % 10 + b - b % 10)
        ones = step(f"Ones: {a % 10} + {b % 10}", a % 10 + b % 10)
        return f"Then {tens} + {ones}.", str(tens + ones)

    return _Problem((min(a, b), max(a, b)), {"a": a, "b": b}, solve)


def _left(rng: np.random.Generator, is_far: bool) -> _Problem:
    a = _draw(rng, *((71, 99) if is_far else (31, 69)))
    b = _draw(rng, 11, a - 5, step=10)

    def solve(step: Step) -> tuple[str, str]:
        tens = b - b % 10
        rest = step(f"{b} is {tens} and {b % 10}. {a} - {tens}", a - tens)
        return f"Then {rest} - {b % 10}.", str(rest - b % 10)

    return _Problem((a, b), {"a": a, "b": b}, solve)


def _groups(rng: np.random.Generator, is_far: bool) -> _Problem:
    n = _draw(rng, 2, 6)
    a = _draw(rng, *((41, 69) if is_far else (12, 39)), step=10)

    def solve(step: Step) -> tuple[str, str]:
        tens = step(f"Tens: {n} x {a - a % 10}", n * (a - a % 10))
        ones = step(f"Ones: {n} x {a % 10}", n * (a % 10))
        return f"Then {tens} + {ones}.", str(tens + ones)

    return _Problem((n, a), {"n": n, "a": a}, solve)


def _change(rng: np.random.Generator, is_far: bool) -> _Problem:
    n = _draw(rng, 2, 5)
    a = _draw(rng, *((21, 35) if is_far else (3, 19)))
    enough = [note for note in _NOTES if note > n * a]
    p = enough[rng.integers(min(len(enough), 2))]

    def solve(step: Step) -> tuple[str, str]:
        cost = step(f"Cost: {n} x {a}", n * a)
        return f"Then {p} - {cost}.", str(p - cost)

    return _Problem((n, a, p), {"n": n, "a": a, "p": p}, solve)


def _compare(rng: np.random.Generator, is_far: bool) -> _Problem:
    while True:
        n, m = _draw(rng, 2, 6), _draw(rng, 2, 6)
        a, b = (_draw(rng, *((13, 19) if is_far else (3, 12))) for _ in range(2))
        if n * a != m * b:
            break
    x, y = _draw_names(rng)

    def solve(step: Step) -> tuple[str, str]:
        first = step(f"{x}: {n} x {a}", n * a)
        second = step(f"{y}: {m} x {b}", m * b)
        more = "" if first == second else x if first > second else y
        return f"Compare {first} and {second}.", more

    numbers = (*min((n, a), (m, b)), *max((n, a), (m, b)))
    return _Problem(numbers, {"x": x, "y": y, "n": n, "a": a, "m": m, "b": b}, solve)


def _calendar(rng: np.random.Generator, is_far: bool) -> _Problem:
    today = int(rng.integers(7))
    d = _draw(rng, *((31, 60) if is_far else (8, 30)), step=7)

    def solve(step: Step) -> tuple[str, str]:
        days = step(f"{d // 7} weeks: {d // 7} x 7", d - d % 7)
        rest = step(f"{d} - {days}", d - days)
        return f"Go {rest} days on from {DAYS[today]}.", DAYS[(today + rest) % 7]

    return _Problem((today, d), {"day": DAYS[today], "d": d}, solve)


def _units(rng: np.random.Generator, is_far: bool) -> _Problem:
    large, small, size = UNITS[rng.integers(len(UNITS))]
    n = _draw(rng, *((6, 9) if is_far else (2, 5)))
    b = _draw(rng, 2, size - 1)

    def solve(step: Step) -> tuple[str, str]:
        whole = step(f"{n} {large}: {n} x {size}", n * size)
        return f"Then {whole} + {b}.", str(whole + b)

    # Hours in minutes and minutes in seconds are one calculation.
    return _Problem((size, n, b), {"large": large, "small": small, "n": n, "b": b}, solve)


_SAMPLERS: Mapping[str, Callable[[np.random.Generator, bool], _Problem]] = dict(
    zip(KINDS, (_total, _left, _groups, _change, _compare, _calendar, _units), strict=True)
)
