import itertools
import json

import pytest
from PIL import Image
from sampled_group import RIGHT, WORDING, WRONG, make_sampled

from care_jax.report import page, writer
from care_jax.report.writer import Report, next_to_go


@pytest.fixture
def make_report(tmp_path):
    def make(**changes):
        settings = {"max_megabytes": 4, "groups_per_step": 2, "max_side": 64} | changes
        return Report(tmp_path, wording=WORDING, **settings)

    return make


def data_of(tmp_path):
    return page.read((tmp_path / "report.html").read_text())


def steps_of(data):
    return [entry["step"] for entry in data["steps"]]


def test_a_report_has_curves_groups_and_each_picture_once(tmp_path, make_report):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "rl", "step": 0, "acc": 1}\n')
    report = make_report()
    report.add(0, make_sampled())
    report.add(3, make_sampled())
    data = data_of(tmp_path)
    assert data["stages"][0]["charts"][0]["title"] == "Accuracy"
    assert steps_of(data) == data["logged"] == [0, 3]
    assert list(data["pictures"]) == ["made/q0/0"]
    assert data["pictures"]["made/q0/0"].startswith("data:image/png")
    assert data["steps"][1]["groups"][0]["pictures"] == ["made/q0/0"]
    assert not (tmp_path / "report.html.partial").exists()


def test_what_is_added_comes_back_as_rows_for_other_boards(make_report, monkeypatch):
    report = make_report()
    (group,) = report.add(0, make_sampled(components=[{"acc": 1.0, "brief": 0.25}, *[{}] * 4]))
    assert (group.name, group.gold) == ("made q0", "2") and max(group.image.size) <= 64
    anchor, *_ = group.responses
    assert (anchor["role"], anchor["text"], anchor["acc"]) == ("anchor", RIGHT, 1.0)
    assert anchor["components"] == "acc 1.0, brief 0.25"
    assert WRONG in [response["text"] for response in group.responses]
    (group,) = report.add(1, make_sampled(images=()))
    assert group.image is None
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert make_report().add(0, make_sampled()) == []


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path, make_report):
    report = make_report()
    for step in range(5):
        report.add(step, make_sampled(name=f"q{step}"))
    report = make_report()
    report.begin(3)
    report.write()
    before = data_of(tmp_path)
    assert steps_of(before) == before["logged"] == [0, 1, 2]
    assert list(before["pictures"]) == ["made/q0/0", "made/q1/0", "made/q2/0"]
    report.add(3, make_sampled(name="again"))
    data = data_of(tmp_path)
    assert steps_of(data) == [0, 1, 2, 3] and data["steps"][:3] == before["steps"]
    assert data["steps"][3]["groups"][0]["id"] == "again"


def test_a_stage_that_samples_nothing_keeps_what_is_there(tmp_path, make_report):
    make_report().add(0, make_sampled())
    (tmp_path / "metrics.jsonl").write_text('{"stage": "evaluate_rl", "step": 0, "acc": 1}\n')
    Report(tmp_path, max_megabytes=4).write()
    data = data_of(tmp_path)
    assert steps_of(data) == [0] and [stage["name"] for stage in data["stages"]] == ["evaluate_rl"]


@pytest.mark.parametrize("content", ["", "<html>", '{"version": 1}', b"\xff\xfe"])
def test_a_file_that_is_no_report_is_begun_anew(tmp_path, make_report, content):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "report.html").write_bytes(content)
    make_report().add(0, make_sampled())
    assert steps_of(data_of(tmp_path)) == [0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version":1', '"version":1,,'),
        ('"logged":[0]', '"logged":null'),
        ('"steps":[{"step":0', '"steps":[{"stp":0'),
        ('"pictures":{"made', '"pictures":{"lost'),
    ],
)
def test_a_damaged_report_is_named_and_begun_anew(tmp_path, make_report, capsys, old, new):
    make_report().add(0, make_sampled())
    path = tmp_path / "report.html"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    report = make_report()
    told = capsys.readouterr().out
    assert told.startswith(f"{path} is damaged (") and told.count("\n") == 1
    report.add(1, make_sampled())
    assert steps_of(data_of(tmp_path)) == [1]


def test_a_report_in_another_layout_is_begun_anew(tmp_path, make_report, monkeypatch):
    make_report().add(0, make_sampled())
    monkeypatch.setattr(writer, "VERSION", writer.VERSION + 1)
    make_report().add(1, make_sampled())
    assert steps_of(data_of(tmp_path)) == [1]


def test_a_crash_while_writing_leaves_the_last_state(tmp_path, make_report, monkeypatch):
    report = make_report()
    report.add(0, make_sampled())
    before = (tmp_path / "report.html").read_text()

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        report.add(1, make_sampled())
    assert (tmp_path / "report.html").read_text() == before


def long_texts(kilobytes):
    """Of a group of four, so many kilobytes in all."""
    return (RIGHT, WRONG, "x" * (kilobytes * 1024 - 200), RIGHT)


def test_the_file_stays_within_its_size_and_old_steps_go_first(tmp_path, make_report):
    report = make_report(max_megabytes=0.5)
    for step in range(30):
        report.add(step, make_sampled(texts=long_texts(40), repair=None, name=f"q{step}"))
        assert (tmp_path / "report.html").stat().st_size <= 0.5 * 2**20
    data = data_of(tmp_path)
    steps = steps_of(data)
    assert data["logged"] == list(range(30)) and data["max_megabytes"] == 0.5
    assert steps[0] == 0 and steps[-2:] == [28, 29] and 8 <= len(steps) <= 11
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 16
    assert set(data["pictures"]) == {f"made/q{step}/0" for step in steps}


def test_a_step_that_is_too_large_alone_loses_groups_then_goes(tmp_path, make_report):
    report = make_report(max_megabytes=0.15)
    report.add(0, make_sampled(texts=long_texts(400), repair=None))
    assert data_of(tmp_path)["steps"] == [] and data_of(tmp_path)["logged"] == [0]
    assert (tmp_path / "report.html").stat().st_size <= 0.15 * 2**20


def test_thinning_takes_from_where_steps_lie_close_for_their_age():
    assert next_to_go([0, 1]) == 0
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


def test_a_picture_that_has_gone_stops_nothing(tmp_path, make_report):
    make_report().add(0, make_sampled(images=(tmp_path / "gone.png",)))
    assert data_of(tmp_path)["pictures"] == {"made/q0/0": ""}


def test_only_the_first_process_writes(tmp_path, make_report, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    report = make_report()
    report.begin(0)
    report.add(0, make_sampled())
    report.write()
    assert not (tmp_path / "report.html").exists()


def test_two_images_of_a_prompt_are_both_there(tmp_path, make_report):
    images = (Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue"))
    make_report().add(0, make_sampled(images=images))
    pictures = data_of(tmp_path)["pictures"]
    assert len(set(pictures.values())) == 2
    json.dumps(pictures)


def test_questions_of_one_id_keep_their_own_pictures(tmp_path, make_report):
    report = make_report()
    for step, color in enumerate(("red", "blue", "red")):
        report.add(step, make_sampled(images=(Image.new("RGB", (8, 8), color),)))
    data = data_of(tmp_path)
    shown = [data["pictures"][entry["groups"][0]["pictures"][0]] for entry in data["steps"]]
    assert shown[0] == shown[2] != shown[1] and len(data["pictures"]) == 2


def test_a_picture_that_has_gone_since_is_shown_as_it_was(tmp_path, make_report):
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(path)
    report = make_report()
    report.add(0, make_sampled(images=(path,)))
    path.unlink()
    report.add(1, make_sampled(images=(path,)))
    data = data_of(tmp_path)
    assert list(data["pictures"]) == ["made/q0/0"] and data["pictures"]["made/q0/0"]
