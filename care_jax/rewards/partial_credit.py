"""A ready-made reward function: partial credit by the relative error of a number.

Use it as `verifier.reward = "care_jax.rewards.partial_credit:relative_error"`, with
`verifier.success = 1.0`: then only right answers are successes, as with the built-in verifier,
while failures differ in reward.
"""

from __future__ import annotations

from collections.abc import Sequence

from care_jax.batch import Example
from care_jax.rewards import answers
from care_jax.rewards.equivalence import notation
from care_jax.rewards.equivalence.quantities import read_number
from care_jax.rewards.reward_function import Components
from care_jax.rewards.verifier import parse_text

MAX_PARTIAL = 0.9  # limit of a wrong answer's credit, below the 1 of a right answer


def relative_error(question: str, responses: Sequence[str], example: Example) -> list[Components]:
    """acc = 1 for an answer equivalent to the gold answer g; else, where both are numbers,

        acc = 0.9 · max(0, 1 - |a - g| / |g|),   |a| in place of |a| / |g| where g = 0

    0 for any other answer: other words, another unit, a percent sign on one side only, no
    well-formed answer span. The gold answer must be text.
    """
    return [{"acc": _credit(_answer_of(text), example)} for text in responses]


def _answer_of(text: str) -> str:
    """The content of the one well-formed answer span; "" without one.

    A reward function does not receive `data.think_tag`, so it is inferred from the text.
    """
    think_tag = "reasoning" if "<reasoning>" in text else "think"
    return parse_text(text, think_tag=think_tag).answer


def _credit(answer: str, example: Example) -> float:
    if not answer:
        return 0.0
    is_right = answers.is_equivalent(
        answer,
        example.answer,
        choices=example.choices,
        tolerance=example.tolerance,
        units_matter=example.units == "matter",
    )
    if is_right:
        return 1.0
    number, gold = (read_number(notation.clean(text)) for text in (answer, example.answer))
    if not (number and gold) or (number.unit, number.is_percent) != (gold.unit, gold.is_percent):
        return 0.0
    distance = abs(number.value - gold.value) / (abs(gold.value) or 1)
    return MAX_PARTIAL * float(max(0, 1 - distance))
