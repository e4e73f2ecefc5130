"""A ready-made reward function: partial credit by the relative error of a number.

Use it as `verifier.reward = "care_jax.rewards.partial_credit:relative_error"`, with
`verifier.success = 1.0`: then only right answers are successes, as with the built-in verifier,
while failures differ in reward.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

from care_jax.batch import Example
from care_jax.rewards import answers
from care_jax.rewards.equivalence import notation
from care_jax.rewards.equivalence.quantities import read_number
from care_jax.rewards.reward_function import Components
from care_jax.rewards.symbolic import Comparison, is_equal
from care_jax.rewards.verifier import parse_text

MAX_PARTIAL = 0.9  # limit of a wrong answer's credit, below the 1 of a right answer
_OPENING = re.compile("<(think|reasoning)>")
_CPU_SECONDS = 2.0  # of computer algebra for a group, which `verifier.timeout` (5 s) must exceed


def relative_error(question: str, responses: Sequence[str], example: Example) -> list[Components]:
    """acc = 1 for an answer equivalent to the gold answer g; else, where both are numbers,

        acc = 0.9 · max(0, 1 - |a - g| / |g|),   |a| in place of |a| / |g| where g = 0

    0 for any other answer: other words, another unit, a percent sign on one side only, no
    well-formed answer span, too expensive to compare. The gold answer must be text.
    """
    found = [_answer_of(text) for text in responses]
    outcomes = [answers.compare_example(answer, example) for answer in found]
    replies = _ask(outcome for outcome in outcomes if isinstance(outcome, Comparison))
    return [
        {"acc": _credit(answer, replies.get(outcome, outcome), example)}
        for answer, outcome in zip(found, outcomes, strict=True)
    ]


def _answer_of(text: str) -> str:
    """The content of the one well-formed answer span; "" without one.

    A reward function does not receive `data.think_tag`: it is the tag that opens first.
    """
    opening = _OPENING.search(text)
    return parse_text(text, think_tag=opening[1] if opening else "think").answer


def _ask(comparisons: Iterable[Comparison]) -> dict[str | Comparison, str]:
    """The outcomes of comparisons, short ones first, which share the CPU time of a group.

    What one leaves of its time is for the others, so that a few costly answers cost no other one.
    """
    waiting = sorted(set(comparisons), key=lambda comparison: len(comparison.prediction))
    left, outcomes = _CPU_SECONDS, {}
    for index, comparison in enumerate(waiting):
        limit, start = left / (len(waiting) - index), time.monotonic()
        (outcomes[comparison],) = answers.shared_pool().ask([comparison], limit)
        left -= min(limit, time.monotonic() - start)
    return outcomes


def _credit(answer: str, outcome: str | Comparison, example: Example) -> float:
    if not answer:
        return 0.0
    if isinstance(outcome, str) and is_equal(outcome):
        return 1.0
    number, gold = (read_number(notation.clean(text)) for text in (answer, example.answer))
    if not (number and gold) or (number.unit, number.is_percent) != (gold.unit, gold.is_percent):
        return 0.0
    distance = abs(number.value - gold.value) / (abs(gold.value) or 1)
    return MAX_PARTIAL * float(max(0, 1 - distance))
