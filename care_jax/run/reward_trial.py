"""Calls a reward function before the run needs it, since a cold start may take hours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from care_jax.batch import Example, answer_text
from care_jax.data.rows import LeftOut, usable
from care_jax.devices import distributed
from care_jax.rewards.failures import failure
from care_jax.rewards.verifier import Verifier, parse_text

_NUM_ROWS = 8  # tried until the function judges one, as it may fail on some


def check_reward(
    verifier: Verifier, examples: Sequence[Example], section: str, *, group_size: int
) -> None:
    """Has groups of made-up responses judged; all processes call this together.

    Half of a group's responses give the row's answer, in the format. `section` is where the rows
    come from, such as "data.train".

    Raises:
        RewardFailed: no response to the first rows was judged; has the function's error.
    """
    rows = itertools.islice(usable(examples, range(len(examples)), LeftOut()), _NUM_ROWS)
    is_judged = any(_is_judged(verifier, example, group_size) for example in rows)
    if not all(distributed.gather_json(is_judged)):
        what = f"before the first stage: no made-up response to rows of {section} was judged"
        raise failure(verifier, what)


def _is_judged(verifier: Verifier, example: Example, group_size: int) -> bool:
    tag, answers = verifier.think_tag, [answer_text(example.answer), "0"]
    texts = [
        f"<{tag}>{example.rationale or '.'}</{tag}><answer>{answers[number % 2]}</answer>"
        for number in range(group_size)
    ]
    parsed = [parse_text(text, think_tag=tag) for text in texts]
    verdicts = verifier.begin(texts, parsed, [example] * group_size, group_size=group_size)()
    return any(verdict.components for verdict in verdicts)
