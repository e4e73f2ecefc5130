"""Runs that another command opens: what is refused before weights are loaded."""

import json

import pytest
from scripted import make_step

from care_jax.commands import reopened
from care_jax.run import lock, weights
from care_jax.run.run import open_run
from configs import tiny


@pytest.fixture
def opened(one_device, tmp_path):
    """The questions of a run of the tiny configuration with some keys changed, on one device."""

    def opened(changes, num_questions=4):
        config = tiny.get_config()
        config.update_from_flattened_dict(changes)
        run = open_run(config, tmp_path)
        reopened.check_reflection(run)
        return reopened.questions_of(run, num_questions)

    return opened


def test_a_checkpoint_that_is_not_there_is_named(make_run):
    with pytest.raises(ValueError, match=r"expected a checkpoint in .*checkpoints/rl, found none"):
        weights.last_of(make_run({}), "rl")


def test_a_run_that_is_training_is_left_alone(make_run):
    """To open its checkpoints would remove the one that it is writing."""
    run = make_run({})
    unfinished = make_step(run.workdir, "rl", 3).with_name("4.orbax-checkpoint-tmp")
    unfinished.mkdir()
    with (
        lock.held(run.workdir),
        pytest.raises(ValueError, match=r"run is in use by process \d+"),
    ):
        weights.last_of(run, "")
    assert unfinished.exists()


def test_what_cannot_be_written_is_refused_before_anything_is_sampled(tmp_path):
    with pytest.raises(ValueError, match=r"expected a file, got the folder --out="):
        reopened.file_of(tmp_path)
    with pytest.raises(ValueError, match=r"got --out=gs://bucket/a.csv; mount the bucket"):
        reopened.file_of("gs://bucket/a.csv")
    assert reopened.file_of(tmp_path / "new" / "a.csv").parent.is_dir()


def test_answers_of_any_form_are_for_reward_functions(opened, tmp_path):
    rows = [{"image": None, "question": f"{i}?", "answer": [i, i + 1]} for i in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = {
        "data.train.source": "jsonl",
        "data.train.path": str(path),
        "data.train.num_examples": 0,
    }
    with pytest.raises(ValueError, match=r"needs verifier\.reward"):
        opened(data)
    reward = "care_jax.rewards.partial_credit:relative_error"
    examples = opened(data | {"verifier.reward": reward})
    assert [example.answer for example in examples] == [row["answer"] for row in rows]


def test_questions_are_not_asked_twice(opened):
    data = {"data.train.num_examples": 6}
    assert len(opened(data, 6)) == 6
    with pytest.raises(ValueError, match=r"--questions must be at most 6, .* got 7"):
        opened(data, 7)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"care.reflect": False},
        {"care.reflect_mode": "resample"},
        {"rl.objective": "grpo"},
        {"stages": ("sft",)},
        {"stages": ("sft",), "sft.eval_every": 10, "keep_best": 1},
    ],
)
def test_what_a_second_decode_needs_is_checked_whatever_the_run_trains(opened, changes):
    long = {"care.max_context": 40, "rl.max_response_tokens": 42}
    with pytest.raises(ValueError, match=r"care\.max_context 40 and a cue of \d+ tokens leave no"):
        opened(changes | long)
    with pytest.raises(ValueError, match=r"care\.rule must be one of .*got 'nearestt'"):
        opened(changes | {"care.rule": "nearestt"})
