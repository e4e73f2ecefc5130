"""Which saved step is the best: steps ranked by a metric of their evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

_EVALUATION = "evaluation"  # key of what metrics were measured on; no metric's name


class Ranking:
    """The metrics of a stage's steps. Those are compared whose evaluation was the last one's.

    Two evaluations are the same if they agree in the keys that both have, so metrics of an earlier
    version, which have no evaluation, compare with all.

    Args:
        best_metric: name of the metric that ranks the steps; higher is better.
        evaluation: of this run, see `resume.evaluation`; JSON types.

    Attributes:
        stored: the metrics of each step, as its checkpoint has them.
    """

    def __init__(self, best_metric: str, evaluation: Mapping[str, Any]):
        self._metric = best_metric
        self._ours = self._last = json.loads(json.dumps(evaluation))
        self.stored: dict[int, dict[str, Any]] = {}

    def read(self, stored: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes the metrics of the saved steps, in order."""
        self.stored = {step: dict(metrics) for step, metrics in stored.items()}
        evaluated = [metrics for metrics in self.stored.values() if self._metric in metrics]
        if evaluated:
            self._last = evaluated[-1].get(_EVALUATION, {})

    def add(
        self, step: int, metrics: Mapping[str, float], saved: Iterable[int]
    ) -> tuple[list[int], list[str]]:
        """Adds a step's metrics by this run's evaluation, which is the last one from now on.

        Returns the saved steps that no longer compare, and the keys in which their evaluation
        differs.
        """
        left, differing = [], []
        if self._metric in metrics:
            saved, differing = [*saved], _differing(self._last, self._ours)
            before, self._last = self._values(saved, self._last), self._ours
            left = sorted(before.keys() - self._values(saved, self._ours).keys())
        self.stored[step] = {**metrics, _EVALUATION: self._ours} if metrics else {}
        return left, differing

    def best(self, saved: Iterable[int]) -> int | None:
        """The saved step with the highest value, the last on a tie; None without any."""
        values = self._values(saved, self._last)
        return max(values, key=lambda step: (values[step], step), default=None)

    def is_among(self, number: int, metrics: Mapping[str, float], saved: Iterable[int]) -> bool:
        """Whether a step with these metrics of this run is among the best `number` saved ones."""
        if self._metric not in metrics:
            return False
        others = self._values(saved, self._ours).values()
        return sum(other >= metrics[self._metric] for other in others) < number

    def value(self, metrics: Mapping[str, Any]) -> float:
        """What ranks stored metrics now; -inf without the metric, or of another evaluation."""
        return self._value(metrics, self._last)

    def _values(self, saved: Iterable[int], evaluation: Mapping[str, Any]) -> dict[int, float]:
        values = {step: self._value(self.stored.get(step, {}), evaluation) for step in saved}
        return {step: value for step, value in values.items() if value > -math.inf}

    def _value(self, metrics: Mapping[str, Any], evaluation: Mapping[str, Any]) -> float:
        is_alike = not _differing(metrics.get(_EVALUATION, {}), evaluation)
        return metrics.get(self._metric, -math.inf) if is_alike else -math.inf


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys of both that have other values."""
    return sorted(key for key in one.keys() & other.keys() if one[key] != other[key])
