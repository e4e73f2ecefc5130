"""The result of a finished trial, as measures and panels read it: metrics and rollouts."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class NotLogged(Exception):
    """A run did not log what a measure needs; the message says which key to set."""


class NoReference(NotLogged):
    """The arm that leads are over has no run of a seed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Configuration and metrics of a finished trial."""

    arm: str
    seed: int
    config: dict[str, Any]  # as JSON
    start: dict[str, float]  # of the last evaluation before RL (of the cold start, if any), or {}
    final: dict[str, float]  # of the last evaluation
    steps: list[dict[str, float]]  # of each RL step
    evaluations: list[dict[str, float]]  # during RL; `step` is the number of steps done
    workdir: pathlib.Path
    shared_tokens: float = math.nan  # tokens decoded by every arm, see `with_shared_tokens`

    def series(self, name: str) -> np.ndarray:
        """A metric at every step; NaN if it was not logged."""
        return np.array([step.get(name, math.nan) for step in self.steps], float)

    @property
    def num_triggers(self) -> np.ndarray:
        """Cumulative number of rescued groups at each step."""
        return np.cumsum(self.series("rescue_rate")) * self.config["rl"]["prompts_per_step"]


def logged_groups(workdir: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Every group of a run, as in `rollouts.jsonl`, from all processes.

    Raises:
        NotLogged: the run kept no rollouts, or has dropped those of its first steps.
    """
    processes = set()
    for path in sorted(workdir.glob("rollouts*.jsonl")):  # the former file of a process first
        process = path.name.partition(".")[0]
        with path.open(encoding="utf-8") as lines:
            for group in map(json.loads, lines):
                if process not in processes and group["step"] > 0:
                    raise NotLogged(
                        "set report.rollouts_megabytes higher: the rollouts before step "
                        f"{group['step']} are dropped"
                    )
                processes.add(process)
                yield group
    if not processes:
        raise NotLogged("set report.rollouts_megabytes above 0")


def with_shared_tokens(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with `shared_tokens` set: the fewest tokens decoded by an outcome of the seed.

    Outcomes without RL do not count and get NaN.
    """
    reached: dict[int, float] = {}
    for outcome in outcomes:
        if outcome.steps:
            last = float(outcome.series("decoded_tokens")[-1])
            reached[outcome.seed] = float(np.minimum(reached.get(outcome.seed, math.inf), last))
    return [
        dataclasses.replace(each, shared_tokens=reached[each.seed] if each.steps else math.nan)
        for each in outcomes
    ]
