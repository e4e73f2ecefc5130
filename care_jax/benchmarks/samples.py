"""Answers of an evaluation and the samples they become, in lmms-eval's format.

A question may have several responses. Its accuracy is then their mean, and `accs` has each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from care_jax.batch import Example, Rollouts, answer_text
from care_jax.benchmarks import response

Sample = dict[str, Any]


class Answers(NamedTuple):
    """This process's share of some questions and its G answers to each, in their order.

    Attributes:
        places: the questions' indices.
        texts: the rollouts' texts, without the token that ends them.
        dropped: questions that fit no bucket and were not answered, by index.
    """

    places: list[int]
    examples: list[Example]
    rollouts: Rollouts
    texts: list[list[str]]
    dropped: dict[int, Example]


class Verdict(NamedTuple):
    """What is said of the responses to one question.

    Attributes:
        accs: 1.0 for a success, else 0.0, of each response.
        is_parsed: whether all have an answer.
        acc_judged: mean over the responses with the word of a `judge.Judge`; None if it gave none.
        more: further fields of the sample.
    """

    accs: list[float]
    is_parsed: bool
    acc_judged: float | None = None
    more: Mapping[str, Any] = {}


class Questions(NamedTuple):
    """What is evaluated and how: the held-out questions, or those of a benchmark.

    `verdicts` gives one per answered question, `categories` those that a sample counts towards.
    """

    name: str
    examples: Sequence[Example]
    verdicts: Callable[[Answers], list[Verdict]]
    categories: Callable[[Sample], list[str]]


def samples_of(answers: Answers, verdicts: Sequence[Verdict]) -> list[Sample]:
    """A sample per question, with the fields that `scoreboard.score` needs."""
    num_samples = answers.rollouts.tokens.shape[1]
    is_complete = [bool(row.all()) for row in np.asarray(answers.rollouts.is_complete)]
    columns = answers.places, answers.examples, answers.texts, verdicts, is_complete
    unasked = [""] * num_samples, Verdict([0.0] * num_samples, is_parsed=False), False
    return [_sample(*row) for row in zip(*columns, strict=True)] + [
        _sample(place, example, *unasked) | {"is_dropped": True}
        for place, example in answers.dropped.items()
    ]


def _sample(
    place: int, example: Example, texts: Sequence[str], verdict: Verdict, is_complete: bool
) -> Sample:
    document = json.dumps(example.extra, ensure_ascii=False, default=str)
    return {
        "doc_id": place,
        "id": example.id,
        "source": example.source,
        "doc": json.loads(document),
        "target": example.answer,
        "input": example.question,
        "resps": list(texts),
        "filtered_resps": [response.unwrap(text) for text in texts],
        "doc_hash": _hash(document),
        "prompt_hash": _hash(example.question),
        "target_hash": _hash(answer_text(example.answer)),
        "acc": sum(verdict.accs) / len(texts),
        **({"accs": verdict.accs} if len(texts) > 1 else {}),
        "acc_judged": verdict.acc_judged,
        "is_parsed": verdict.is_parsed,
        "is_complete": is_complete,
        "is_dropped": False,
        **verdict.more,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
