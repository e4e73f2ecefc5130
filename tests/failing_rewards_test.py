"""Reward functions that fail: the run ends with their error, and goes on once they are mended."""

import asyncio
import inspect
import json
import pathlib

import pytest
from small_run import metrics_of, small_config

import care_jax
from care_jax.rewards.failures import RewardFailed

pytestmark = pytest.mark.usefixtures("one_device")
ROWS = [{"id": f"r{i}", "question": f"{i} and one?", "answer": str(i + 1)} for i in range(8)]
FLAGS = ["rl.objective=grpo", "model.backbone.text_config.num_hidden_layers=1"]
FLAGS += ["rl.num_rollouts=4", "rl.prompts_per_step=8", "rl.prompts_per_update=4"]
FLAGS += ["rl.decode_prompts=4", "rl.microbatch_size=2", "rl.num_steps=2", "rl.warmup_steps=0"]


def config_of(**changes):
    config = small_config(stages=("rl", "evaluate"), checkpoint_every=100, **changes)
    config.rl.objective = "grpo"
    config.model.backbone.text_config.num_hidden_layers = 1
    config.verifier.num_workers = 1
    return config


def verdicts_on(responses):
    """Of a policy that has not learned to answer."""
    return [{"acc": len(text) % 3 / 2} for text in responses]


def raises(question, responses, example):
    return [{"acc": example.extra["size"]} for _ in responses]


LINE = inspect.getsourcelines(raises)[1] + 1


def test_a_function_that_always_raises_ends_the_command_before_its_first_stage(
    run_command, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent)
    status, error = run_command(
        *("--config=configs/tiny.py", f"--workdir={tmp_path}", "--config.stages=('rl','evaluate')"),
        *(
            "--config.verifier.reward=failing_rewards_test:raises",
            "--config.verifier.num_workers=1",
        ),
        *(f"--config.{flag}" for flag in FLAGS),
    )
    first, *middle, last, advice = error[error.rindex("error: ") :].splitlines()
    assert status == 1
    assert first == (
        "error: before the first stage: no made-up response to rows of data.train was judged. "
        "The reward function failing_rewards_test:raises failed:"
    )
    # The traceback begins with the user's function.
    assert middle[:2] == [
        "Traceback (most recent call last):",
        f'  File "{__file__}", line {LINE}, in raises',
    ]
    assert last == "KeyError: 'size'"
    assert advice.startswith("Finished steps are kept: correct the function, then run again with")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_ended_by_its_reward_saves_its_steps_and_goes_on(tmp_path, capsys):
    """From its third step on every call hangs; mended, it fails on two held-out questions alone."""
    workdir = tmp_path / "run"

    async def hangs(question, responses, example):
        if len((workdir / "metrics.jsonl").read_text().splitlines()) >= 2:
            await asyncio.sleep(60)
        return verdicts_on(responses)

    def mended(question, responses, example):
        if len(responses) == 1 and example.id in ("r1", "r4"):
            return 0.5
        return verdicts_on(responses)

    workdir.mkdir()
    (workdir / "metrics.jsonl").touch()
    config = config_of(**{"rl.num_steps": 3, "verifier.timeout": 2.0})
    with pytest.raises(RewardFailed) as failed:
        care_jax.train_on(config, ROWS, ROWS, hangs, workdir=workdir)
    assert "rl step 2: none of 32 responses was judged. The reward function " in str(failed.value)
    assert "hangs took longer than verifier.timeout, 2 s for a group of 4" in str(failed.value)
    assert [path.name for path in (workdir / "checkpoints" / "rl").glob("[0-9]*")] == ["2"]
    done = metrics_of(workdir)
    assert [record["step"] for record in done] == [0, 1] and done[0]["not_judged"] == 0
    assert "not judged" not in capsys.readouterr().out

    config.verifier.timeout = 5.0
    trained = care_jax.train_on(config, ROWS, ROWS, mended, workdir=workdir)
    assert trained.metrics[:2] == done
    assert [record["step"] for record in trained.metrics if record["stage"] == "rl"] == [0, 1, 2]
    found = trained.evaluations["rl"]
    assert (found["num_examples"], found["num_not_judged"]) == (6, 2)
    assert "6 held-out examples, 2 not judged, format" in capsys.readouterr().out
    lines = (workdir / "samples_rl.jsonl").read_text().splitlines()
    accs = {sample["id"]: sample["acc"] for sample in map(json.loads, lines)}
    assert [name for name, acc in accs.items() if acc is None] == ["r1", "r4"]
    assert found["acc"] == sum(filter(None, accs.values())) / 6


def test_a_function_that_fails_too_often_ends_the_run_at_its_fifth_step(tmp_path, capsys):
    def often_raises(question, responses, example):
        if int(example.id[1:]) < 5:
            raise LookupError("no judge")
        return verdicts_on(responses)

    with pytest.raises(RewardFailed) as failed:
        config = config_of(**{"rl.num_steps": 6})
        care_jax.train_on(config, ROWS, ROWS, often_raises, workdir=tmp_path)
    assert str(failed.value).startswith(
        "rl step 4: 62.5% of the responses of the last 5 steps were not judged, above "
        "verifier.max_failed 0.5. The reward function "
    )
    assert "LookupError: no judge\nFinished steps are kept" in str(failed.value)
    assert [record["not_judged"] for record in metrics_of(tmp_path)] == [5 / 8] * 4
    assert capsys.readouterr().out.count("  not judged 62.5%  ") == 4
    assert (tmp_path / "checkpoints" / "rl" / "4").is_dir()
