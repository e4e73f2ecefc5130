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
    """(steps done, held-out accuracy) of every evaluation during RL.

    Raises:
        NotLogged: there was none.
    """
    points = [
        (row["step"], row[acc_name(row)]) for row in outcome.evaluations if acc_name(row) in row
    ]
    if not points:
        raise NotLogged("set rl.eval_every above 0, and data.test or evaluate.benchmarks")
    x, y = np.array(sorted(points), float).T
    return x, y


def rollouts(outcome: Outcome) -> Curve:
    """(steps done, accuracy of the rollouts) of every step.

    Raises:
        NotLogged: there was no step.
    """
    if not outcome.steps:
        raise NotLogged('put "rl" into stages')
    return np.arange(len(outcome.steps), dtype=float), outcome.series("acc")


def held_out_at(outcome: Outcome, step: int) -> float:
    """Held-out accuracy after exactly so many steps.

    Raises:
        NotLogged: there was no evaluation then.
    """
    x, y = held_out(outcome)
    if step not in x:
        raise NotLogged(
            f"set rl.eval_every to a divisor of {step} and rl.num_steps to at least {step}"
        )
    return float(y[x == step][0])


def rollouts_at(outcome: Outcome, step: int) -> float:
    """Accuracy of the rollouts of the last WINDOW steps up to a step, which counts from 1.

    Raises:
        NotLogged: the run is shorter.
    """
    if len(outcome.steps) < step:
        raise NotLogged(f"set rl.num_steps to at least {step}")
    return float(outcome.series("acc")[max(0, step - WINDOW) : step].mean())


def tokens_after(outcome: Outcome, steps: np.ndarray) -> np.ndarray:
    """Tokens decoded in so many steps."""
    return np.append(0.0, outcome.series("decoded_tokens"))[steps.astype(int)]


def area(x: np.ndarray, y: np.ndarray) -> float:
    """Area under a curve by the trapezoidal rule, over its width: the mean height."""
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def rollouts_at_tokens(outcome: Outcome, tokens: float) -> float:
    """Accuracy of the rollouts that were decoded as the last tenth of `tokens`.

    Steps end at other numbers of tokens in every run. So each step's accuracy is spread evenly over
    the tokens that it decoded, and the mean is taken over the interval (0.9 · tokens, tokens].

    Args:
        outcome: has decoded at least `tokens`.
        tokens: above 0.
    """
    if not outcome.steps:
        raise NotLogged('put "rl" into stages')
    ends = outcome.series("decoded_tokens")
    integral = np.cumsum(np.diff(ends, prepend=0.0) * outcome.series("acc"))
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


def gain_after_rescue(outcome: Outcome, num_steps: int, curve: Curve) -> float | None:
    """How much a curve rises over the steps after a rescue, the mean over all rescued groups.

    A group rescued in step t counts with y(t + num_steps) - y(t), linear between two points of the
    curve. Groups that are rescued too late, or before the curve begins, do not count.

    Args:
        outcome: of a run of CARE; None is returned for other objectives.
        num_steps: of the rise.
        curve: of `held_out` or `rollouts`.

    Returns:
        the rise in accuracy; None if no group was rescued.

    Raises:
        NotLogged: the curve is shorter than `num_steps`.
    """
    x, y = curve
    if x[-1] - x[0] < num_steps:
        raise NotLogged(f"set rl.num_steps above {num_steps}")
    rates, steps = np.nan_to_num(outcome.series("rescue_rate")), np.arange(len(outcome.steps))
    rates = np.where((steps >= x[0]) & (steps + num_steps <= x[-1]), rates, 0.0)
    if not rates.any():
        return None
    rise = np.interp(steps + num_steps, x, y) - np.interp(steps, x, y)
    return float(np.average(rise, weights=rates))
