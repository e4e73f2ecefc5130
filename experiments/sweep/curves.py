"""Accuracy of a run over its steps and over its decoded tokens, as fractions.

Held-out accuracy comes from the evaluations during RL (`rl.eval_every`); without held-out questions
it is the mean over the benchmarks. Rollout accuracy is logged at every step, for the policy before
the step's updates.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from experiments.sweep.outcome import NotLogged, Outcome

WINDOW = 10  # steps whose rollouts are averaged into the accuracy at a step
TOKEN_WINDOW = 0.1  # share of the decoded tokens over which rollouts are averaged

Curve = tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]


def acc_name(metrics: Mapping[str, float]) -> str:
    """The metric of held-out accuracy, or of the benchmarks' mean if there is none."""
    return "acc" if "acc" in metrics else "mean/acc"


def held_out(outcome: Outcome) -> Curve:
    """(steps done, held-out accuracy) of every evaluation during RL; `NotLogged` if none."""
    rows = [row for row in outcome.evaluations if acc_name(row) in row]
    if not rows:
        raise NotLogged("set rl.eval_every above 0, and data.test or evaluate.benchmarks")
    x, y = np.array(sorted((row["step"], row[acc_name(row)]) for row in rows), float).T
    return x, y


def held_out_area(outcome: Outcome) -> float:
    """Held-out accuracy, mean over the steps by the trapezoidal rule."""
    x, y = held_out(outcome)
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def rollouts(outcome: Outcome) -> Float[np.ndarray, " N"]:
    """Rollout accuracy of every step; `NotLogged` if there is none."""
    if not outcome.steps:
        raise NotLogged('put "rl" into stages')
    return outcome.series("acc")


def rollouts_at(outcome: Outcome, step: int) -> float:
    """Rollout accuracy over the last WINDOW steps up to `step`, counted from 1.

    Raises `NotLogged` if the run is shorter.
    """
    if len(outcome.steps) < step:
        raise NotLogged(f"set rl.num_steps to at least {step}")
    return float(outcome.series("acc")[max(0, step - WINDOW) : step].mean())


def tokens_after(outcome: Outcome, steps: np.ndarray) -> np.ndarray:
    """Cumulative decoded tokens after each number of steps."""
    return np.append(0.0, outcome.series("decoded_tokens"))[steps.astype(int)]


def rollouts_at_tokens(outcome: Outcome, tokens: float) -> float:
    """Rollout accuracy over the last tenth of `tokens`, the interval (0.9 · tokens, tokens].

    Steps end at different token counts in every run, so each step's accuracy is spread evenly over
    the tokens it decoded. The run must have decoded at least `tokens`.
    """
    acc, ends = rollouts(outcome), outcome.series("decoded_tokens")
    integral = np.cumsum(np.diff(ends, prepend=0.0) * acc)
    bounds = np.array([(1 - TOKEN_WINDOW) * tokens, tokens])
    low, high = np.interp(bounds, np.append(0.0, ends), np.append(0.0, integral))
    return float((high - low) / (TOKEN_WINDOW * tokens))


def held_out_at_tokens(outcome: Outcome, tokens: float) -> float:
    """Held-out accuracy at a number of decoded tokens, interpolated between two evaluations.

    Raises:
        NotLogged: no evaluation at or before `tokens`, or none at or after it.
    """
    x, y = held_out(outcome)
    decoded = tokens_after(outcome, x)
    if not decoded[0] <= tokens <= decoded[-1]:
        raise NotLogged("set evaluate.at_start and an rl.eval_every that divides rl.num_steps")
    return float(np.interp(tokens, decoded, y))


def gain_after(rate: str, outcome: Outcome, num_steps: int) -> float | None:
    """Rise of the rollout accuracy y after a group was triggered, mean over the triggered groups.

    `rate` is the metric with the share of them in a step: "all_wrong_rate" (fig:rescue, rescued or
    not) or "reflect_rate" (fig:srefl_ablation). A group triggered in step t counts
    y(t + num_steps) - y(t), or is left out if the run ends before. None if there was none.

    Raises:
        NotLogged: the run has at most `num_steps` steps.
    """
    acc, rates = rollouts(outcome), np.nan_to_num(outcome.series(rate))[:-num_steps]
    if len(acc) <= num_steps:
        raise NotLogged(f"set rl.num_steps above {num_steps}")
    if not rates.any():
        return None
    return float(np.average(acc[num_steps:] - acc[:-num_steps], weights=rates))
