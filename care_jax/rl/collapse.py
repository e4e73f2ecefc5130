"""Notices a collapse while it happens: the classic failures of RL on a language model.

A policy that collapses keeps running. Format or length fall within a few steps, or hardly any group
gives an update: all of its answers are wrong, or count as equally good. Its later steps are wasted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np

_STEPS = 5  # steps of each of the two means that are compared
_LEAST = {"fmt": 0.2, "response_tokens": 8.0}  # a smaller former mean halves by chance
_NO_UPDATE = 0.95  # share of groups without an update from which little is learned


class CollapseWatch:
    """Compares the mean of the last 5 steps with that of the 5 before; each warning comes once."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[str, float]] = deque(maxlen=2 * _STEPS)
        self._warned: set[str] = set()

    def warnings(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Lines to print after a step with these metrics."""
        self._steps.append(metrics)
        if len(self._steps) < 2 * _STEPS:
            return
        for name, what in (("fmt", "the share of well-formed responses"), ("response_tokens", "")):
            before, now = self._means(name)
            if name not in self._warned and before >= _LEAST[name] and now <= before / 2:
                self._warned.add(name)
                yield (
                    f"warning: {name}{f', {what},' if what else ''} fell from {before:.3g} to "
                    f"{now:.3g} by step {step}: the policy may be collapsing; look at the report's "
                    "groups, and lower rl.learning_rate or raise the KL weight beta"
                )
        steps = f"of the {_STEPS} steps to step {step}"
        all_wrong, all_correct, skipped = (
            self._means(name)[1] for name in ("all_wrong_rate", "all_correct_rate", "skip_rate")
        )
        if "all_wrong_rate" not in self._warned and all_wrong >= _NO_UPDATE:
            self._warned.add("all_wrong_rate")
            yield (
                f"warning: {all_wrong:.0%} of the groups {steps} have no correct answer, so little "
                "is learned; look at the report's groups, and begin with a cold start or with "
                "easier questions"
            )
        elif not self._warned & {"all_wrong_rate", "skip_rate"} and skipped >= _NO_UPDATE:
            self._warned.add("skip_rate")
            yield (
                f"warning: {skipped:.0%} of the groups {steps} give no update ({all_correct:.0%} "
                f"are all correct, {all_wrong:.0%} all wrong), so little is learned; use harder "
                "questions if most are correct, else look at what counts as a success"
            )

    def _means(self, name: str) -> tuple[float, float]:
        """Means of the 5 steps before the last 5, and of these; 0 for a metric that is absent."""
        values = [metrics.get(name, 0.0) for metrics in self._steps]
        return float(np.mean(values[:_STEPS])), float(np.mean(values[_STEPS:]))
