"""rollouts.jsonl holds every response; report.html shows a sample of it, within its size."""

import itertools
import json

import numpy as np
import pytest
from PIL import Image
from report_page import data_of
from sampled_group import CONTEXT, CUE, HOSTILE, REPAIR, RIGHT, WORDING, WRONG, make_sampled

from care_jax.report import drawing, pictures
from care_jax.report.drawing import next_to_go
from care_jax.report.report import Report

ROW = [{"acc": 1.0, "brief": 0.25}, {"acc": 0.0}, {}, {"acc": 1.0}, {"acc": 1.0}]


@pytest.fixture
def make_report(tmp_path):
    class Logged(Report):
        """Every step of it is logged."""

        def add(self, step, groups):
            return super().add(step, groups, is_logged=True)

    def make(**changes):
        settings = {
            **{"groups_per_step": 2, "max_megabytes": 4, "image_side": 64},
            "rollouts_megabytes": 64,
        }
        return Logged(tmp_path, wording=WORDING, **(settings | changes))

    return make


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_report_has_curves_and_groups_with_their_pictures(tmp_path, make_report):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "rl", "step": 0, "acc": 1}\n')
    made = make_report()
    made.add(0, make_sampled())
    made.add(3, make_sampled())
    data = data_of(tmp_path)
    assert data["stages"][0]["charts"][0]["title"] == "Accuracy"
    assert [*data["steps"]] == data["logged"] == [0, 3]
    (picture,) = data["steps"][3][0]["pictures"]
    assert picture.startswith("data:image/png")
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_the_page_shows_lines_of_the_log_with_their_pictures(tmp_path, make_report):
    """A group is rendered once; what other boards are sent is the same."""
    groups = make_sampled(components=ROW, question=f"<image>{HOSTILE} \u2028 é")
    (sent,) = make_report().add(2, groups)
    (shown,) = data_of(tmp_path)["groups"]
    (logged,) = lines(tmp_path / "rollouts.jsonl")
    assert shown == sent == logged | {"think_tag": "think", "pictures": shown["pictures"]}
    assert lines(tmp_path / "report.jsonl") == [{"step": 2}, shown]


def test_every_response_stands_there_with_what_it_was_given(tmp_path, make_report):
    made = make_report()
    made.add(3, make_sampled(components=ROW))
    made.add(4, make_sampled(name="q1", repair=None))
    first, second = lines(tmp_path / "rollouts.jsonl")
    assert (first["step"], first["id"], second["step"], second["id"]) == (3, "q0", 4, "q1")
    assert first["gold"] == "2" and first["outcome"] == "repaired"
    by_number = sorted(first["responses"], key=lambda response: response["number"])
    texts = [response["text"] for response in by_number]
    assert texts == [RIGHT, WRONG, HOSTILE, RIGHT + " ", CONTEXT + CUE + REPAIR]
    assert [response["components"] for response in by_number] == ROW
    assert [response["role"] for response in by_number] == [
        *("anchor", "hard negative", "hard negative", "unused", "reflected")
    ]
    groups = make_sampled()
    for name, values in (("acc", groups.scores.acc), ("advantage", groups.credit.advantage)):
        np.testing.assert_allclose([r[name] for r in by_number], values[0], rtol=1e-3)
    assert len(second["responses"]) == 4


def test_a_step_that_is_not_logged_is_in_the_log_alone(tmp_path, make_report):
    made = make_report()
    assert Report.add(made, 0, make_sampled(), is_logged=False) == []
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_a_resumed_report_equals_an_unbroken_one(tmp_path, make_report, monkeypatch):
    """Also after a kill inside a line, and of steps that were dropped for the size."""
    monkeypatch.setattr(drawing.time, "strftime", lambda *_: "now")
    changes = {"max_megabytes": 0.15}

    def add(made, steps):
        for step in steps:
            texts = (RIGHT, WRONG, "x" * 20_000, RIGHT)
            made.add(step, make_sampled(texts=texts, repair=None, name=f"q{step}"))

    add(make_report(**changes), range(12))
    files = [tmp_path / name for name in ("rollouts.jsonl", "report.jsonl", "report.html")]
    unbroken = [path.read_bytes() for path in files]
    assert 3 < len(data_of(tmp_path)["steps"]) < 10
    for path in files:
        path.unlink()
    add(make_report(**changes), range(9))
    for path in files[:2]:
        with path.open("ab") as file:
            file.write('{"step": 9, "id": "cut insidé'.encode()[:-1])
    made = make_report(**changes)
    made.begin(7)
    add(made, range(7, 12))
    assert [path.read_bytes() for path in files] == unbroken


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path, make_report):
    made = make_report()
    for step in range(5):
        made.add(step, make_sampled(name=f"q{step}"))
    made = make_report()
    made.begin(3)
    made.write()
    before = data_of(tmp_path)
    assert [*before["steps"]] == before["logged"] == [0, 1, 2]
    made.add(3, make_sampled(name="again"))
    data = data_of(tmp_path)
    assert data["logged"] == [0, 1, 2, 3] and data["groups"][:3] == before["groups"]
    assert data["steps"][3][0]["id"] == "again"
    assert [line["id"] for line in lines(tmp_path / "rollouts.jsonl")] == [
        "q0",
        "q1",
        "q2",
        "again",
    ]


def test_steps_of_processes_that_are_gone_are_dropped_too(tmp_path, make_report):
    """A resume may have fewer processes."""
    made = make_report()
    for step in range(4):
        made.add(step, make_sampled())
    for name in ("rollouts_1.jsonl", "rollouts_2.jsonl", "rollouts_2.1.jsonl"):
        (tmp_path / name).write_bytes((tmp_path / "rollouts.jsonl").read_bytes())
    make_report().begin(2)
    for path in tmp_path.glob("rollouts*.jsonl"):
        assert [line["step"] for line in lines(path)] == [0, 1], path


def test_a_response_with_line_separators_of_unicode_survives_a_resume(tmp_path, make_report):
    strange = "<think>one\u2028two\u0085three</think><answer>2</answer>"
    make_report().add(0, make_sampled(texts=(strange, WRONG, HOSTILE, RIGHT)))
    make_report().begin(1)
    (line,) = lines(tmp_path / "rollouts.jsonl")
    assert strange in [response["text"] for response in line["responses"]]


def test_a_stage_that_samples_nothing_keeps_what_is_there(tmp_path, make_report):
    make_report().add(0, make_sampled())
    (tmp_path / "metrics.jsonl").write_text('{"stage": "evaluate_rl", "step": 0, "acc": 1}\n')
    make_report().write()
    data = data_of(tmp_path)
    assert [*data["steps"]] == [0] and [stage["name"] for stage in data["stages"]] == [
        "evaluate_rl"
    ]


def test_a_damaged_line_is_named_and_left_out(tmp_path, make_report, capsys):
    for step in range(3):
        make_report().add(step, make_sampled())
    path = tmp_path / "report.jsonl"
    path.write_text(path.read_text().replace('{"step":1', '{"stp":1'))
    make_report().begin(3)
    told = capsys.readouterr().out
    assert told.startswith(f"{path}:3 is damaged (") and told.count("\n") == 2
    make_report().write()
    assert [*data_of(tmp_path)["steps"]] == [0, 2]


def test_a_crash_while_writing_leaves_the_last_state(tmp_path, make_report, monkeypatch):
    made = make_report()
    made.add(0, make_sampled())
    before = (tmp_path / "report.html").read_text()

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        made.add(1, make_sampled())
    assert (tmp_path / "report.html").read_text() == before


def long_texts(kilobytes):
    """Of a group of four, so many kilobytes in all."""
    return (RIGHT, WRONG, "x" * (kilobytes * 1024 - 200), RIGHT)


def test_the_file_stays_within_its_size_and_old_steps_go_first(tmp_path, make_report):
    made = make_report(max_megabytes=0.5)
    for step in range(30):
        made.add(step, make_sampled(texts=long_texts(40), repair=None, name=f"q{step}"))
        assert (tmp_path / "report.html").stat().st_size <= 0.5 * 2**20
    data = data_of(tmp_path)
    steps = [*data["steps"]]
    assert data["logged"] == list(range(30)) and data["max_megabytes"] == 0.5
    assert steps[0] == 0 and steps[-2:] == [28, 29] and 8 <= len(steps) <= 12
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 16
    assert lines(tmp_path / "rollouts.jsonl")[1]["step"] == 1  # which has them all


def test_a_step_that_is_too_large_alone_loses_groups_then_goes(tmp_path, make_report):
    made = make_report(max_megabytes=0.15)
    made.add(0, make_sampled(texts=long_texts(400), repair=None))
    assert data_of(tmp_path)["steps"] == {} and data_of(tmp_path)["logged"] == [0]
    assert (tmp_path / "report.html").stat().st_size <= 0.15 * 2**20


def test_thinning_takes_from_where_steps_lie_close_for_their_age():
    assert next_to_go([7]) == 7 and next_to_go([0, 1]) == 0
    assert next_to_go([0, 1, 2, 3, 4]) == 1
    assert next_to_go([0, 40, 80, 90, 91, 100]) == 90
    steps = []
    for step in range(1000):
        steps.append(step)
        if len(steps) > 20:
            steps.remove(next_to_go(steps))
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert steps[0] == 0 and steps[-3:] == [997, 998, 999]
    assert all(
        gap <= 1 + (999 - step) * 0.6 for step, gap in zip(steps[1:], gaps[1:], strict=False)
    )


def test_the_log_stays_within_its_size_and_keeps_the_last_steps(tmp_path, make_report):
    size = len(json.dumps({"step": 0})) + 3000
    made = make_report(rollouts_megabytes=10 * size / 2**20)
    path, former = tmp_path / "rollouts.jsonl", tmp_path / "rollouts.1.jsonl"
    for step in range(60):
        made.add(step, make_sampled())
    assert path.stat().st_size + former.stat().st_size < 12 * size
    steps = [line["step"] for file in (former, path) for line in lines(file)]
    assert steps == list(range(steps[0], 60)) and steps[0] > 0
    assert [*data_of(tmp_path)["steps"]] == list(range(60))  # the report keeps its own
    made.begin(steps[1])
    assert [line["step"] for line in lines(former)] == steps[:1] and not lines(path)


def test_no_rollouts_are_logged_without_room(tmp_path, make_report):
    made = make_report(rollouts_megabytes=0)
    made.begin(0)
    Report.add(made, 0, make_sampled(), is_logged=False)
    assert not list(tmp_path.iterdir())
    made.add(1, make_sampled())
    assert [*data_of(tmp_path)["steps"]] == [1] and not list(tmp_path.glob("rollouts*"))


def test_another_process_logs_the_prompts_it_decoded_and_writes_no_report(
    tmp_path, make_report, monkeypatch
):
    monkeypatch.setattr("jax.process_index", lambda: 3)
    made = make_report()
    made.begin(0)
    assert made.add(0, make_sampled()) == []
    made.write()
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts_3.jsonl"]


def test_a_picture_that_has_gone_stops_nothing(tmp_path, make_report):
    make_report().add(0, make_sampled(images=(tmp_path / "gone.png",)))
    assert data_of(tmp_path)["groups"][0]["pictures"] == [""]


def test_two_images_of_a_prompt_are_both_there(tmp_path, make_report):
    images = (Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue"))
    make_report().add(0, make_sampled(images=images))
    shown = data_of(tmp_path)["groups"][0]["pictures"]
    colors = [pictures.opened(uri).convert("RGB").getpixel((1, 1)) for uri in shown]
    assert colors == [(255, 0, 0), (0, 0, 255)]
