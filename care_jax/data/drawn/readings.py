"""Drawn figures with rationales that state a count, which can be misread and then repaired.

The pictures are the diagrams of `synthetic`. A rationale counts the shapes, states the number that
was read, and names the operation; only the answer has the result:

    <think>I look at the picture and count the circles one by one. There are 4. The question is
    about 2 more, so the answer must be the sum of both numbers.</think><answer>6</answer>

Wording and order vary. The teacher of the cold start makes two kinds of mistake, each in half of
the kinds of question:

- In `MISREAD` kinds it miscounts by one (`misread_share`), and the answer follows from this count.
  Counting again repairs it.
- In `MISCOMPUTED` kinds it counts correctly and gives a wrong result (`teacher_error`, as in
  `synthetic`). Counting again does not repair it; credit on the answer tokens does.

With `mixed_errors` every kind has both: what is not misread may be miscomputed. A lucky response
(`lucky_share`) misreads and miscomputes so that the answer is right, in the longest wording.

A repair (`cue_share`) is a rationale, the cue, and the right rationale in another wording. The
first rationale has a wrong count, in all kinds of question, except in a share `_RIGHT_PREFIX`.

An example is a pure function of (seed, split, index). The splits share no (picture, question).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from care_jax.batch import Example
from care_jax.data.drawn import splits_and_repairs
from care_jax.data.drawn.synthetic import (
    MAX_COUNT,
    Diagram,
    draw,
    lowest_count,
    mistake,
    sample_diagram,
    split_of,
)

MISREAD = ("sum", "missing")
MISCOMPUTED = ("difference", "twice")
KINDS = ("sum", "difference", "missing", "twice")

_RIGHT_PREFIX = 0.15  # share of the repairs whose first rationale is right
# kind -> question. `a` is the shape, `b` the number.
_QUESTIONS = {
    "sum": "How many {a}s with {b} more?",
    "difference": "How many {a}s with {b} fewer?",
    "missing": "How many {a}s are missing to {b}?",
    "twice": "How many are twice the {a}s?",
}
# kind -> half-open range of the number `b`, which "twice" does not use.
_NUMBERS = {"sum": (1, 4), "difference": (1, 4), "missing": (MAX_COUNT, 10), "twice": (2, 3)}
# The reading `n` and the operation, each in several wordings of different lengths.
_READINGS = (
    "I look at the picture and count the {a}s one by one. There are {n}.",
    "Count each {a} in the picture, step by step. The number of {a}s is {n}.",
    "In the picture there are {n} {a}s, by counting one after the other.",
    "Let me look at all of the {a}s and count each of them. I have {n}.",
)
_OPERATIONS = {
    "sum": (
        "The question is about {b} more, so the answer must be the sum of both numbers.",
        "With {b} more we have to add the two numbers.",
        "Then add {b} to the number of {a}s for the answer.",
    ),
    "difference": (
        "The question is about {b} fewer, so the answer must be the difference of both numbers.",
        "With {b} fewer we have to subtract the second number.",
        "Then subtract {b} from the number of {a}s for the answer.",
    ),
    "missing": (
        "The question is about what is missing to {b}, so the answer must be what is left over.",
        "To have {b} of them we subtract the number of {a}s.",
        "Then take the number of {a}s from {b} for the answer.",
    ),
    "twice": (
        "The question is about twice the number, so the answer is the sum of it with the same.",
        "For twice as many we have to add the same number again.",
        "Then take the number of {a}s two times for the answer.",
    ),
}


@dataclasses.dataclass(frozen=True)
class ReadingsSource(Sequence[Example]):
    """A random-access sequence of drawn examples, whose rationale and answer are always right.

    Shares are probabilities in [0, 1]. Repairs are drawn first, then lucky responses; the shares of
    mistakes are of the rest. The other fields are those of `SyntheticSource`.
    """

    num_examples: int
    seed: int = 0
    split: str = "train"
    misread_share: float = 0.0  # of responses of `MISREAD` kinds with a wrong count
    teacher_error: float = 0.0  # of responses of `MISCOMPUTED` kinds with a wrong result
    mixed_errors: bool = False  # both mistakes in every kind
    lucky_share: float = 0.0  # of responses with a wrong count and the right answer; no repairs
    cue_share: float = 0.0  # of responses that are repairs, with the right answer
    cue: str = " Wait, that is wrong."
    think_tag: str = "think"

    def __post_init__(self):
        splits_and_repairs.check(self)

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Example:
        rng = splits_and_repairs.rng_of(self, index)
        kind = KINDS[index % len(KINDS)]
        while True:
            diagram, b = sample_diagram(rng, kind, _NUMBERS[kind])
            question = _QUESTIONS[kind].format(a=diagram.shape, b=b)
            if split_of(diagram, question) == self.split:
                break
        count = len(diagram.cells)
        answer = _result(kind, count, b)
        right = stated = _rationale(rng, kind, diagram, b, count)
        response_answer = answer
        if rng.random() < self.cue_share:
            is_right = rng.random() < _RIGHT_PREFIX
            first = count if is_right else _misreading(rng, kind, count, b)
            wrong = _rationale(rng, kind, diagram, b, first)
            stated = "".join(splits_and_repairs.repair(wrong, self.cue, right))
        elif self.lucky_share and rng.random() < self.lucky_share:
            reading = _misreading(rng, kind, count, b)
            stated = max((_rationale(rng, kind, diagram, b, reading) for _ in range(32)), key=len)
        elif self._may(kind, MISREAD) and rng.random() < self.misread_share:
            reading = _misreading(rng, kind, count, b)
            stated = _rationale(rng, kind, diagram, b, reading)
            response_answer = _result(kind, reading, b)
        elif self._may(kind, MISCOMPUTED) and rng.random() < self.teacher_error:
            response_answer = mistake(answer)
        tag = self.think_tag
        return Example(
            id=f"{self.split}-{self.seed}-{index}",
            source=f"readings/{kind}",
            images=(draw(diagram),),
            question=f"<image>{question}",
            answer=answer,
            rationale=right,
            response=f"<{tag}>{stated}</{tag}><answer>{response_answer}</answer>",
        )

    def _may(self, kind: str, kinds: tuple[str, ...]) -> bool:
        return self.mixed_errors or kind in kinds


def _result(kind: str, count: int, b: int) -> str:
    results = {"sum": count + b, "difference": count - b, "missing": b - count, "twice": 2 * count}
    return str(results[kind])


def _misreading(rng: np.random.Generator, kind: str, count: int, b: int) -> int:
    """The count plus or minus one, within the range that can be drawn."""
    near = [n for n in (count - 1, count + 1) if lowest_count(kind, b) <= n <= MAX_COUNT]
    return int(rng.choice(near))


def _rationale(rng: np.random.Generator, kind: str, diagram: Diagram, b: int, reading: int) -> str:
    """States the count and the operation, in either order."""
    text = _READINGS[rng.integers(len(_READINGS))]
    operation = _OPERATIONS[kind][rng.integers(len(_OPERATIONS[kind]))]
    # "Then ..." cannot come first.
    is_first = not operation.startswith("Then") and rng.random() < 0.5
    text = f"{operation} {text}" if is_first else f"{text} {operation}"
    return text.format(a=diagram.shape, b=b, n=reading)
