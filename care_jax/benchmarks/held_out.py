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

    def document(self, place: int, example: Example) -> Mapping[str, Any]:
        return {name: getattr(example, name) for name in ("question", "answer", "choices", "extra")}

    def verdicts(self, answers: Answers, judge: Judge | None) -> list[Verdict]:
        """The verifier's; no language model is asked."""
        scores, _, _, components = self._score(answers)
        verdicts = []
        for row, (accs, fmts) in enumerate(zip(scores.acc, scores.fmt, strict=True)):
            more: dict[str, Any] = {"fmt": float(fmts.mean())}
            if components is not None:
                found = components[row]
                more["components"] = found[0] if len(found) == 1 else list(found)
            verdicts.append(Verdict(accs.tolist(), scores.has_answer[row].tolist(), more=more))
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
    found = [sample.get("components", []) for sample in answered]
    rows = [row for rows in found for row in (rows if isinstance(rows, list) else [rows])]
    sums = diagnostics.component_sums([np.array(rows, object)[:, None]], num_rollouts=1)
    by_source = figures["categories"] if len(figures["categories"]) > 1 else {}
    return {
        **{name: figures[name] for name in ("acc", "acc_low", "acc_high")},
        "fmt": float(np.mean([sample["fmt"] for sample in answered])),
        "num_examples": len(answered),
        **{name: rate for name, rate in figures.items() if name.startswith("pass@")},
        **diagnostics.component_means([sums]),
        **{f"acc/{source}": each["acc"] for source, each in by_source.items()},
    }
