import json

from care_jax.report import curves


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path):
    return curves.Curves(path, max_points=10).read()


def series_of(stage):
    return {
        each["name"]: (chart["title"], each["values"])
        for chart in stage["charts"]
        for each in chart["series"]
    }


def test_metrics_stand_in_charts_and_one_nobody_knows_in_its_own(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        {"stage": "sft", "step": 0, "loss": 2.0},
        {"stage": "rl", "step": 0, "reward": 0.123456789, "acc": 0, "acc/made": 1, "odd": 3},
        {"stage": "rl", "step": 1, "reward": 0.5, "acc": 1, "reflect_success": 0.25},
    )
    sft, rl = read(path)
    assert (sft["name"], sft["steps"]) == ("sft", [0])
    assert series_of(rl) == {
        "reward": ("Reward", [0.12346, 0.5]),
        "acc": ("Accuracy", [0, 1]),
        "acc/made": ("Accuracy by source", [1, None]),
        "reflect_success": ("Reflection", [None, 0.25]),
        "odd": ("odd", [3, None]),
    }
    assert [(chart["title"], chart["is_split"]) for chart in rl["charts"]] == [
        *(("Reward", False), ("Accuracy", False), ("Accuracy by source", True)),
        *(("Reflection", False), ("odd", False)),
    ]


def test_a_long_curve_keeps_every_nth_step_and_the_last(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *({"stage": "rl", "step": step, "acc": step} for step in range(100, 124)))
    (stage,) = read(path)
    assert stage["steps"] == [*range(100, 124, 4), 123] and stage["stride"] == 4
    assert series_of(stage)["acc"][1] == stage["steps"]


def test_a_file_that_grows_is_read_on_and_one_that_lost_lines_anew(tmp_path):
    """After every line the curves are those of the whole file, also in the middle of one."""
    path, lines = (
        tmp_path / "metrics.jsonl",
        [
            *(json.dumps({"stage": "sft", "step": step, "nll": step}) for step in range(5)),
            *("damaged", json.dumps({"stage": "rl_eval", "step": 0, "acc": 0.5})),
            *(json.dumps({"stage": "rl", "step": step, "acc": step}) for step in range(45)),
        ],
    )
    growing = curves.Curves(path, max_points=10)
    for number, line in enumerate(lines):
        with path.open("a") as file:
            file.write(f"{line[:9]}")
            file.flush()
            assert growing.read() == (read(path) if number else [])
            file.write(f"{line[9:]}\n")
        assert growing.read() == read(path)
    assert [stage["steps"] for stage in growing.read()] == [
        *([0, 1, 2, 3, 4], [*range(0, 45, 8), 44], [0]),
    ]
    for kept in (20, 6, 0):
        path.write_text("".join(f"{line}\n" for line in [*lines[:kept], lines[-1]]))
        assert growing.read() == read(path)
    path.write_text("")
    assert growing.read() == [] == growing.read()


def test_a_line_cut_by_a_kill_is_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read(path) == []
    path.write_text('{"stage": "rl", "step": 0}\n{"stage": "rl", "st')
    assert [stage["steps"] for stage in read(path)] == [[0]]


def test_a_metric_goes_to_the_first_chart_that_names_it():
    assert curves.chart_of("signature/ratio")[0] == "√K′ signature"
    assert curves.chart_of("signature/anchor_3")[0] == "A_raw by K′"
    assert curves.chart_of("clip_rate_negative_answer")[0] == "Clip rate"
    assert curves.chart_of("train_tokens_per_second")[:2] == ("Throughput", "tokens/s")


def test_evaluations_inside_a_stage_are_curves_behind_it(tmp_path):
    """Whichever began first; the page shows the last on top."""
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        {"stage": "sft", "step": 0, "loss": 2.0},
        {"stage": "sft_eval", "step": 1, "acc": 0.5, "acc_low": 0.25, "pass@2": 0.75},
        {"stage": "rl_eval", "step": 0, "mmmu/acc": 0.5, "mean/acc": 0.5, "mmmu/pass@2": 0.75},
        {"stage": "rl", "step": 0, "acc": 0.5},
        {"stage": "rl_eval", "step": 1, "mmmu/acc": 1.0, "mean/acc": 1.0, "mmmu/pass@2": 1.0},
    )
    stages = read(path)
    assert [stage["name"] for stage in stages] == ["sft", "sft_eval", "rl", "rl_eval"]
    assert stages[3]["steps"] == [0, 1]
    assert series_of(stages[3]) == {
        "mmmu/acc": ("Benchmarks", [0.5, 1.0]),
        "mean/acc": ("Benchmarks", [0.5, 1.0]),
        "mmmu/pass@2": ("Benchmarks, pass@k", [0.75, 1.0]),
    }
    titles = {name: title for name, (title, _) in series_of(stages[1]).items()}
    assert titles == {"acc": "Accuracy", "acc_low": "Accuracy", "pass@2": "pass@k"}


def test_what_tells_a_healthy_run_comes_first():
    first = [title for title, *_ in curves.CHARTS[:6]]
    assert first == [
        *("Reward", "Accuracy", "Entropy", "Response length", "Loss", "Gradient norm"),
    ]


def test_stages_of_several_runs_share_their_steps_and_charts(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(
        a,
        {"stage": "sft", "step": 0, "loss": 2},
        *({"stage": "rl", "step": step, "acc": step, "odd": 1} for step in (0, 2)),
    )
    write(b, *({"stage": "rl", "step": step, "acc": 9, "reward": 5} for step in (1, 2)))
    sft, rl = curves.merge([read(path) for path in (b, a)])
    assert (sft["name"], sft["charts"][0]["series"][0]["run"]) == ("sft", 1)
    assert (rl["name"], rl["steps"]) == ("rl", [0, 1, 2])
    found = {
        chart["title"]: [(each["run"], each["values"]) for each in chart["series"]]
        for chart in rl["charts"]
    }
    assert found == {
        "Reward": [(0, [None, 5, 5])],
        "Accuracy": [(0, [None, 9, 9]), (1, [0, None, 2])],
        "odd": [(1, [1, None, 1])],
    }
    assert curves.names([sft, rl]) == {"loss", "acc", "reward", "odd"}
    assert curves.merge([[]]) == []
