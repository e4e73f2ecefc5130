"""Held-out questions as a benchmark, which the verifier or a reward function judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from care_jax.batch import Example
from care_jax.benchmarks.samples import Answers, Questions, QuestionVerdict, Sample
from care_jax.method import diagnostics
from care_jax.rewards.scores import Scored


def questions_of(examples: Sequence[Example], score: Callable[[Answers], Scored]) -> Questions:
    """The held-out examples as a benchmark; `score` verifies answers as `rewards.scores` does."""

    def verdicts(answers: Answers) -> list[QuestionVerdict]:
        scores, _, _, components = score(answers)
        found = []
        for row, (accs, fmts) in enumerate(zip(scores.acc, scores.fmt, strict=True)):
            more: dict[str, Any] = {"fmt": float(fmts.mean())}
            judged = accs.tolist()
            if components is not None:
                more["components"] = list(components[row])
                # Components are empty where the function failed.
                pairs = zip(judged, components[row], strict=True)
                judged = [acc if of_row else None for acc, of_row in pairs]
            found.append(QuestionVerdict(judged, bool(scores.has_answer[row].all()), more=more))
        return found

    return Questions("held_out", examples, verdicts, lambda sample: [sample["source"]])


def metrics_of(figures: Mapping[str, Any], judged: Sequence[Sample]) -> dict[str, float]:
    """The metrics of held-out questions, from `scoreboard.score` of those that were judged.

    Accuracy with its 95% Wilson interval, format, and accuracy by source, in [0, 1]; with several
    samples per question also pass@k, with a reward function its components.
    """
    rows = [np.array([sample.get("components", [])], object) for sample in judged]
    sums = diagnostics.component_sums(rows, num_rollouts=len(judged[0]["resps"]))
    by_source = figures["categories"] if len(figures["categories"]) > 1 else {}
    return {
        **{key: figures[key] for key in figures if key.startswith(("acc", "pass@"))},
        "fmt": float(np.mean([sample["fmt"] for sample in judged])),
        "num_examples": len(judged),
        **diagnostics.component_means([sums]),
        **{f"acc/{source}": each["acc"] for source, each in by_source.items()},
    }
