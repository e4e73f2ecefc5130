"""Ends a run whose reward function fails, since a response that was not judged is not a wrong one.

A response is not judged if the call raised an exception, took too long, ended its process or
returned no components for it. RL ends at a step without any judged response, and where the share of
responses that were not judged, over the last 5 steps, is above `verifier.max_failed`.

All processes decide from counts that were summed over them, and so end together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from care_jax.devices import distributed
from care_jax.rewards.verifier import FAILURES, Verifier

_NUM_STEPS = 5  # over which the share is taken


class RewardFailed(ValueError):
    """A reward function judged nothing, or too little; the message has the function's error."""


class FailureLimit:
    """Ends the RL of a reward function that fails too often, see the module."""

    def __init__(self, verifier: Verifier, max_failed: float):
        self._verifier, self._max_failed = verifier, max_failed
        self._steps: deque[tuple[int, int]] = deque(maxlen=_NUM_STEPS)  # (not judged, all) of each

    def check(self, step: int, counts: Mapping[str, int]) -> float:
        """The share of the step's responses that were not judged; 0 without a reward function.

        `counts` are `Verifier.counts` of this step, summed over the processes. All processes call
        this together.

        Raises:
            RewardFailed: the run must end before the step's updates.
        """
        if not self._verifier.has_reward:
            return 0.0
        failed = sum(counts[name] for name in FAILURES)
        total = failed + counts["fast_calls"]
        self._steps.append((failed, total))
        if failed == total:
            raise failure(self._verifier, f"rl step {step}: none of {total} responses was judged")
        share = sum(failed for failed, _ in self._steps) / sum(total for _, total in self._steps)
        if len(self._steps) == _NUM_STEPS and share > self._max_failed:
            raise failure(
                self._verifier,
                f"rl step {step}: {share:.1%} of the responses of the last {_NUM_STEPS} steps were "
                f"not judged, above verifier.max_failed {self._max_failed:g}",
            )
        return failed / total


def failure(verifier: Verifier, what: str) -> RewardFailed:
    """The error that says `what` was not judged, why, and how to go on; the same on all processes.

    All processes call this together, after a failure in one of them.
    """
    problem = next(filter(None, distributed.gather_json(verifier.problem)))
    return RewardFailed(
        f"{what}. The reward function {problem}\n"
        "Finished steps are kept: correct the function, then run again with the same workdir to "
        "resume"
    )
