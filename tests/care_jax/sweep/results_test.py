"""The command as a whole: what it prints, the files it writes, what it refuses."""

import csv

import numpy as np
import pytest
from PIL import Image

from care_jax.sweep.__main__ import main
from care_jax.sweep.figures import PANELS, write_figure


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
    assert [float(row["x"]) for row in curve] == pytest.approx([0.001, 0.002, 0.003, 0.004])
    assert {float(row["y"]) for row in curve} == {50.0}


def test_every_panel_draws_what_there_is(make_outcome, tmp_path):
    alpha = list(np.linspace(0.8, 1, 100))
    metrics = {
        "acc": 0.5,
        "rescue_rate": 0.1,
        "kl_old": 0.1,
        "decoded_tokens": [1e6 * step for step in range(100)],
        "signature/alpha": alpha,
        "signature/ratio": alpha,
        "signature/anchor_1": alpha,
        "signature/anchor_4": [2 * each for each in alpha],
        "signature/negative_1": [-each for each in alpha],
        "signature/negative_4": [-each / 2 for each in alpha],
    }
    arms = {
        arm: [make_outcome(arm, seed, final={"acc": 0.5}, **metrics) for seed in range(2)]
        for arm in ("one", "two")
    }
    write_figure(tmp_path, arms, "one", tuple(PANELS), "All of them")
    rows = list(csv.DictReader((tmp_path / "figure.csv").open()))
    assert {row["panel"] for row in rows} == set(PANELS)
    assert len([row for row in rows if row["panel"] == "alpha"]) == 2 * 2 * 100


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
    assert command("--seeds=2", "--config.fail=two/seed_1") == 1
    said = capsys.readouterr()
    assert "two/seed_1 ended with status 1: error: too small" in said.err
    assert "| two | 1 | 75.0 | 25.0 | 5.0 |" in said.out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--seeds=0", "--seeds must be at least 1, got 0"),
        ("--processes=0", "--processes must be at least 1, got 0"),
        ("--nothing=1", "expected flags of this command or --config.key=value, got '--nothing=1'"),
        ("--config.seed=3", "--config.seed is set by the sweep for each of its runs; leave it out"),
        ("--config.stages=()", "--config.stages is set by the sweep"),
    ],
)
def test_flags_that_cannot_be_are_refused(command, flag, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command(flag)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_base_that_is_not_there_is_refused(command):
    with pytest.raises(ValueError, match="'one@huge' names a base that is not in configs/: huge"):
        command("--base=huge")
