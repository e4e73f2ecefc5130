"""When a reward function that fails ends a run, and what the error says."""

import pytest

from care_jax.devices import distributed
from care_jax.rewards.failures import FailureLimit, RewardFailed


class Judge:
    """Stands in for a verifier."""

    def __init__(self, problem="iou failed:\nKeyError: 'size'", has_reward=True):
        self.problem, self.has_reward = problem, has_reward


def counts(judged, timeouts=0, crashes=0, failed=0):
    return dict(fast_calls=judged, timeouts=timeouts, crashes=crashes, failed=failed)


@pytest.mark.parametrize("kind", ["timeouts", "crashes", "failed"])
def test_a_step_without_any_verdict_ends_the_run_with_the_functions_error(kind):
    """Whatever the limit; one verdict in a step is enough to go on."""
    limit = FailureLimit(Judge(), 1.0)
    assert limit.check(0, counts(1, **{kind: 7})) == 7 / 8
    with pytest.raises(RewardFailed) as failed:
        limit.check(1, counts(0, **{kind: 8}))
    assert str(failed.value) == (
        "rl step 1: none of 8 responses was judged. The reward function iou failed:\n"
        "KeyError: 'size'\nFinished steps are kept: correct the function, then run again with the "
        "same workdir to resume"
    )


def test_the_share_is_of_the_responses_of_the_last_five_steps():
    """Steps with second tries, or with several draws, have more responses."""
    limit = FailureLimit(Judge(), 0.5)
    for step, (judged, failed) in enumerate([(1, 9), (1, 9), (10, 0), (5, 5), (13, 7)]):
        limit.check(step, counts(judged, failed=failed))  # 30 of 60
    assert limit.check(5, counts(1, failed=9)) == 0.9  # 30 of 60: the first step is forgotten
    message = r"rl step 6: 50\.8% of the responses of the last 5 steps .*\.max_failed 0\.5\. The r"
    with pytest.raises(RewardFailed, match=message):
        limit.check(6, counts(1, failed=10))  # 31 of 61


def test_four_steps_are_too_few_to_judge_a_share():
    limit = FailureLimit(Judge(), 0.0)
    for step in range(4):
        assert limit.check(step, counts(1, timeouts=99)) == 0.99


def test_without_a_reward_function_nothing_is_asked_of_the_counts():
    assert FailureLimit(Judge(has_reward=False), 0.0).check(0, {}) == 0


def test_all_processes_raise_the_error_of_the_first_that_has_one(monkeypatch):
    """This one judged all of its responses in every step so far."""
    others = ["iou failed:\nKeyError", "iou took longer"]
    monkeypatch.setattr(distributed, "gather_json", lambda value: [value, *others])
    with pytest.raises(RewardFailed, match="The reward function iou failed:\nKeyError\nFin"):
        FailureLimit(Judge(problem=""), 0.5).check(0, counts(0, failed=8))
