"""Held-out questions as a benchmark, which the verifier or a reward function judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from care_jax.batch import Example
from care_jax.benchmarks.judge import Judge
from care_jax.benchmarks.samples import Answers, Sample, Verdict
from care_jax.method import diagnostics
from care_jax.rewards.scores import Scored


class HeldOut:
    """Held-out `samples.Questions`.

    Args:
        examples: held out.
        score: gives the scores of answers, see `rewards.scores.start_scoring`.
    """

    name = "held_out"

    def __init__(self, examples: Sequence[Example], score: Callable[[Answers], Scored]):
        self._examples, self._score = examples, score

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, place: int) -> Example:
        return self._examples[place]

    def verdicts(self, answers: Answers, judge: Judge | None) -> list[Verdict]:
        """The verifier's; no language model is asked."""
        scores, _, _, components = self._score(answers)
        verdicts = []
        for row, (accs, fmts) in enumerate(zip(scores.acc, scores.fmt, strict=True)):
            more: dict[str, Any] = {"fmt": float(fmts.mean())}
            if components is not None:
                more["components"] = list(components[row])
            is_parsed = bool(scores.has_answer[row].all())
            verdicts.append(Verdict(accs.tolist(), is_parsed, more=more))
        return verdicts

    def categories(self, sample: Sample) -> list[str]:
        return [sample["source"]]


def metrics_of(figures: Mapping[str, Any], answered: Sequence[Sample]) -> dict[str, float]:
    """The metrics of held-out questions.

    Args:
        figures: from `scoreboard.score`, of `answered`.
        answered: samples of all questions but those that were dropped.

    Returns:
        accuracy and format in [0, 1], the accuracy's 95% Wilson interval, and accuracy by source;
        with several samples per question also pass@k, with a reward function its components.
    """
    rows = [np.array([sample.get("components", [])], object) for sample in answered]
    sums = diagnostics.component_sums(rows, num_rollouts=len(answered[0]["resps"]))
    by_source = figures["categories"] if len(figures["categories"]) > 1 else {}
    return {
        **{key: figures[key] for key in figures if key.startswith(("acc", "pass@"))},
        "fmt": float(np.mean([sample["fmt"] for sample in answered])),
        "num_examples": len(answered),
        **diagnostics.component_means([sums]),
        **{f"acc/{source}": each["acc"] for source, each in by_source.items()},
    }
