"""Evaluation inside a stage, around scripted programs: when, of which weights, what it leaves."""

import errno
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import LOOP, STEPS, Script

from care_jax.devices import distributed
from care_jax.learning.train_step import TrainState
from care_jax.rewards.failures import RewardFailed
from care_jax.run import integrity
from care_jax.run.checkpoint import Checkpoints
from care_jax.run.stage import open_stage
from care_jax.run.workdir import open_checkpoints

EVERY_OTHER = {"rl.eval_every": 2, "checkpoint_every": 100, "keep_checkpoints": 1}


class Stream:
    """Batches without examples, of sources of some lengths."""

    def __init__(self, *lengths):
        self.lengths = [*lengths]

    def iterate(self, start, stop):
        return ((step, [], []) for step in range(start, stop))


class Evaluate:
    """Accuracies by step; may be told to stop at one, by an error."""

    def __init__(self, accs=None, stops_at=None, error=distributed.Preempted):
        self.accs, self.stops_at, self.error = accs or {}, stops_at, error
        self.seen = []

    def __call__(self, params, *, name, step):
        if step == self.stops_at:
            raise self.error("in the evaluation")
        self.seen.append((name, step, float(params["text"]["w"])))
        return {"acc": self.accs.get(step, 0.5)}


def lines_of(records, stage="rl_eval"):
    return {record["step"]: record["acc"] for record in records if record["stage"] == stage}


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [0, 2, 4]),
        ({"rl.eval_every": 3}, [0, 3, 4]),
        ({"evaluate.at_start": False}, [2, 4]),
        ({"rl.eval_every": 0}, []),
    ],
)
def test_a_stage_is_evaluated_before_during_and_after_it(run_loop, changes, steps):
    """With the weights of that many steps, each of which adds 2 to a weight that starts at 10."""
    evaluate = Evaluate({2: 0.25})
    *_, records = run_loop(changes=EVERY_OTHER | changes, evaluate=evaluate)
    assert evaluate.seen == [("rl", step, 10 + 2 * step) for step in steps]
    expected = {step: 0.25 if step == 2 else 0.5 for step in steps}
    assert lines_of(records) == expected
    assert all("seconds" in record for record in records if record["stage"] == "rl_eval")


def test_the_stage_goes_on_as_without_an_evaluation(run_loop):
    plain, params, records = run_loop("plain")
    script, evaluated, others = run_loop(
        "evaluated", changes={"rl.eval_every": 1}, evaluate=Evaluate()
    )
    assert script.seen == plain.seen
    jax.tree.map(np.testing.assert_array_equal, evaluated, params)

    def without_times(records):
        return [
            {k: v for k, v in record.items() if not re.search("second|device_idle|host/", k)}
            for record in records
            if record["stage"] == "rl"
        ]

    assert without_times(others) == without_times(records)


def test_a_resumed_stage_repeats_no_evaluation_that_is_written(run_loop):
    """Killed in step 3: the checkpoint of step 2 stands, its evaluation and that of step 3 too."""
    changes = {"rl.eval_every": 1, "checkpoint_every": 2}
    with pytest.raises(KeyboardInterrupt):
        run_loop("broken", dies_at=3, changes=changes, evaluate=Evaluate())
    again = Evaluate({3: 0.75})
    *_, records = run_loop("broken", changes=changes, evaluate=again)
    assert [step for _, step, _ in again.seen] == [3, 4]
    evaluated = [record["step"] for record in records if record["stage"] == "rl_eval"]
    assert sorted(evaluated) == evaluated == [0, 1, 2, 3, 4]
    assert lines_of(records)[3] == 0.75
    finished = Evaluate()
    run_loop("broken", changes=changes, evaluate=finished)
    assert finished.seen == []


def test_what_a_start_without_a_checkpoint_evaluated_is_evaluated_again(run_loop):
    """It may have begun with other weights or questions."""
    changes = {"rl.eval_every": 2, "checkpoint_every": 4}
    with pytest.raises(KeyboardInterrupt):
        run_loop("broken", dies_at=0, changes=changes, evaluate=Evaluate({0: 0.25}))
    *_, records = run_loop("broken", changes=changes, evaluate=Evaluate({0: 0.75}))
    assert lines_of(records)[0] == 0.75
    assert [record["step"] for record in records if record["stage"] == "rl_eval"] == [0, 2, 4]


def saved_in(tmp_path):
    return sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints" / "rl").iterdir())


def test_a_new_best_is_saved_where_nothing_else_is(run_loop, tmp_path):
    """Step 0 is not saved, and of equals the first is the new best."""
    accs = {0: 0.9, 1: 0.2, 2: 0.6, 3: 0.6, 4: 0.1}
    changes = EVERY_OTHER | {"rl.eval_every": 1, "keep_best": 1}
    run_loop(changes=changes, evaluate=Evaluate(accs))
    assert saved_in(tmp_path) == [2, STEPS]


def test_without_keep_best_no_evaluation_saves(run_loop, tmp_path):
    run_loop(changes=EVERY_OTHER, evaluate=Evaluate({2: 0.9}))
    assert saved_in(tmp_path) == [STEPS]


def test_a_run_stopped_inside_an_evaluation_makes_up_for_it(run_loop, make_run, tmp_path):
    """The step before it is saved; resumed, it is evaluated, and may be the best."""
    changes = EVERY_OTHER | {"rl.eval_every": 1, "keep_best": 1}
    accs = {2: 0.9}
    with pytest.raises(distributed.Preempted):
        run_loop(changes=changes, evaluate=Evaluate(accs, stops_at=2))
    assert saved_in(tmp_path) == [1, 2]
    script, _, records = run_loop(changes=changes, evaluate=(again := Evaluate(accs)))
    assert [step for _, step, _ in again.seen] == [2, 3, 4]
    assert len(script.seen["rng"]) == 2  # no step is done again
    assert lines_of(records) == {0: 0.5, 1: 0.5, 2: 0.9, 3: 0.5, 4: 0.5}
    assert saved_in(tmp_path) == [2, 4]
    with open_checkpoints(make_run(LOOP | changes), "rl") as saved:
        assert saved.best_step == 2


@pytest.mark.parametrize(("is_alone", "saved"), [(True, [2]), (False, [])])
def test_an_evaluation_that_fails_loses_no_step(run_loop, monkeypatch, tmp_path, is_alone, saved):
    """With several processes the others may be in the evaluation, and would wait for the save."""
    monkeypatch.setattr(distributed, "is_alone", lambda: is_alone)
    with pytest.raises(RuntimeError, match="in the evaluation"):
        run_loop(changes=EVERY_OTHER, evaluate=Evaluate(stops_at=2, error=RuntimeError))
    assert saved_in(tmp_path) == saved


@pytest.mark.parametrize("stops", [distributed.Preempted, RewardFailed])
def test_a_save_that_fails_at_the_end_is_the_error(make_run, monkeypatch, stops):
    """The step is lost, which "stopped; run the same command" would not say."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(integrity, "write_manifest", full)
    state = TrainState({"text": {"w": jnp.float32(1)}}, (), jnp.int32(0))
    with (
        pytest.raises(OSError, match="No space left"),
        open_stage(make_run({"checkpoint_every": 9}), "rl", state, None) as stage,
    ):
        stage.finish(0)
        raise stops("by a signal")


def test_a_step_saved_late_keeps_its_evaluation(run_loop, make_run, tmp_path):
    """Stopped in the rollouts behind an evaluation that saved nothing."""

    class Stopped(Script):
        def roll_out(self, *args):
            if len(self.seen["rng"]) == 3:
                raise distributed.Preempted
            return super().roll_out(*args)

    changes = EVERY_OTHER | {"rl.eval_every": 3}
    with pytest.raises(distributed.Preempted):
        run_loop(changes=changes, make_script=Stopped, evaluate=Evaluate())
    with open_checkpoints(make_run(LOOP | changes), "rl") as saved:
        assert saved.steps == [3] and saved.best_step == 3


def test_a_step_is_logged_behind_the_next_ones_rollouts(run_loop, make_run, tmp_path):
    """A saved one is logged before, and so is one that a stop saves."""
    path, logged = tmp_path / "run" / "metrics.jsonl", []

    class Stopped(Script):
        def roll_out(self, *args):
            logged.append(len(path.read_text().splitlines()) if path.exists() else 0)
            if len(logged) == 4:
                raise distributed.Preempted
            return super().roll_out(*args)

    changes = {"checkpoint_every": 2}
    with pytest.raises(distributed.Preempted):
        run_loop(changes=changes, make_script=Stopped)
    assert logged == [0, 0, 2, 2]
    assert len(path.read_text().splitlines()) == 3
    with open_checkpoints(make_run(LOOP | changes), "rl") as saved:
        assert saved.steps == [2, 3]


def test_data_of_another_length_is_named_on_resume(make_run, capsys):
    """A file that has grown since: the order of its rows is another."""
    state = TrainState({"text": {"w": jnp.float32(1)}}, (), jnp.int32(0))

    printed = []
    for stop, lengths in ((2, (30, 4)), (4, (30, 4)), (6, (31, 4)), (8, (31, 4))):
        run = make_run({"checkpoint_every": 2})
        with open_stage(run, "rl", state, None) as stage:
            for step, *_ in stage.steps(Stream(*lengths)):
                stage.finish(step)
                if step == stop - 1:
                    break
        printed.append("the training data has" in (line := capsys.readouterr().out))
        if printed[-1]:
            assert "has 31 + 4 rows, at rl step 4 it had 30 + 4" in line
    assert printed == [False, False, True, False]


def test_a_resumed_stage_first_frees_the_state_that_it_does_not_need(make_run, monkeypatch):
    """Two may not fit on the devices, and the caller holds the initial parameters."""
    held = jnp.zeros(3)
    saved = TrainState({"text": {"w": jnp.ones(3)}}, (), jnp.int32(0))
    with open_stage(make_run({}), "rl", saved, None) as stage:
        stage.finish(0)
        stage.save()
    restore = Checkpoints.restore

    def watched(self, shapes):
        assert held.is_deleted()
        return restore(self, shapes)

    monkeypatch.setattr(Checkpoints, "restore", watched)
    state = TrainState({"text": {"w": held}}, (), jnp.int32(0))
    with open_stage(make_run({}), "rl", state, None) as stage:
        np.testing.assert_array_equal(stage.state.params["text"]["w"], 1)
    assert not saved.params["text"]["w"].is_deleted()


def test_a_stage_saves_again_once_a_save_has_failed(make_run, monkeypatch):
    state = TrainState({"text": {"w": jnp.float32(1)}}, (), jnp.int32(0))
    run, asked = make_run({"checkpoint_every": 2, "keep_checkpoints": 9}), []

    def has_failed(self):
        asked.append(self.steps)
        return len(asked) == 4  # before step 3

    monkeypatch.setattr(Checkpoints, "has_failed", has_failed)
    with open_stage(run, "rl", state, None) as stage:
        for step, *_ in stage.steps(Stream(30)):
            stage.finish(step)
            if step == 5:
                break
        stage.checkpoints.wait()
        assert stage.checkpoints.steps == [2, 3, 4, 6]
    assert len(asked) == 6


def test_the_cold_start_has_its_own_steps(make_run):
    changes = {"sft.eval_every": 5, "sft.num_steps": 12, "sft.warmup_steps": 0}
    run = make_run(changes | {"checkpoint_every": 6, "keep_checkpoints": 9})
    state = TrainState({"text": {"w": jnp.float32(1)}}, (), jnp.int32(0))
    with open_stage(run, "sft", state, None, evaluate := Evaluate()) as stage:
        for step in range(12):
            stage.finish(step)
    assert evaluate.seen == [("sft", step, 1.0) for step in (0, 5, 10, 12)]
    records = map(json.loads, run.metrics.path.read_text().splitlines())
    assert [(record["stage"], record["step"]) for record in records] == [
        ("sft_eval", step) for step in (0, 5, 10, 12)
    ]
    with open_checkpoints(run, "sft") as saved:
        assert list(saved.steps) == [6, 12]
