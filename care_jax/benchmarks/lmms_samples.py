"""Samples of a benchmark in lmms-eval's format, scored by its rules and, if asked, by a judge.

A question may have several responses. Its accuracy is then their mean, and `accs` has each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from care_jax.batch import Example
from care_jax.benchmarks import response
from care_jax.benchmarks.judge import Case, Judge
from care_jax.benchmarks.suite import Benchmark

Sample = dict[str, Any]


def scored(
    benchmark: Benchmark,
    places: Sequence[int],
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    is_complete: Sequence[bool],
    judge: Judge | None,
) -> list[Sample]:
    """A sample per question, with the fields that `scoreboard.score` needs.

    Args:
        benchmark: gives the rules.
        places: index of each question in it.
        examples: the questions.
        texts: the responses to each, as many to one as to any other.
        is_complete: whether all responses to a question ended by themselves.
        judge: asked about free-form answers that the rules parse but call wrong; None: no one is.
    """
    samples = [
        _sample(benchmark, place, example, list(responses), bool(ended))
        for place, example, responses, ended in zip(
            places, examples, texts, is_complete, strict=True
        )
    ]
    if judge is not None:
        _add_verdicts(judge, benchmark, examples, samples)
    return samples


def dropped(benchmark: Benchmark, place: int, num_samples: int) -> Sample:
    """The sample of a question that was not asked, as its prompt fits no bucket."""
    sample = _sample(benchmark, place, benchmark[place], [""] * num_samples, False)
    return sample | {"is_dropped": True}


def _sample(
    benchmark: Benchmark, place: int, example: Example, texts: list[str], is_complete: bool
) -> Sample:
    row, scorer = benchmark.rows[place], benchmark.scorer
    document = json.dumps(row, ensure_ascii=False, default=str)
    accs = [float(scorer.is_correct(text, row)) for text in texts]
    return {
        "doc_id": place,
        "doc": json.loads(document),
        "target": example.answer,
        "input": example.question,
        "resps": texts,
        "filtered_resps": [response.unwrap(text) for text in texts],
        "doc_hash": _hash(document),
        "prompt_hash": _hash(example.question),
        "target_hash": _hash(example.answer),
        "acc": sum(accs) / len(accs),
        **({"accs": accs} if len(accs) > 1 else {}),
        "acc_judged": None,
        "is_parsed": all(scorer.parse(text, row) is not None for text in texts),
        "is_complete": is_complete,
        "is_dropped": False,
    }


def _add_verdicts(
    judge: Judge, benchmark: Benchmark, examples: Sequence[Example], samples: Sequence[Sample]
) -> None:
    """Sets `acc_judged` of the questions of which the judge decided some response."""
    asked = [
        (sample, index, Case(example.question, example.answer, sample["filtered_resps"][index]))
        for sample, example in zip(samples, examples, strict=True)
        if not example.choices
        for index, acc in enumerate(_accs(sample))
        if not acc and _is_parsed(benchmark, sample, index)
    ]
    verdicts = judge.verdicts([case for *_, case in asked])
    judged: dict[int, list[float]] = {}
    for (sample, index, _), verdict in zip(asked, verdicts, strict=True):
        if verdict is not None:
            judged.setdefault(sample["doc_id"], _accs(sample))[index] = float(verdict)
    for sample in samples:
        if (accs := judged.get(sample["doc_id"])) is not None:
            sample["acc_judged"] = sum(accs) / len(accs)


def _accs(sample: Sample) -> list[float]:
    return list(sample.get("accs", [sample["acc"]]))


def _is_parsed(benchmark: Benchmark, sample: Sample, index: int) -> bool:
    row = benchmark.rows[sample["doc_id"]]
    return benchmark.scorer.parse(sample["resps"][index], row) is not None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
