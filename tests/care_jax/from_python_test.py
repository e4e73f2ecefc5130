"""Runs whose rows and reward function come from Python."""

import json
import re
import subprocess
import sys
import threading

import pytest
from PIL import Image
from report_page import data_of

import care_jax
from care_jax import main
from configs import common, tiny

pytestmark = pytest.mark.usefixtures("one_device")


def small_config(**changes):
    config = tiny.get_config()
    config.stages = ("rl", "evaluate")
    config.log_every = 1
    config.model.backbone.text_config.num_hidden_layers = 1
    config.rl.objective = "grpo"
    rl = config.rl
    rl.num_steps, rl.num_rollouts, rl.warmup_steps = 2, 4, 0
    rl.prompts_per_step = 8
    rl.prompts_per_update = rl.decode_prompts = 4
    rl.microbatch_size = 2
    config.evaluate.batch_size = 8
    config.update_from_flattened_dict(changes)
    return config


def rows_of(number):
    """Boxes as answers; every row has a field that only the reward function knows."""
    return [
        {
            "id": f"r{i}",
            "question": "<image>Where?",
            "image": Image.new("RGB", (32, 32), "red"),
            "answer": [i, 0, 4, 4],
            "kind": "lost" if i == 1 else "boxes",
        }
        for i in range(number)
    ]


def test_a_run_on_rows_and_a_closure_of_the_caller(tmp_path):
    """A random policy never answers, so the function grades by what differs: the length."""
    longest = 2000.0

    def graded(question, responses, example):
        assert example.answer[1:] == [0, 4, 4]
        if example.extra["kind"] == "lost":
            raise LookupError("no verdict")
        return [{"acc": min(len(text) / longest, 1), "brief": 0.25} for text in responses]

    weights = {"verifier.weights": (("acc", 0.5), ("brief", 1.0)), "verifier.success": 1e-4}
    rows = rows_of(6)
    config = small_config(**weights, **{"data.test.source": "", "rl.format_weight": 0.0})
    trained = care_jax.train_on(
        config, train=iter(rows), test=rows[:1], reward=graded, workdir=tmp_path / "run"
    )
    steps = [record for record in trained.metrics if record["stage"] == "rl"]
    assert [record["step"] for record in steps] == [0, 1]
    for record in steps:
        assert record["reward/brief"] == 0.25 and 0 < record["reward/acc"] < 1
        assert record["verifier/failed"] >= 4  # the row that fails is among 8 drawn of 6
        of_judged = 0.5 * record["reward/acc"] + 0.25
        assert record["reward"] == pytest.approx(of_judged, rel=1e-5)
        assert record["verifier/timeouts"] == record["verifier/crashes"] == 0
    evaluated = trained.evaluations["rl"]
    assert evaluated["num_examples"] == 1 and evaluated["reward/brief"] == 0.25
    assert 1e-4 < evaluated["reward/acc"] < 0.5 and evaluated["acc"] == 1
    sample = json.loads((trained.workdir / "samples_rl.jsonl").read_text())
    assert sample["target"] == [0, 0, 4, 4] and sample["components"][0]["brief"] == 0.25
    groups = data_of(trained.workdir)["groups"]
    found = {tuple(response["components"]) for group in groups for response in group["responses"]}
    assert ("acc", "brief") in found

    again = care_jax.train_on(config, rows, rows[:1], graded, workdir=tmp_path / "run")
    assert again.metrics[: len(steps)] == steps  # it had ended
    command = [sys.executable, "-m", "care_jax.cli", "evaluate", f"--workdir={tmp_path}/run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "in place of data.test and verifier.reward: call care_jax.train_on" in done.stderr


def test_without_held_out_rows_nothing_is_evaluated(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        main, "run_stages", lambda config, *_, **given: asked.update(given, config=config)
    )
    config = common.get_config()
    trained = care_jax.train_on(config, train=rows_of(2), workdir=str(tmp_path))
    assert asked["config"].stages == ("sft", "rl") and set(asked["examples"]) == {"rl"}
    assert config.stages == ("sft", "rl", "evaluate")  # as it was
    assert trained.metrics == [] and trained.workdir == tmp_path
    care_jax.train_on(tiny.get_config(), train=rows_of(2), workdir=tmp_path)
    assert "evaluate" in asked["config"].stages  # on data.test


@pytest.mark.parametrize("preset", ["auto", "none"])
def test_the_flags_of_xla_are_those_of_the_configuration(tmp_path, monkeypatch, preset):
    presets = []
    monkeypatch.setattr(main, "run_stages", lambda *_, **__: {})
    monkeypatch.setattr("care_jax.devices.xla_flags.set_defaults", presets.append)
    care_jax.train_on(small_config(xla_preset=preset), train=rows_of(2), workdir=tmp_path)
    assert presets == [preset]


def holding(lock):
    return lambda question, responses, example: [lock]


REFUSED = {
    "a lock": (holding(threading.Lock()), r"to a worker process, got TypeError: .*lock"),
    "a single response": (lambda question, response, example: 1.0, "takes a single `response`"),
    "answers without a function": (None, r"2 x answer is a list .* needs verifier\.reward"),
}


@pytest.mark.parametrize(("reward", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_in_the_first_second(tmp_path, reward, message):
    with pytest.raises(ValueError, match=message):
        care_jax.train_on(small_config(), rows_of(2), reward=reward, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


WRONG = {
    "a path as rows": ({"train": "train.jsonl"}, "expected train as an iterable of rows, got 'tra"),
    "no rows": ({"train": None}, "expected train as an iterable of rows, got None; pass a list"),
    "no list": ({"train": rows_of(1)[0]}, "mapping with question and answer as row 0 of train"),
    "other keys": (
        {"train": [{"problem": "?", "solution": "1"}]},
        "1 x no question (first is row 1: it has problem, solution; expected question and answer",
    ),
    "rows without RL": (
        {"config": small_config(stages=("sft", "evaluate"))},
        "the stage 'rl', which trains on these rows, in config.stages, got ('sft', 'evaluate')",
    ),
    "rows that nothing evaluates": (
        {"config": small_config(stages=("rl",)), "test": rows_of(1)},
        "expected an evaluation of the rows `test`, got stages ('rl',); add 'evaluate'",
    ),
    "a dict": ({"config": {"stages": ("rl",)}}, "ConfigDict, such as care_jax.configs.tiny.get_c"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_told_with_what_is_expected(tmp_path, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        care_jax.train_on(
            **{"config": small_config(), "train": rows_of(2)} | given, workdir=tmp_path / "run"
        )


def test_importing_the_package_imports_no_jax_and_defines_no_flag():
    """Flags of the caller's program may have the names of ours."""
    code = """
import sys, absl.flags, care_jax
assert "jax" not in sys.modules
assert care_jax.train_on.__doc__ and "care_jax.main" in sys.modules
assert "config" not in absl.flags.FLAGS
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
