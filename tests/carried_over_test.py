"""Runs whose steps leave prompts to the next, and go on with them after a stop."""

import gc
import json
import weakref

import jax
import numpy as np
import pytest
from small_run import metrics_of, small_config, state_of, without_times

from care_jax import main
from care_jax.decoding.queue import DecodeQueue
from care_jax.rewards.failures import RewardFailed
from care_jax.rl import carry_over
from care_jax.rl.step_metrics import StepLog
from configs import common

pytestmark = pytest.mark.usefixtures("one_device")


def carrying(**changes):
    """Four steps of eight prompts; four more are in flight, in up to twelve slots."""
    options = {"rl.carry_over": 0.5, "rl.max_age": 1, "keep_checkpoints": 9}
    options |= {"rl.decode_prompts": 12, "rl.decode_rows": 2}
    options |= {"rl.top_p": 0.95, "rl.old_logp": "trainer", "rl.correction": "truncate"}
    return small_config(stages=("rl",), **(options | changes))


def watched_slots(monkeypatch):
    """The slots that steps leave to the next, and how many of these are there in each update."""
    sets, counts = [], []
    left_over, updating = DecodeQueue._left_over, StepLog.updating

    def watched_left_over(*args):
        found = left_over(*args)
        sets.append(weakref.ref(found.slots))
        return found

    def watched_updating(self):
        gc.collect()
        counts.append(sum(each() is not None for each in sets))
        updating(self)

    monkeypatch.setattr(DecodeQueue, "_left_over", watched_left_over)
    monkeypatch.setattr(StepLog, "updating", watched_updating)
    return sets, counts


def fails_at(number):
    """A `StepLog.rolled_out` in which the reward function has failed at this step."""
    rolled_out = StepLog.rolled_out

    def failing(self, step):
        rolled_out(self, step)
        if step == number:
            raise RewardFailed("none was judged")

    return failing


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="dense"),
        pytest.param({"model.offload": ("rollouts",)}, id="offloaded"),
        pytest.param(
            {"family": "qwen3_vl_moe", "rl.replay_routes": True},
            id="sparse",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_run_resumes_with_what_was_in_flight(tmp_path, monkeypatch, changes):
    """Bit for bit, at each of its steps; the third is broken off behind its rollouts."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    main.run_stages(carrying(checkpoint_every=1, **changes), whole)
    with monkeypatch.context() as patch, pytest.raises(RewardFailed):
        patch.setattr(StepLog, "rolled_out", fails_at(2))
        main.run_stages(carrying(checkpoint_every=4, **changes), resumed)
    saved = resumed / "checkpoints" / "rl" / "2"
    progress = json.loads((saved / "progress" / "metadata").read_text())
    assert len(progress["in_flight"]["prompts"]) == 4 and progress["in_flight"]["slots"]
    kinds, restored = [], carry_over.restored

    def watched(*args):
        found = restored(*args)
        kinds.append({x.sharding.memory_kind for x in jax.tree.leaves(found.in_flight.slots)})
        return found

    monkeypatch.setattr(carry_over, "restored", watched)
    sets, counts = watched_slots(monkeypatch)
    main.run_stages(carrying(checkpoint_every=1, **changes), resumed)
    assert len(sets) == 2 and counts == [1, 1]
    assert kinds == [{"pinned_host" if "model.offload" in changes else "device"}]
    steps = metrics_of(whole)
    assert without_times(metrics_of(resumed)) == without_times(steps)
    for step in (3, 4):
        states = [jax.tree.leaves(state_of(folder, step)) for folder in (whole, resumed)]
        for one, other in zip(*states, strict=True):
            np.testing.assert_array_equal(one, other)
    assert [step["oldest_age"] for step in steps] == [0, 1, 1, 1]
    for step in steps:
        assert sum(step[f"age/{age}"] for age in range(step["oldest_age"] + 1)) == pytest.approx(1)
        # Nor were newer tokens of older rollouts drawn as the trainer computes, on an older cache.
        assert step["mismatch/max"] < 1e-6, steps


def test_unfinished_rollouts_of_other_prompts_begin_anew(tmp_path, monkeypatch, capfd):
    """The file has as many rows when the run is resumed, in another order."""
    rows = [json.dumps({"question": f"What is {i} + 1?", "answer": str(i + 1)}) for i in range(64)]
    path, workdir, config = tmp_path / "train.jsonl", tmp_path / "run", carrying(checkpoint_every=4)
    config.data.train = common.source("jsonl", path=str(path))
    path.write_text("\n".join(rows))
    with monkeypatch.context() as patch, pytest.raises(RewardFailed):
        patch.setattr(StepLog, "rolled_out", fails_at(2))
        main.run_stages(config, workdir)
    path.write_text("\n".join(rows[::-1]))
    main.run_stages(config, workdir)
    assert "other rows in place of the 4 prompts with unfinished rollouts" in capfd.readouterr().out
    steps = metrics_of(workdir)
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert [step["oldest_age"] for step in steps] == [0, 1, 0, 1]
