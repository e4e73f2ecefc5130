"""The command as a whole: what it prints, the files it writes, what it refuses."""

import csv
import json
import math
import re

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image

from experiments.sweep.__main__ import main
from experiments.sweep.figures import PANELS, panel_named, write_figure
from experiments.sweep.measures import columns_of
from experiments.sweep.tables import write_table


@pytest.fixture
def command(write_experiment, runs, tmp_path):
    def run(*flags):
        flags = (f"--experiment={write_experiment()}", f"--workdir={tmp_path / 'runs'}", *flags)
        return main(flags)

    return run


def test_the_table_has_means_intervals_and_leads(command, tmp_path, capsys):
    assert command("--seeds=3", "--processes=2") == 0
    printed = capsys.readouterr().out
    assert "some_key: 3 arms x 3 seeds on tiny, 9 of 9 runs to do" in printed
    table = (tmp_path / "runs/some_key/table.md").read_text()
    assert table in printed
    # acc 70, 71, 72 and 75, 76, 77; started from 50, 51, 52. t(0.975, 2) = 4.3027, s = 1.
    assert "| arm | seeds | held-out acc, % | gain over the start | lead over one |" in table
    assert "response tokens" not in table  # these runs did not count them
    assert "| one | 3 | 71.0 ± 2.5 | 20.0 ± 0.0 | – |" in table
    assert "| two | 3 | 76.0 ± 2.5 | 25.0 ± 0.0 | 5.0 ± 0.0 |" in table
    assert "--base=tiny --seeds=3` at commit abc1234." in table
    rows = list(csv.DictReader((tmp_path / "runs/some_key/table.csv").open()))
    assert [(row["arm"], row["seed"]) for row in rows[:4]] == [
        ("one", "0"),
        ("one", "1"),
        ("one", "2"),
        ("two", "0"),
    ]
    assert float(rows[3]["lead"]) == pytest.approx(5)
    assert rows[0]["lead"] == ""


def test_seeds_can_be_kept_apart(command, tmp_path, capsys):
    assert command("--seeds=2", "--first_seed=100") == 0
    table = (tmp_path / "runs/some_key/table.md").read_text()
    assert "--seeds=2 --first_seed=100` at commit" in table
    rows = csv.DictReader((tmp_path / "runs/some_key/table.csv").open())
    assert {row["seed"] for row in rows} == {"100", "101"}


def test_the_figure_is_a_picture_and_its_points_a_file(command, tmp_path):
    command("--seeds=2")
    folder = tmp_path / "runs/some_key"
    with Image.open(folder / "figure.png") as image:
        assert np.asarray(image.convert("L")).std() > 5
    rows = list(csv.DictReader((folder / "figure.csv").open()))
    final = [row for row in rows if row["panel"] == "accuracy" and row["arm"] == "two"]
    assert [row["seed"] for row in final] == ["0", "1", ""]
    assert [float(row["x"]) for row in final] == pytest.approx([75, 76, 75.5])
    curve = [row for row in rows if row["panel"] == "by_tokens" and row["arm"] == "one"]
    assert [row["seed"] for row in curve] == ["0"] * 4 + ["1"] * 4 + [""] * 4  # last, the mean
    assert [float(row["x"]) for row in curve] == pytest.approx([0.001, 0.002, 0.003, 0.004] * 3)
    assert {float(row["y"]) for row in curve} == {50.0}


def role(raw, name):
    return {"role": name, "reward": float(raw > 0), "raw": raw}


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_every_panel_draws_what_there_is(make_outcome, tmp_path, num_seeds):
    tokens = [1e6 * step for step in range(100)]
    metrics = {"acc": 0.5, "reward": list(np.linspace(0.8, 1, 100)), "decoded_tokens": tokens}
    rollouts = {"step": 0, "responses": [role(1.0, "anchor"), role(-1.0, "hard negative")]}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rollouts) + "\n")
    metrics |= {"clip_rate_negative_answer": 0.1, "variance_ratio": 0.5}
    metrics |= {"held_out": {0: 0.1, 100: 0.5}, "final": {"acc": 0.5}, "workdir": tmp_path}
    arms = {
        arm: [make_outcome(arm, seed, **metrics) for seed in range(num_seeds)]
        for arm in ("one", "two")
    }
    write_figure(tmp_path, arms, "one", tuple(PANELS), "All of them")
    rows = list(csv.DictReader((tmp_path / "figure.csv").open()))
    assert {row["panel"] for row in rows} == set(PANELS)
    # One seed has no interval, nor has the one group of its rollouts.
    has_interval = {bool(row["low"] and row["high"]) for row in rows if not row["seed"]}
    assert has_interval == {num_seeds > 1}
    assert not any(row["low"] or row["high"] for row in rows if row["seed"])


def points_of(name, arms, reference="one"):
    axes = matplotlib.figure.Figure().subplots()
    points = panel_named(name)(axes, arms, reference)
    return points, " ".join(text.get_text() for text in axes.texts)


def test_a_metric_over_the_steps_is_a_mean_with_its_interval(make_outcome):
    """Rewards 0.2 and 0.4 of two seeds: 0.3 ± t(0.975, 1) · s/√2 = 12.7062 · 0.1."""
    arms = {"one": [make_outcome("one", seed, num_steps=2, reward=[0.2 + seed / 5, 1.0])
                    for seed in range(2)]}  # fmt: skip
    points, _ = points_of("reward_by_step", arms)
    found = [(each["seed"], each["x"]) for each in points]
    assert found == [(seed, x) for seed in (0, 1, None) for x in (0, 1)]
    assert [each["y"] for each in points] == pytest.approx([0.2, 1.0, 0.4, 1.0, 0.3, 1.0])
    assert points[0]["high"] is None
    assert points[4]["high"] - points[4]["y"] == pytest.approx(1.27062, rel=1e-5)


def test_a_bin_is_the_mean_of_the_steps_at_which_the_metric_is_defined(make_outcome):
    """Fifty steps in 25 bins; the first two are 1 and undefined, the next two both undefined."""
    reward = [1.0, None, None, None] + [3.0, 5.0] * 23
    points, _ = points_of(
        "reward_by_step", {"one": [make_outcome("one", num_steps=50, reward=reward)]}
    )
    of_seed, of_mean = ([each for each in points if each["seed"] is seed] for seed in (0, None))
    for drawn in (of_seed, of_mean):
        assert [(each["x"], each["y"]) for each in drawn[:2]] == [(0.5, 1.0), (4.5, 4.0)]
        assert len(drawn) == 24


def test_a_difference_by_step_is_to_the_reference_arm_of_the_same_seed(make_outcome):
    rates = {("one", 0): [0.3, 0.5], ("two", 0): [0.1, 0.1], ("two", 1): [0.0, 0.0]}
    arms = {}
    for (arm, seed), rate in rates.items():
        metrics = {"num_steps": 2, "acc": 0.5, "clip_rate_negative_answer": rate}
        arms.setdefault(arm, []).append(make_outcome(arm, seed, **metrics))
    points, text = points_of("clip_rate_difference", arms)
    assert {each["arm"] for each in points} == {"two"}
    found = [each["y"] for each in points if each["seed"] == 0]
    assert found == pytest.approx([-0.2, -0.4])
    assert text == "two not logged: run one with seed 1 too"


def test_an_arm_has_one_colour_in_all_panels(make_outcome):
    metrics = {"num_steps": 2, "acc": 0.5, "clip_rate_negative_answer": 0.1}
    arms = {arm: [make_outcome(arm, 0, **metrics)] for arm in ("one", "two")}
    colours = []
    for name in ("by_tokens", "clip_rate_difference"):
        axes = matplotlib.figure.Figure().subplots()
        panel_named(name)(axes, arms, "one")
        colours.append({line.get_label(): line.get_color() for line in axes.lines})
    assert colours[1] == {"two": colours[0]["two"]}


def test_held_out_accuracy_over_tokens(make_outcome):
    outcome = make_outcome(
        num_steps=4, held_out={0: 0.1, 2: 0.4}, decoded_tokens=[1e6, 3e6, 4e6, 9e6]
    )
    points, _ = points_of("held_out_by_tokens", {"one": [outcome]})
    assert [(each["x"], each["y"]) for each in points] == [(0, 10), (3, 40)] * 2


@pytest.mark.parametrize("panel", ["by_tokens", "reward_by_step", "held_out_by_tokens"])
def test_a_curve_says_that_an_arm_was_not_trained_and_draws_the_others(make_outcome, panel):
    metrics = dict.fromkeys(("acc", "reward", "decoded_tokens"), 0.5)
    one = make_outcome("one", num_steps=2, held_out={0: 0.1}, **metrics)
    points, text = points_of(panel, {"one": [one], "two": [make_outcome("two", num_steps=0)]})
    key = "set rl.eval_every above 0" if panel.startswith("held_out") else 'put "rl" into stages'
    assert f"two not logged: {key}" in text
    assert points and {each["arm"] for each in points} == {"one"}


def test_an_arm_without_rl_has_its_row_and_the_figure_says_so(write_experiment, runs, tmp_path):
    untrained = """config = with_arm(ARMS, arm)
    if arm.startswith("two"):
        config.stages = ("evaluate_start",)
    return config"""
    path = write_experiment(**{"return with_arm(ARMS, arm)": untrained})
    assert main([f"--experiment={path}", f"--workdir={tmp_path / 'runs'}", "--seeds=2"]) == 0
    folder = tmp_path / "runs/some_key"
    assert "| two | 2 | 50.5 ± 6.4 |" in (folder / "table.md").read_text()
    rows = list(csv.DictReader((folder / "figure.csv").open()))
    assert {row["arm"] for row in rows if row["panel"] == "accuracy"} == {"one", "two", "same"}
    assert {row["arm"] for row in rows if row["panel"] == "by_tokens"} == {"one", "same"}


def test_the_table_does_not_wait_for_the_figure(command, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError("no font")

    monkeypatch.setattr("experiments.sweep.__main__.write_figure", fail)
    with pytest.raises(OSError, match="no font"):
        command("--seeds=1")
    assert (tmp_path / "runs/some_key/table.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("panel", "message"),
    [
        ("held_out_by_tokens", "two not logged: set rl.eval_every above 0"),
        ("held_out_area", "two not logged: set rl.eval_every above 0"),
        ("anchor_buckets", "two not logged: set report.rollouts_megabytes above 0"),
        ("alpha_buckets", "two not logged: set report.rollouts_megabytes above 0"),
    ],
)
def test_a_panel_says_what_an_arm_lacks_and_draws_the_others(
    make_outcome, tmp_path, panel, message
):
    rollouts = {"step": 0, "responses": [role(1.0, "anchor"), role(-1.0, "hard negative")]}
    (tmp_path / "has").mkdir()
    (tmp_path / "has" / "rollouts.jsonl").write_text(json.dumps(rollouts) + "\n")
    one = make_outcome(
        "one", num_steps=2, held_out={0: 0.1, 2: 0.4}, decoded_tokens=9, workdir=tmp_path / "has"
    )
    two = make_outcome("two", num_steps=2, objective="grpo", workdir=tmp_path)
    points, text = points_of(panel, {"one": [one], "two": [two]})
    assert message in text
    assert points and {each["arm"].split()[0] for each in points} == {"one"}


def test_buckets_are_means_over_the_groups_of_all_seeds(make_outcome, tmp_path):
    """K' = 1: 0.8 and 1.0, an interval of 12.7062 · 0.1; K' = 2: 1.4 alone."""
    outcomes = []
    for seed, anchors in enumerate(((0.8, 1.4), (1.0,))):
        lines = [
            {"step": 0, "responses": [role(raw, "anchor")]
             + [role(-raw / count, "hard negative")] * count}
            for count, raw in enumerate(anchors, 1)
        ]  # fmt: skip
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        outcomes.append(make_outcome("one", seed, workdir=folder))
    points, _ = points_of("anchor_buckets", {"one": outcomes})
    assert [each["x"] for each in points] == pytest.approx([1, math.sqrt(2)])
    assert [each["y"] for each in points] == pytest.approx([0.9, 1.4])
    assert points[0]["high"] == pytest.approx(0.9 + 1.27062, rel=1e-5)
    assert points[1]["low"] is points[1]["high"] is None
    points, _ = points_of("negative_buckets", {"one": outcomes})
    assert [each["x"] for each in points] == pytest.approx([1, math.sqrt(0.5)])
    assert [each["y"] for each in points] == pytest.approx([-0.9, -0.7])
    points, _ = points_of("alpha_buckets", {"one": outcomes})
    measured = {each["x"]: each["y"] for each in points if each["arm"] == "one measured"}
    assert measured == pytest.approx({1: 0.9, 2: 1.4 / math.sqrt(2)})
    # Rewards 1 and 0: both formulas give 1.
    assert {each["y"] for each in points if each["arm"] in ("one text", "one appendix")} == {1.0}


def test_a_cell_says_that_rows_are_missing_and_the_command_which_key_to_set(
    command, tmp_path, capsys
):
    assert command("--seeds=2", "--columns=acc,held_out_area,rescue_gain@50:lead,acc:lead") == 0
    printed = capsys.readouterr().out
    assert "| one | 2 | 70.5 ± 6.4 | not logged | – | – |" in printed
    assert "| two | 2 | 75.5 ± 6.4 | not logged | not logged | 5.0 ± 0.0 |" in printed
    assert (
        "not logged: held_out_area of one, two, same; set rl.eval_every above 0, and data.test or "
        "evaluate.benchmarks." in printed
    )
    lead = "rescue_gain@50:lead"
    assert f"not logged: {lead} of two, same; set rl.num_steps above 50." in printed
    assert f"--seeds=2 --columns=acc,held_out_area,{lead},acc:lead` at commit" in printed
    rows = list(csv.DictReader((tmp_path / "runs/some_key/table.csv").open()))
    assert [rows[0][name] for name in ("held_out_area", lead)] == ["not logged", ""]


def test_a_seed_without_rows_is_counted_beside_the_others_mean(make_outcome, tmp_path):
    outcomes = [make_outcome("one", seed, held_out={0: acc} if acc else None)
                for seed, acc in enumerate((0.2, 0.4, None))]  # fmt: skip
    table = write_table(
        tmp_path, {"one": outcomes}, "one", columns_of(["held_out_area"], outcomes), "T", ()
    )
    assert "| one | 3 | 30.0 ± 127.1 (1 not logged) |" in table


def test_equal_tokens_are_those_of_the_arms_in_the_table(command, tmp_path):
    """Every run decodes 4000 tokens, at an accuracy of 50%."""
    command("--seeds=1", "--columns=shared_tokens,rollout_equal_tokens")
    rows = list(csv.DictReader((tmp_path / "runs/some_key/table.csv").open()))
    assert [float(rows[0][name]) for name in ("shared_tokens", "rollout_equal_tokens")] == (
        pytest.approx([0.004, 50])
    )


def test_a_panel_is_chosen_on_the_command_line(command, tmp_path):
    command("--seeds=1", "--panels=gain,by_tokens")
    rows = list(csv.DictReader((tmp_path / "runs/some_key/figure.csv").open()))
    assert {row["panel"] for row in rows} == {"gain", "by_tokens"}


def test_a_point_keeps_its_seed_where_the_reference_lacks_another(make_outcome, tmp_path):
    arms = {
        "one": [make_outcome("one", seed, acc=0.5) for seed in (1, 2)],
        "two": [make_outcome("two", seed, acc=0.5 + seed / 10) for seed in (0, 1, 2)],
    }
    write_figure(tmp_path, arms, "one", ("acc_at_50",), "A lead")
    rows = list(csv.DictReader((tmp_path / "figure.csv").open()))
    points = {row["seed"]: float(row["x"]) for row in rows if row["seed"]}
    assert points == pytest.approx({"1": 10, "2": 20})


def test_a_failed_run_ends_the_command_with_status_1_and_the_rest_is_tabulated(
    command, tmp_path, capsys
):
    assert command("--seeds=2", "--config.best_metric=two/seed_1") == 1
    said = capsys.readouterr()
    assert "two/seed_1 ended with status 1: error: too small" in said.err
    assert "| two | 1 | 75.0 | 25.0 | 5.0 |" in said.out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--seeds=0", "--seeds must be at least 1, got 0"),
        ("--first_seed=-1", "--first_seed must be at least 0, got -1"),
        ("--processes=0", "--processes must be at least 1, got 0"),
        ("--nothing=1", "expected flags of this command or --config.key=value, got '--nothing=1'"),
        ("--config.seed=3", "--config.seed is set by the sweep for each of its runs; leave it out"),
        ("--config.stages=()", "--config.stages is set by the sweep"),
        ("--config.rl.num_steps=9", "--config.rl.num_steps is given twice; leave one of them out"),
        ("--arms=one,four", "--arms of .* must be among one, two, same, got 'four'"),
        ("--reference=one,two", "--reference of .* must be among one, two, same, got 'one,two'"),
        ("--columns=acc,fun", "--columns of .* acc, .*<any of these>:lead.*, got 'fun'"),
        ("--panels=acc@2", "--panels of .* accuracy, .*, got 'acc@2'"),
        ("--base=huge", "'one@huge' names a base that is not in configs/: huge"),
    ],
)
def test_flags_that_cannot_be_are_refused(command, flag, message, capsys):
    with pytest.raises((SystemExit, ValueError)) as ended:
        command(flag, "--config.rl.num_steps=8")
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 2
    assert re.search(message, f"{ended.value}{capsys.readouterr().err}")


def test_some_of_the_arms_can_be_run(command, runs, tmp_path, capsys):
    command("--seeds=1", "--arms=one,two")
    assert "some_key: 2 arms x 1 seeds on tiny, 2 of 2 runs to do" in capsys.readouterr().out
    assert "--arms=one,two` at commit" in (tmp_path / "runs/some_key/table.md").read_text()
    began = len(runs)
    command("--seeds=1", "--arms=one")
    assert len(runs) == began


def test_a_lead_over_fewer_seeds_than_the_row_says_so(command, tmp_path):
    """The reference's run of the second seed fails."""
    command("--seeds=2", "--columns=acc,lead", "--config.best_metric=one/seed_1")
    text = (tmp_path / "runs/some_key/table.md").read_text()
    assert "| two | 2 | 75.5 ± 6.4 | 5.0 (1 not logged) |" in text
    assert "lead of two, same; run the arm that leads are over with the same seeds." in text


def test_without_the_reference_there_are_no_leads(command, tmp_path):
    command("--seeds=1", "--columns=acc,lead", "--panels=acc,acc:lead")
    table = tmp_path / "runs/some_key/table.md"
    assert "lead over one" in table.read_text() and "under the same seed" in table.read_text()
    command("--seeds=1", "--columns=acc,lead", "--panels=acc,acc:lead", "--arms=two,same")
    text = table.read_text()
    assert "lead over" not in text and "without runs of one there are no leads." in text
    assert "| two | 1 | 75.0 |" in text
    command("--seeds=1", "--columns=acc,lead", "--arms=two,same", "--reference=two")
    assert "lead over two" in table.read_text() and "--reference=two" in table.read_text()
