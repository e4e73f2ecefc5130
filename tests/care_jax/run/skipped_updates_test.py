"""Updates that are not finite: skipped and counted, or the end of the stage with its batch kept."""

import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from scripted import B, Script

from care_jax.batch import Example
from care_jax.learning.train_step import BROKEN_GRADIENTS
from care_jax.run import guards, stage
from care_jax.stages import sft


class Skips(Script):
    """Updates numbered in `broken` are not finite, and leave the state as the real program does."""

    broken = ()

    def update(self, state, batch):
        after, metrics, logp = super().update(state, batch)
        is_broken = len(self.seen["updated"]) - 1 in self.broken
        metrics["grad_norm"] = jnp.float32(np.inf if is_broken else 2)
        metrics[BROKEN_GRADIENTS] = jnp.array([is_broken, False])  # of text.w, vision.w
        return (state if is_broken else after), metrics, logp * jnp.where(is_broken, jnp.nan, 1)


def skips(*broken):
    return type("Skips", (Skips,), {"broken": broken})


def test_skipped_updates_are_counted_and_leave_no_other_trace(run_loop):
    """Of four steps with two updates each; the first of the second, and all of the third."""
    script = skips(2, 4, 5)
    _, params, records = run_loop(make_script=script, changes={"rl.max_skipped": 2})
    assert float(params["text"]["w"]) == 10 + 8 - 3
    assert [record["skipped_updates"] for record in records] == [0, 1, 2, 0]
    assert [record.get("loss") for record in records] == [10.5, 12, None, 13.5]
    assert [record.get("grad_norm") for record in records] == [2, 2, None, 2]
    assert all(np.isfinite(list(record.values())[2:]).all() for record in records)
    assert BROKEN_GRADIENTS not in records[0]


def test_without_skipping_there_is_no_such_metric(run_loop):
    *_, records = run_loop()
    assert all("skipped_updates" not in record for record in records)


@pytest.mark.parametrize(
    ("broken", "most", "step"), [((1, 2, 3), 2, 1), ((0, 2, 4, 6), 1, None), ((3,), 0, 1)]
)
def test_too_many_in_a_row_end_the_stage_and_leave_their_batch(
    run_loop, tmp_path, broken, most, step
):
    """A row goes on over steps; an applied update ends it."""
    changes = {"rl.max_skipped": most, "checkpoint_every": 1}
    if step is None:
        run_loop(make_script=skips(*broken), changes=changes)
        return
    with pytest.raises(FloatingPointError) as error:
        run_loop(make_script=skips(*broken), changes=changes)
    message = str(error.value)
    assert message.startswith(f"rl step {step}: expected finite metrics, got grad_norm=inf; ")
    assert ("2 is" in message or "max_skipped is 2" in message) == (most == 2)
    assert ("set rl.max_skipped above 0 to skip such updates" in message) == (most == 0)
    assert "gradients with NaN or infinity: text.w;" in message
    assert f"the last good checkpoint is {tmp_path / 'run/checkpoints/rl/1'}; " in message
    path = tmp_path / "run" / "nonfinite" / f"rl_step_{step}.npz"
    assert f"their batch is in {path}" in message and "\n" not in message
    with np.load(path) as batch:
        examples = batch["examples"].tolist()
        assert len(examples) == B // 2 and all(name in message for name in examples)
        assert batch["rows.tokens"].shape == batch["old_logp"].shape
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_the_batch_names_the_examples_of_all_processes(run_loop, tmp_path, monkeypatch):
    """Rows of a process may hold examples that another one read."""
    theirs = ["made x", "made y"]
    two = types.SimpleNamespace(gather_json=lambda ours: [theirs, ours])
    monkeypatch.setattr(guards, "distributed", two)
    with pytest.raises(FloatingPointError, match="prompts made x, made y, "):
        run_loop(make_script=skips(0))
    with np.load(tmp_path / "run" / "nonfinite" / "rl_step_0.npz") as batch:
        assert batch["examples"].tolist()[:2] == theirs and len(batch["examples"]) == 2 + B // 2


def test_a_batch_that_cannot_be_written_does_not_hide_the_error(run_loop, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "nonfinite").write_text("a file")
    with pytest.raises(FloatingPointError, match=r"rl step 0: .* could not be written to .*exists"):
        run_loop(make_script=skips(0))


RESPONSE = "<think>a</think><answer>1</answer>"
SFT = {
    "log_every": 3,
    "checkpoint_every": 100,
    "sft.num_steps": 7,
    "sft.batch_size": 4,
    "sft.microbatch_size": 2,
    "sft.learning_rate": 0.5,
    "sft.warmup_steps": 4,
}


@pytest.fixture
def imitate(make_run, monkeypatch):
    """Runs the cold start, of which some steps are not finite; gives metrics and parameters."""

    def imitate(broken, most):
        def update(state, batch, loss_fn, *_, skip_nonfinite, **__):
            assert skip_nonfinite == (most > 0)
            is_broken = jnp.isin(state.params["text"]["seen"], jnp.array(broken))
            params = {"text": {"seen": state.params["text"]["seen"] + 1}}
            metrics = {"loss": jnp.where(is_broken, jnp.nan, 1.0), "grad_norm": jnp.float32(2)}
            metrics[BROKEN_GRADIENTS] = is_broken[None]
            return state.replace(params=params, step=state.step + ~is_broken), metrics, None

        def score_rows(params, rows, *_, **__):
            return jnp.zeros(rows.tokens.shape), None, None

        monkeypatch.setattr(sft, "update", update)
        monkeypatch.setattr(sft, "score_rows", score_rows)
        monkeypatch.setattr(stage, "score_rows", score_rows)
        run = make_run(SFT | {"sft.max_skipped": most})
        examples = [Example(f"e{i}", "made", (), "?", "1", response=RESPONSE) for i in range(30)]
        params = sft.train(run, {"text": {"seen": jnp.float32(0)}}, examples)
        return params, [json.loads(line) for line in run.metrics.path.read_text().splitlines()]

    return imitate


def test_the_cold_start_counts_those_between_its_logged_steps(imitate):
    """Steps 0, 3 and 6 are logged. The loss of a step that was skipped is left out.

    The learning rate counts the updates done: that of step 3 is the second.
    """
    _, records = imitate([1, 2, 6], most=2)
    assert [record["step"] for record in records] == [0, 3, 6]
    assert [record["skipped_updates"] for record in records] == [0, 2, 1]
    assert [record.get("loss") for record in records] == [1.0, 1.0, None]
    assert [record.get("learning_rate") for record in records] == [0.5 / 4, 0.5 / 2, None]


def test_the_cold_start_names_the_step_that_was_not_logged(imitate, tmp_path):
    """Its batch is made anew, a function of the step."""
    with pytest.raises(FloatingPointError) as error:
        imitate([1, 2], most=1)
    message = str(error.value)
    assert message.startswith("sft step 2: expected finite metrics, got loss=nan; 2 updates in a")
    assert (
        "sft.max_skipped is 1; gradients with NaN or infinity: text.seen; prompts made e" in message
    )
    with np.load(tmp_path / "run" / "nonfinite" / "sft_step_2.npz") as batch:
        named = re.findall(r"made e\d+", message)
        assert len(named) == 3 and batch["examples"].tolist()[:3] == named
    assert "no checkpoint of sft was saved before" in message
