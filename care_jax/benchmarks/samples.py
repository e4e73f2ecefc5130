"""Answers of an evaluation and the samples they become, in lmms-eval's format.

A question may have several responses. Its accuracy is then their mean, and `accs` has each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from care_jax.batch import Example, Rollouts, answer_text
from care_jax.benchmarks import response
from care_jax.benchmarks.judge import Judge

Sample = dict[str, Any]


class Answers(NamedTuple):
    """This process's share of some questions and its answers, in the order of the questions.

    Attributes:
        places: the questions' indices.
        examples: the questions.
        rollouts: G of each.
        texts: the rollouts' texts, without the token that ends them.
        dropped: indices of questions that fit no bucket and were not answered.
    """

    places: list[int]
    examples: list[Example]
    rollouts: Rollouts
    texts: list[list[str]]
    dropped: list[int]


@dataclasses.dataclass
class Verdict:
    """What is said of the responses to one question.

    Attributes:
        accs: 1.0 for a success, else 0.0, of each response.
        is_parsed: whether each response has an answer.
        acc_judged: mean over the responses, with the word of a `Judge`; None if it gave none.
        more: further fields of the sample.
    """

    accs: Sequence[float]
    is_parsed: Sequence[bool]
    acc_judged: float | None = None
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Questions(Protocol):
    """What is evaluated and how answers are judged: `suite.Benchmark` and `held_out.HeldOut`."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Example: ...

    def document(self, place: int, example: Example) -> Mapping[str, Any]:
        """The data row of a question, for its sample."""
        ...

    def verdicts(self, answers: Answers, judge: Judge | None) -> list[Verdict]:
        """One per answered question; a judge may be asked about answers that seem wrong."""
        ...

    def categories(self, sample: Sample) -> list[str]:
        """The categories that a sample counts towards."""
        ...


def samples_of(questions: Questions, answers: Answers, judge: Judge | None) -> list[Sample]:
    """A sample per question, with the fields that `scoreboard.score` needs."""
    num_samples = answers.rollouts.tokens.shape[1]
    is_complete = [bool(row.all()) for row in np.asarray(answers.rollouts.is_complete)]
    verdicts = questions.verdicts(answers, judge)
    columns = answers.places, answers.examples, answers.texts, verdicts, is_complete
    samples = [_sample(questions, *row) for row in zip(*columns, strict=True)]
    for place in answers.dropped:
        unasked = Verdict([0.0] * num_samples, [False] * num_samples)
        sample = _sample(questions, place, questions[place], [""] * num_samples, unasked, False)
        samples.append(sample | {"is_dropped": True})
    return samples


def _sample(
    questions: Questions,
    place: int,
    example: Example,
    texts: list[str],
    verdict: Verdict,
    is_complete: bool,
) -> Sample:
    document = json.dumps(questions.document(place, example), ensure_ascii=False, default=str)
    accs = list(verdict.accs)
    return {
        "doc_id": place,
        "id": example.id,
        "source": example.source,
        "doc": json.loads(document),
        "target": example.answer,
        "input": example.question,
        "resps": texts,
        "filtered_resps": [response.unwrap(text) for text in texts],
        "doc_hash": _hash(document),
        "prompt_hash": _hash(example.question),
        "target_hash": _hash(answer_text(example.answer)),
        "acc": sum(accs) / len(accs),
        **({"accs": accs} if len(accs) > 1 else {}),
        "acc_judged": verdict.acc_judged,
        "is_parsed": all(verdict.is_parsed),
        "is_complete": is_complete,
        "is_dropped": False,
        **verdict.more,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
