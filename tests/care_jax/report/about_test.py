"""What the head of a report says of a run."""

import json
import os
import random

import pytest

from care_jax.report import about
from configs import tiny

CONFIG = json.loads(tiny.get_config().to_json_best_effort())
START = {"time": "2026-01-02T03:04:05+00:00", "command": "care-jax train", "devices": "1 × cpu"}
BEGAN = 1767323045  # START's time


def write(workdir, *starts, config=CONFIG, seconds=60):
    fields = config | {"versions": {"care_jax": "1.0", "jax": "0.9", "numpy": "2"}}
    (workdir / "config.json").write_text(json.dumps(fields))
    (workdir / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    (workdir / "metrics.jsonl").write_text("")
    os.utime(workdir / "metrics.jsonl", (BEGAN + seconds,) * 2)


def test_the_facts_of_a_run(tmp_path):
    write(tmp_path, START | {"changed": {"rl.objective": "care", "seed": 1}}, seconds=2 * 3600 + 60)
    found = about.describe_run(tmp_path)
    assert dict(found["facts"]) == {
        "Model": "random qwen2_5_vl (2 layers, width 96)",
        "Objective": "CARE",
        "Stages": "sft → evaluate → rl → evaluate",
        "Data": "synthetic",
        "Devices": "1 × cpu",
        "Duration": "2 h 1 min; began 2026-01-02 03:04 UTC",
        "Versions": "care_jax 1.0, jax 0.9",
        "Command": "care-jax train",
    }
    assert found["changed"] == [("rl.objective", '"care"'), ("seed", "1")]
    assert dict(found["settings"])["rl.num_steps"] == "100"
    assert "versions.jax" not in dict(found["settings"])
    assert found["versions"] == [("care_jax", "1.0"), ("jax", "0.9"), ("numpy", "2")]


def test_a_run_that_was_started_again_says_so_and_has_the_last_command(tmp_path):
    write(tmp_path, START, START | {"command": "again", "changed": {}}, seconds=120)
    facts = dict(about.describe_run(tmp_path)["facts"])
    assert facts["Duration"].startswith("2 min, 2 starts with the pauses between; began 2026-01-02")
    assert facts["Command"] == "again"


def test_an_export_or_an_evaluation_afterwards_hides_no_training(tmp_path):
    trained = START | {"stages": ["sft", "rl"], "changed": {"seed": 1}, "given": ["rl"]}
    exported = START | {"stages": ["export"], "command": "care-jax export", "changed": {}}
    write(tmp_path, trained, exported, config=CONFIG | {"stages": ["export"]})
    found = about.describe_run(tmp_path)
    facts = dict(found["facts"])
    assert (facts["Stages"], facts["Objective"]) == ("sft → rl → export", "CARE")
    assert facts["Command"] == "care-jax train" and found["changed"] == [("seed", "1")]
    assert facts["Data"] == "synthetic, rows given from Python"


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"stages": ["rl"'])
def test_a_workdir_without_these_files_has_no_facts(tmp_path, text):
    for name in ("config.json", "starts.jsonl") if text is not None else ():
        (tmp_path / name).write_text(text)
    assert about.describe_run(tmp_path) == {
        **{"facts": [], "changed": [], "settings": [], "versions": []},
    }


def test_a_release_is_named_by_its_folder_with_its_adapters():
    model = {"path": "Qwen/Qwen2.5-VL-7B-Instruct", "lora_rank": 0, "backbone": {}}
    assert about.model_of({"model": model}) == "Qwen2.5-VL-7B-Instruct"
    assert about.model_of({"model": model | {"lora_rank": 8}}).endswith(", LoRA of rank 8")


def test_sources_are_those_of_the_stages_and_of_a_mixture(tmp_path):
    data = {
        "train": {"source": "mixture", "parts": [{"path": "a.jsonl"}, {"source": "geometry"}]},
        "sft": {"source": "unread"},
    }
    write(tmp_path, config=CONFIG | {"stages": ["rl"], "data": data})
    assert dict(about.describe_run(tmp_path)["facts"])["Data"] == "a.jsonl, geometry"


def test_hyperparameters_are_those_of_the_stage_and_its_objective():
    for stage, section in (("rl", "rl"), ("rl_eval", "rl"), ("sft", "sft")):
        names = {key.split(".")[0] for key, _ in about.hyperparameters(CONFIG, stage)}
        assert names == {"seed", "model", section, *(["care"] if section == "rl" else [])}


def test_whatever_is_damaged_the_rest_is_told(tmp_path):
    """A report is drawn while a run trains, which it must not end."""
    start = START | {"changed": {"seed": 1}, "stages": ["rl"]}
    write(tmp_path, start, start)
    rng = random.Random(0)
    for name in ("config.json", "starts.jsonl"):
        data = (tmp_path / name).read_bytes()
        cut = data[: len(data) // 3]
        others = [b"", b"[1]", b"{}", b'{"model": 3}', b'{"stages": 3, "changed": [1]}', cut]
        others += [b'{"stages": [{}], "time": 7, "command": {}}\n', b'{"versions": [3], "rl": {}}']
        for _ in range(300):
            damaged = bytearray(data)
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            others.append(bytes(damaged))
        for other in others:
            (tmp_path / name).write_bytes(other)
            found = about.describe_run(tmp_path)
            assert found.keys() == {"facts", "changed", "settings", "versions"}
        assert dict(found["facts"])
        (tmp_path / name).write_bytes(data)
