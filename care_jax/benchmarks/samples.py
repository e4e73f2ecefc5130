"""Converts the answers of an evaluation to samples in lmms-eval's format, and keeps them in a file.

The accuracy of a question with several responses is their mean; `accs` has each. It is None if a
reward function failed on any of them.

A line of the file ends with the SHA-256 of its other fields, since a flipped bit may make another
verdict of one that was paid for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from care_jax.batch import Example, Rollouts, answer_text
from care_jax.benchmarks import response
from care_jax.devices.whole_file import set_aside
from care_jax.report.console import print_line

Sample = dict[str, Any]
_SUM = ', "sha256": "'


class Answers(NamedTuple):
    """Questions of this process, in order, and G answers to each.

    Attributes:
        indices: of the questions, in the benchmark.
        texts: the rollouts' texts, without EOS.
        dropped: questions that fit no bucket and were not answered, by index.
    """

    indices: list[int]
    examples: list[Example]
    rollouts: Rollouts
    texts: list[list[str]]
    dropped: dict[int, Example]


class QuestionVerdict(NamedTuple):
    """The verdict on the responses to one question.

    Attributes:
        accs: of each response, 1.0 for a success, 0.0 for a failure, None if it was not judged.
        is_parsed: whether all have an answer.
        more: further fields of the sample.
    """

    accs: Sequence[float | None]
    is_parsed: bool
    more: Mapping[str, Any] = {}


class Questions(NamedTuple):
    """Questions, held-out or of a benchmark, and how they are scored.

    `verdicts` returns one per answered question, `categories` the categories of a sample. `judged`
    returns samples with the verdicts of a judge that they lack.
    """

    name: str
    examples: Sequence[Example]
    verdicts: Callable[[Answers], list[QuestionVerdict]]
    categories: Callable[[Sample], list[str]]
    judged: Callable[[Sequence[Sample]], list[Sample]] = list


def samples_of(answers: Answers, verdicts: Sequence[QuestionVerdict]) -> list[Sample]:
    """A sample per question, with the fields that `scoreboard.score` needs."""
    num_samples = answers.rollouts.tokens.shape[1]
    is_complete = [bool(row.all()) for row in np.asarray(answers.rollouts.is_complete)]
    columns = answers.indices, answers.examples, answers.texts, verdicts, is_complete
    unasked = [""] * num_samples, QuestionVerdict([0.0] * num_samples, is_parsed=False), False
    return [_sample(*row) for row in zip(*columns, strict=True)] + [
        _sample(index, example, *unasked) | {"is_dropped": True}
        for index, example in answers.dropped.items()
    ]


def to_line(sample: Sample) -> str:
    """The line of a sample, with its sum."""
    text = json.dumps(sample, ensure_ascii=False)
    return f"{text[:-1]}{_SUM}{_hash(text)}" + '"}\n'


def read(path: pathlib.Path, digest: str | None) -> list[Sample]:
    """The samples of a file whose field "settings" is `digest`, one per question.

    It is None for samples that a reward function judged.

    A file of other settings is renamed, since its samples may have taken hours; one of these
    settings that was renamed before is taken back. Damaged lines are reported and moved to
    `<name>.damaged`; the caller rewrites the file. A last line without newline is of a killed run,
    and is ignored.
    """
    found: dict[int, Sample] = {}
    damaged, others = [], set()
    # Not `splitlines`, which also splits at U+2028 in a response.
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        text, _, rest = line.decode(errors="replace").rpartition(_SUM)
        if f"{_hash(text + '}')}" + '"}' != rest:
            damaged.append(line)
            told = f"moved to {path.name}.damaged, and its question is answered again"
            print_line(f"{path}:{number} is damaged (SHA-256 differs); {told}")
            continue
        sample = json.loads(text + "}")
        if sample["settings"] == digest:
            found.setdefault(sample["doc_id"], sample)
        else:
            others.add(sample["settings"] or "reward")
    set_aside(path, damaged)
    if others and not found:
        numbered = (f"{min(others)}.{i}" for i in itertools.count(2))
        names = (_renamed(path, name) for name in itertools.chain([min(others)], numbered))
        renamed = path.replace(next(name for name in names if not name.exists()))
        print_line(f"the samples of other weights or settings are kept in {renamed}")
    if digest and not found and (before := _renamed(path, digest)).exists():
        before.replace(path)
        print_line(f"the samples of these weights and settings are taken back from {before}")
        return read(path, digest)
    return [*found.values()]


def _renamed(path: pathlib.Path, name: str) -> pathlib.Path:
    return path.with_name(f"{path.stem}.{name}{path.suffix}")


def _sample(
    index: int, example: Example, texts: Sequence[str], verdict: QuestionVerdict, is_complete: bool
) -> Sample:
    document = json.dumps(example.extra, ensure_ascii=False, default=str)
    judged = [acc for acc in verdict.accs if acc is not None]
    return {
        "doc_id": index,
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
        "acc": sum(judged) / len(texts) if len(judged) == len(texts) else None,
        **({"accs": list(verdict.accs)} if len(texts) > 1 else {}),
        "acc_judged": None,
        "is_parsed": verdict.is_parsed,
        "is_complete": is_complete,
        "is_dropped": False,
        **verdict.more,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
