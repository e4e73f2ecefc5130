"""A dry run says what the run would do, and does nothing."""

import json
import re
import shutil

import jax
import pytest
from PIL import Image
from scripted import make_step

from care_jax import main
from care_jax.aot import dry_run
from care_jax.config import resume
from care_jax.data.examples import open_examples
from care_jax.run import space
from care_jax.run.policy import policy_of
from care_jax.run.run import open_run
from configs import tiny
from models import backbone


@pytest.fixture
def said(one_device, monkeypatch, capsys, tmp_path):
    """Runs dry with a changed configuration; gives what was printed."""
    monkeypatch.setattr(dry_run, "_CHEAP", 0)

    def run(workdir="run", **changes):
        config = tiny.get_config()
        config.update_from_flattened_dict(changes)
        assert main.run_stages(config, tmp_path / workdir, is_dry=True) == {}
        return capsys.readouterr().out

    return run


def test_it_writes_nothing_and_counts_parameters_and_their_bytes(said, tmp_path):
    output = said()
    assert not (tmp_path / "run").exists()
    policy = policy_of(tiny.get_config())
    shapes = jax.eval_shape(lambda: backbone.init(policy.config, jax.random.key(0)))
    total = sum(x.size for x in jax.tree.leaves(shapes))
    assert f"{total:,} parameters, {total:,} trained; master weights float32" in output
    assert f"{4 * total / 2**30:.3f} GiB weights\n" in output
    assert f"{8 * total / 2**30:.3f} GiB optimizer state\n" in output
    assert "rl.num_rollouts = 8\n" in output
    assert "run would be created" in output and output.count("; none yet") == 2


def test_a_frozen_tower_and_bfloat16_halve_what_they_say(said):
    output = said(**{"model.freeze_vision": True, "model.param_dtype": "bfloat16"})
    total, trained = re.search(r"([\d,]+) parameters, ([\d,]+) trained", output).groups()
    assert 0 < int(trained.replace(",", "")) < int(total.replace(",", ""))
    assert f"{2 * int(total.replace(',', '')) / 2**30:.3f} GiB weights\n" in output


def test_the_first_usable_rows_are_tokenised_and_the_others_counted(said, tmp_path):
    rows = [
        {"question": "no gold answer"},
        {"question": "How many?", "answer": "3", "image": "wide.png"},
        {"question": "Why?", "answer": "because", "id": "second"},
        {"question": "not shown", "answer": "1"},
        {"question": "behind those that are shown"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Image.new("RGB", (640, 480)).save(tmp_path / "wide.png")
    changes = {"data.train.source": "jsonl", "data.train.path": str(path), "stages": ("rl",)}
    changes["data.train.num_examples"] = 0
    output = said(**changes)
    data = output.partition("## Data of 'rl'")[2].partition("##")[0]
    # One before the rows that are shown, one behind them.
    assert "5 rows" in data
    assert "left out of the first 5 rows: 2 x no answer (first is row " in data
    builder = policy_of(tiny.get_config()).prompts
    example = open_examples(_with(changes), "rl")[1]
    assert f"{len(builder.tokenize(example).tokens)} tokens, 48 patches" in data
    assert "question '<image>How many?', answer '3'" in data and "not shown" not in data
    assert "image 640×480 resized to 64×48, 12 tokens" in data
    assert "<|vision_start|><|image_pad|>×12<|vision_end|>How many?<|im_end|>" in data
    path.write_text(json.dumps(rows[2] | {"question": "How many? " * 200}) + "\n")
    with pytest.raises(
        ValueError, match=r"of stage 'rl' must have a usable row .* \(1 x prompt fits"
    ):
        said(**changes)


def _with(changes):
    config = tiny.get_config()
    config.update_from_flattened_dict(changes)
    return config


def test_the_first_prompt_of_a_benchmark_is_shown_and_its_rows_are_counted(said, tmp_path):
    row = {"id": "7", "question": "How?", "answer": "3", "image": "wide.png"}
    path = tmp_path / "testmini.jsonl"
    path.write_text(json.dumps(row) + "\n")
    changes = {"evaluate.benchmarks": (("mathvision_testmini", str(path)),)}
    with pytest.raises(
        ValueError, match=r"line 1 of .* image missing \(.*/wide.png\); hf download"
    ):
        said(**changes)
    Image.new("RGB", (640, 480)).save(tmp_path / "wide.png")
    output = said(**changes)
    data = output.partition("## Benchmark 'mathvision_testmini'")[2].partition("##")[0]
    assert "1 rows, 304 are published" in data and "a partial download" in output
    assert "mathvision_testmini 7: " in data and "image 640×480 resized to 64×48" in data
    assert "the first prompt fits no bucket, and would count as wrong (" in data
    output = said(**changes, **{"data.buckets": ((96, 64),)})
    data = output.partition("## Benchmark 'mathvision_testmini'")[2].partition("##")[0]
    assert "the first" not in data and '\\boxed{}".How?<|im_end|>' in data


def test_a_context_is_counted_apart_from_the_response_that_is_learnt(said, tmp_path):
    row = {"question": "How many?", "answer": "3", "response": " 3.</think><answer>3</answer>"}
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(x) + "\n" for x in (row | {"context": "<think>2. No."}, row))
    )
    changes = {"data.sft.source": "jsonl", "data.sft.path": str(path), "stages": ("sft",)}
    output = said(**changes | {"data.sft.num_examples": 0, "data.cue_share": 0.0})
    builder = policy_of(tiny.get_config()).prompts
    response, context = (
        len(builder.response_tokens(row["response"])),
        len(builder.context_tokens("<think>2. No.")),
    )
    assert output.count(f"response {response} tokens behind a context of {context}\n") == 1


@pytest.fixture
def saved(one_device, tmp_path):
    """(stage, step) -> writes what a checkpoint of `configs/tiny.py` has beside its state."""
    run = open_run(tiny.get_config(), tmp_path / "run")

    def save(stage, step):
        folder = make_step(tmp_path / "run", stage, step) / "progress"
        folder.mkdir()
        settings = resume.settings(run.config, stage)
        text = json.dumps({"fingerprint": run.fingerprint(), "settings": settings})
        (folder / "metadata").write_text(text)

    return save


def test_a_cold_start_leaves_out_what_fits_no_bucket(said):
    with pytest.raises(ValueError, match=r"stage 'sft' .* \(64 x prompt fits no bucket"):
        said(stages=("sft",), **{"data.buckets": ((30, 64),)})


def test_a_workdir_that_has_checkpoints_goes_on_from_the_last(said, saved):
    for step in ("9", "10", "12.tmp"):
        saved("rl", step)
    with pytest.raises(ValueError, match="needs the weights of the cold start, whose checkpoints"):
        said()
    saved("sft", "400")
    output = said()
    assert "run exists" in output and "kept; resumes from step 10\n" in output


def test_a_cold_start_that_rl_is_past_has_no_more_checkpoints(said, saved, tmp_path):
    saved("rl", "10")
    output = said(stages=("sft", "rl"), **{"care.beta": 0.0})
    assert "checkpoints/rl/: " in output and "checkpoints/sft/: " not in output


def test_a_cold_start_put_ahead_of_rl_that_has_begun_is_refused(said, saved, tmp_path):
    saved("rl", "10")
    path = tmp_path / "run/checkpoints/rl/10/progress/metadata"
    metadata = json.loads(path.read_text())
    metadata["settings"]["stages"] = []
    path.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=r"stages \(those before 'rl' that train\) was \[\]"):
        said()


def test_a_workdir_with_a_run_of_other_settings_is_refused(said, saved, tmp_path):
    saved("sft", "10")
    with pytest.raises(ValueError, match=r"\(10 steps done\).* sft.batch_size was 64, is 32;"):
        said(**{"sft.batch_size": 32})
    saved("sft", "20")
    (tmp_path / "run/checkpoints/sft/20/progress/metadata").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint 20 in .* is damaged: .*; remove .*/20"):
        said()
    shutil.rmtree(tmp_path / "run/checkpoints/sft/20")
    with pytest.raises(ValueError, match=r"of another model: lora_rank \(checkpoint 0, config 4\)"):
        said(**{"model.lora_rank": 4})


@pytest.mark.parametrize(
    ("stages", "name"),
    [(("evaluate",), "rl (export.step 'last')"), (("evaluate", "sft"), "start")],
)
def test_an_evaluation_without_training_is_of_the_checkpoint(said, saved, stages, name):
    for stage in ("sft", "rl"):
        saved(stage, "4")
    assert f"samples of the evaluations after {name}\n" in said(stages=stages)


def test_the_update_of_a_small_model_is_compiled(said, monkeypatch):
    monkeypatch.setattr(dry_run, "_CHEAP", 1e9)
    output = said(stages=("sft",))
    assert re.search(r"0\.\d+ GiB largest sft step, compiled in \d+ s\n", output)


@pytest.mark.parametrize("name", ["run", "run/inside"])
def test_a_workdir_that_is_a_file_or_inside_one_is_refused(said, tmp_path, name):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match=rf"got \S+/{name}, and \S+/run is a file; choose another"):
        said(name, stages=("export",))


def test_too_little_room_is_named(said, monkeypatch):
    monkeypatch.setattr(space, "check", lambda run: f"warning: {run.workdir} is small")
    assert "is small" in said().partition("## Files")[2]


def test_a_mistake_is_told_before_anything_else(said):
    with pytest.raises(ValueError, match=r"rl\.objective"):
        said(**{"rl.objective": "ppo"})
