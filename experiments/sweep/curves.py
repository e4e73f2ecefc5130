"""Accuracy of a run over its steps and over its decoded tokens.

Two curves are read. Held-out accuracy comes from the evaluations during RL (`rl.eval_every`), after
so many steps. Accuracy of the rollouts is logged at every step, of the policy before its updates.
Both are fractions here; where there are no held-out questions, held-out accuracy is the mean over
the benchmarks.
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
    """Name of the held-out accuracy of an evaluation, or else of its benchmarks' mean."""
    return "acc" if "acc" in metrics else "mean/acc"


def held_out(outcome: Outcome) -> Curve:
    """(steps done, held-out accuracy) of every evaluation during RL; `NotLogged` without any."""
    rows = [row for row in outcome.evaluations if acc_name(row) in row]
    if not rows:
        raise NotLogged("set rl.eval_every above 0, and data.test or evaluate.benchmarks")
    x, y = np.array(sorted((row["step"], row[acc_name(row)]) for row in rows), float).T
    return x, y


def held_out_area(outcome: Outcome) -> float:
    """Mean height of the held-out curve over the steps, by the trapezoidal rule."""
    x, y = held_out(outcome)
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def rollouts(outcome: Outcome) -> Float[np.ndarray, " N"]:
    """Accuracy of the rollouts of every step; `NotLogged` without any."""
    if not outcome.steps:
        raise NotLogged('put "rl" into stages')
    return outcome.series("acc")


def rollouts_at(outcome: Outcome, step: int) -> float:
    """Accuracy of the rollouts of the last WINDOW steps up to a step, which counts from 1.

    Raises `NotLogged` if the run is shorter.
    """
    if len(outcome.steps) < step:
        raise NotLogged(f"set rl.num_steps to at least {step}")
    return float(outcome.series("acc")[max(0, step - WINDOW) : step].mean())


def tokens_after(outcome: Outcome, steps: np.ndarray) -> np.ndarray:
    """Tokens decoded in so many steps."""
    return np.append(0.0, outcome.series("decoded_tokens"))[steps.astype(int)]


def rollouts_at_tokens(outcome: Outcome, tokens: float) -> float:
    """Accuracy of the rollouts that were decoded as the last tenth of `tokens`.

    Steps end at other numbers of tokens in every run. So each step's accuracy is spread evenly over
    the tokens that it decoded, and the mean is taken over the interval (0.9 · tokens, tokens]. The
    run has decoded at least so many.
    """
    acc, ends = rollouts(outcome), outcome.series("decoded_tokens")
    integral = np.cumsum(np.diff(ends, prepend=0.0) * acc)
    bounds = np.array([(1 - TOKEN_WINDOW) * tokens, tokens])
    low, high = np.interp(bounds, np.append(0.0, ends), np.append(0.0, integral))
    return float((high - low) / (TOKEN_WINDOW * tokens))


def held_out_at_tokens(outcome: Outcome, tokens: float) -> float:
    """Held-out accuracy at a number of decoded tokens, linear between two evaluations.

    Raises:
        NotLogged: there was no evaluation, or none on one of the two sides.
    """
    x, y = held_out(outcome)
    decoded = tokens_after(outcome, x)
    if not decoded[0] <= tokens <= decoded[-1]:
        raise NotLogged("set evaluate.at_start and an rl.eval_every that divides rl.num_steps")
    return float(np.interp(tokens, decoded, y))


def gain_after_rescue(outcome: Outcome, num_steps: int) -> float | None:
    """How much the rollouts' accuracy rises over the steps after a rescue, mean over the groups.

    A group rescued in step t counts with y(t + num_steps) - y(t), or not at all if the run ends
    before that. None if no group was rescued, as under objectives other than CARE.

    Raises:
        NotLogged: the run has no `num_steps` after its first step.
    """
    acc, rates = rollouts(outcome), np.nan_to_num(outcome.series("rescue_rate"))[:-num_steps]
    if len(acc) <= num_steps:
        raise NotLogged(f"set rl.num_steps above {num_steps}")
    if not rates.any():
        return None
    return float(np.average(acc[num_steps:] - acc[:-num_steps], weights=rates))
