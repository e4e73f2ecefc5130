"""What a run prints before its first stage and after its last one."""

import json
import re

import pytest

from care_jax import main
from care_jax.run import terminal
from care_jax.run.run import open_run
from configs import common, tiny


def run_with(workdir, **changes):
    config = tiny.get_config()
    config.update_from_flattened_dict({"data.test.num_examples": 12, **changes})
    return open_run(config, workdir)


def banner_of(run):
    lines = terminal.banner(run, main.open_sources(run, {})).splitlines()
    return dict(re.split(r"\s+", line, maxsplit=1) for line in lines)


def test_the_banner_names_what_runs_on_what_with_which_data(one_device, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 3)
    parts = (common.source("jsonl", path=str(rows)), common.source("synthetic", num_examples=5))
    changes = {"rl.objective": "gspo", "data.train.source": "mixture", "data.train.parts": parts}
    changes["data.train.num_examples"] = 0
    banner = banner_of(run_with(tmp_path / "run", **changes))
    assert banner["objective"] == "gspo"
    assert re.fullmatch(r"qwen2_5_vl, 5\d\dK parameters, random weights", banner["model"])
    assert banner["devices"] == "1 x cpu"
    assert banner["data.sft"] == "32,768 rows of synthetic"
    assert banner["data.train"] == f"3 rows of {rows} + 5 rows of synthetic"
    assert banner["data.test"] == "12 rows of synthetic"
    assert banner["stages"] == "sft (400 steps), evaluate, rl (100 steps), evaluate"
    assert banner["workdir"] == str(tmp_path / "run")


def test_held_out_rows_of_a_mixture_are_read_into_one_list(one_device, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 3)
    parts = (common.source("jsonl", path=str(rows)), common.source("synthetic", num_examples=5))
    changes = {"data.test.source": "mixture", "data.test.parts": parts}
    banner = banner_of(run_with(tmp_path / "run", **changes, **{"data.test.num_examples": 0}))
    assert banner["data.test"] == f"8 rows of {rows} + synthetic"


def test_the_banner_says_which_rows_were_given_from_python(one_device, tmp_path):
    run = run_with(tmp_path / "run")
    sources = main.open_sources(run, {})
    lines = terminal.banner(run, sources, given=("rl",)).splitlines()
    assert "data.train 32,768 rows given from Python" in lines
    assert "data.test  12 rows of synthetic" in lines


def test_without_rl_there_is_no_objective_and_lora_is_named(one_device, tmp_path):
    run = run_with(tmp_path / "run", stages=("sft",), **{"model.lora_rank": 8})
    banner = banner_of(run)
    assert "objective" not in banner and banner["model"].endswith(", LoRA of rank 8")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 10),
        ({"stages": ("rl",)}, 6),
        ({"stages": ("rl",), "care.reflect": False}, 4),
        ({"stages": ("sft", "rl"), "rl.objective": "grpo"}, 6),
        ({"stages": ("evaluate",)}, 2),
        ({"stages": ("sft",), "sft.eval_every": 100}, 4),
    ],
)
def test_programs_are_counted_by_what_runs(one_device, tmp_path, changes, expected):
    assert terminal.num_programs(run_with(tmp_path, **changes).config) == expected


def write_metrics(folder, records):
    folder.mkdir()
    lines = (json.dumps({"step": 0, **record}) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_the_end_says_what_was_learned_and_then_where_the_report_is(one_device, tmp_path):
    run = run_with(tmp_path / "run")
    rollouts = [{"stage": "rl", "acc": 0.3 + (number >= 10) / 5} for number in range(20)]
    evaluated = [{"stage": "evaluate_sft", "acc": 0.5}, {"stage": "evaluate_rl", "acc": 0.725}]
    write_metrics(run.workdir, [evaluated[0], *rollouts, evaluated[1], {"stage": "sft", "nll": 1}])
    (run.workdir / "report.html").touch()
    learned, sampled, report, how = terminal.ending(run).splitlines()
    assert learned == (
        "greedy accuracy, held-out questions: 50.0% after sft -> 72.5% after rl (+22.5 points)"
    )
    assert sampled == (
        "sampled accuracy, rollouts: 30.0% in the first 10 steps of rl, 50.0% in the last 10"
    )
    assert report == f"report: {run.workdir / 'report.html'}" and "browser" in how


def test_the_end_compares_evaluations_of_the_same_benchmarks_and_decoding(one_device, tmp_path):
    run = run_with(tmp_path / "run")
    greedy, sampled = {"temperature": 0.0, "num_samples": 1}, {"temperature": 1, "num_samples": 4}
    two = {"mmmu/acc": 0.5, "mathvista/acc": 0.46, "mean/acc": 0.48}
    one = {"mmmu/acc": 0.6, "mean/acc": 0.6}
    records = [
        {"stage": "evaluate_start", "acc": 0.1, **one, **greedy},
        {"stage": "evaluate_sft", "acc": 0.2, **one, **sampled},
        {"stage": "evaluate_rl", "acc": 0.3, **two, **sampled},
    ]
    write_metrics(run.workdir, records)
    assert terminal.ending(run).splitlines() == [
        "sampled accuracy, held-out questions: 20.0% after sft -> 30.0% after rl (+10.0 points)",
        "sampled accuracy, benchmarks, their mean: 48.0% after rl",
    ]


def test_the_end_of_a_sampled_evaluation_of_benchmarks(one_device, tmp_path):
    changes = {"evaluate.temperature": 1.0, "stages": ("evaluate",)}
    run = run_with(tmp_path / "run", **changes)
    write_metrics(run.workdir, [{"stage": "evaluate_start", "mathvista/acc": 0.4, "mean/acc": 0.4}])
    assert terminal.ending(run) == ("sampled accuracy, benchmarks, their mean: 40.0% after start")
