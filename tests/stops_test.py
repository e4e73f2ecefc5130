"""What stops a run: broken weights and updates, mistakes of the user, rows that cannot be used."""

import json
import pathlib
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import metrics_of, small_config

from care_jax import main
from care_jax.data.sources import open_source
from care_jax.devices.sharding import make_mesh
from care_jax.run import weights
from configs import common

ROOT = pathlib.Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("one_device")


DIVERGES = {"num_steps": 1, "learning_rate": 1.0, "warmup_steps": 0}


@pytest.mark.parametrize(
    "stages",
    [
        ("sft", "evaluate", "export"),
        pytest.param(("rl", "evaluate", "export"), marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_whose_last_state_is_broken_ends_without_an_export(tmp_path, stages):
    """Every step's loss is finite: it is that of the weights before its update."""
    changes = {f"{stages[0]}.{key}": value for key, value in DIVERGES.items()}
    with pytest.raises(FloatingPointError, match=rf"after \d steps of {stages[0]} is broken"):
        main.run_stages(small_config(stages=stages, **changes), tmp_path)
    records = metrics_of(tmp_path)
    assert records and all(np.isfinite(record["loss"]) for record in records)
    assert not list((tmp_path / "checkpoints" / stages[0]).glob("[0-9]*"))
    assert not (tmp_path / "export").exists()


def test_a_release_whose_weights_are_no_numbers_is_refused(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        params = start(*args, **kwargs)
        scale = params["text"]["norm"]["scale"]
        params["text"]["norm"]["scale"] = scale.at[0].set(jnp.inf)
        return params

    start = weights.start
    with monkeypatch.context() as patch:
        patch.setattr(weights, "start", broken)
        main.run_stages(small_config(stages=("export",)), tmp_path / "made")
    config = small_config(stages=("evaluate",))
    config.model.path, config.model.backbone = str(tmp_path / "made" / "export"), {}
    with pytest.raises(ValueError, match=r"made/export must .* text\.norm\.scale \(1 values\);"):
        main.run_stages(config, tmp_path / "run")


def test_nan_stops_the_run_and_names_the_step(tmp_path, monkeypatch):
    """The first update of the second step goes wrong."""
    make, seen = main.rl.train_batch, Counter()

    def broken(*args):
        batch, plan = make(*args)
        seen["updates"] += 1
        if seen["updates"] == 3:
            batch = batch.replace(old_logp=batch.old_logp * np.nan)
        return batch, plan

    monkeypatch.setattr(main.rl, "train_batch", broken)
    with pytest.raises(FloatingPointError, match=r"rl step 1: expected finite metrics, got .*=nan"):
        main.run_stages(small_config(stages=("rl",)), tmp_path)
    assert [record["step"] for record in metrics_of(tmp_path)] == [0]
    assert not (tmp_path / "checkpoints" / "rl" / "2").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.rl.learning_rat=1"], "Did you mean rl.learning_rate?"),
        (["--config=configs/huge.py"], "huge.py"),
        (["--config.rl.decode_prompts=3", "--config.mesh.fsdp=2"], "mesh.fsdp=2"),
        (
            ["--config.rl.row_tokens=64"],
            "rl.row_tokens 64 is too small for the largest of data.buckets (48 tokens, 64 patches) "
            "and a response of 36 tokens; set it to 84 or more",
        ),
        (["--config.rl.objective=grpo", "--config.care.delta=0.2"], "has no effect under"),
        (["--config.rl.objective=ppo"], "rl.objective must be one of care, grpo, dapo, gspo"),
        (["--config.data.train.source=jsonl", "--config.data.train.path=no.jsonl"], "no.jsonl"),
        (["--config.model.path=/nowhere/at/all"], "model.path"),
        (["--config.sft.warmup_steps=1000"], "warmup_steps 1000"),
    ],
)
def test_mistakes_of_the_user_are_one_line(run_command, tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr(main, "_run_each", None)
    if not any(flag.startswith("--config=") for flag in flags):
        flags = ["--config=configs/tiny.py", *flags]
    status, error = run_command(*flags, f"--workdir={tmp_path / 'run'}")
    assert error.count("\n") == 1, error
    assert status and message in error
    assert not (tmp_path / "run").exists()


def test_a_mistake_leaves_one_line_of_the_process():
    command = [sys.executable, "-m", "care_jax.main", "--config=configs/tiny.py"]
    result = subprocess.run(
        [*command, "--num_processes=2"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert "--coordinator_address, --num_processes and --process_id together" in result.stderr


def test_a_batch_size_the_mesh_cannot_divide_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "care_jax.run.run.make_mesh", lambda **_: make_mesh(1, 4, 2, devices=jax.devices()[:8])
    )
    config = small_config(**{"rl.microbatch_size": 12, "sft.microbatch_size": 8})
    with pytest.raises(
        ValueError,
        match=r"rl.microbatch_size 12 must be divisible by 8 devices .* set it to 8 or 16",
    ):
        main.run_stages(config, tmp_path)


def test_unusable_rows_are_skipped_and_counted(tmp_path, caplog):
    """In a mixture with drawn questions while training, and before held-out ones are used."""
    data = open_source("synthetic", num_examples=1)[0].images[0]
    data.save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:150])
    good = {
        "question": "<image>How many?",
        "answer": "3",
        "image": "good.png",
        "response": "<think>Count.</think><answer>3</answer>",
    }
    path = tmp_path / "rows.jsonl"
    rows = [good, good | {"image": "cut.png"}, good | {"answer": ""}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = small_config()
    parts = (
        common.source("jsonl", path=str(path), weight=1.0),
        common.source("synthetic", num_examples=16, weight=1.0),
    )
    config.data.sft = config.data.train = common.source("mixture", parts=parts)
    config.data.test = common.source("jsonl", path=str(path))
    config.data.num_workers = 2
    with caplog.at_level("WARNING"):
        results = main.run_stages(config, tmp_path / "run")
    assert results["rl"]["num_examples"] == 1
    assert "data.test: left out 1 rows: no answer (first is row 3)" in caplog.text
    for stage in ("sft", "rl"):
        *_, last = (line for line in metrics_of(tmp_path / "run") if line["stage"] == stage)
        assert last["left_out/no_answer"] > 0
        assert last["left_out/image_unreadable_or_truncated"] > 0
