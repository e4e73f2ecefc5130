"""`care-jax report` draws one page of the runs that it is given."""

import json
import sys

import pytest
from report_page import data_of

from care_jax import cli
from care_jax.commands import report


def write(workdir, acc, num_groups=3):
    workdir.mkdir(parents=True)
    (workdir / "metrics.jsonl").write_text(
        json.dumps({"stage": "rl", "step": 0, "acc": acc}) + "\n"
    )
    lines = [{"step": step} | group for step in range(num_groups) for group in ({}, group_of(step))]
    (workdir / "report.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


def group_of(step):
    return {"id": f"q{step}", "responses": [], "question": "x" * 10_000}


def pages_of(path):
    text = path.read_text()
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_two_runs_are_one_page(tmp_path, monkeypatch, capfd):
    folders = [write(tmp_path / name / "seed0", acc) for name, acc in (("a", 0.25), ("b", 0.5))]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["care-jax", "report", *map(str, folders)])
    for name in ("stdout", "stderr"):  # the command replaces them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    cli.main()
    assert capfd.readouterr().out == "report.html\n"
    data = pages_of(tmp_path / "report.html")
    assert [run["title"] for run in data["runs"]] == ["a/seed0", "b/seed0"]
    (chart,) = data["stages"][0]["charts"]
    assert [(each["run"], each["values"]) for each in chart["series"]] == [(0, [0.25]), (1, [0.5])]
    assert [[group["id"] for group in run["groups"]] for run in data["runs"]] == [
        ["q0", "q1", "q2"]
    ] * 2
    assert not (folders[0] / "report.html").exists()


def test_a_log_from_elsewhere_puts_no_markup_into_the_page(tmp_path):
    workdir = write(tmp_path / "a", 0.25)
    group = group_of(3) | {"step": 3, "question": "</script><h1>"}
    with (workdir / "report.jsonl").open("a") as file:
        file.write(f"{json.dumps({'step': 3})}\n{json.dumps(group)}\n")
    report.main([str(workdir)])
    assert "<h1>" not in (workdir / "report.html").read_text()
    assert data_of(workdir)["groups"][-1]["question"] == "</script><h1>"


def test_one_run_has_its_own_page_drawn_again(tmp_path, capsys):
    workdir = write(tmp_path / "a", 0.25)
    report.main([str(workdir)])
    assert capsys.readouterr().out == f"{workdir / 'report.html'}\n"
    data = data_of(workdir)
    assert data["title"] == "a" and data["logged"] == [0, 1, 2]


def test_the_runs_share_the_size_and_keep_what_they_have(tmp_path):
    folders = [write(tmp_path / name, 0, num_groups=30) for name in "abc"]
    before = [(folder / "report.jsonl").read_bytes() for folder in folders]
    path = tmp_path / "page.html"
    report.main([*map(str, folders), f"--out={path}", "--max_megabytes=0.4"])
    assert path.stat().st_size <= 0.4 * 2**20
    kept = [len(run["groups"]) for run in pages_of(path)["runs"]]
    assert len(set(kept)) == 1 and 5 < kept[0] < 15
    assert [(folder / "report.jsonl").read_bytes() for folder in folders] == before


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(SystemExit, match=f"error: {tmp_path} has no metrics.jsonl; give the"):
        report.main([str(tmp_path)])


def test_a_page_that_cannot_be_written_is_named(tmp_path):
    workdir = write(tmp_path / "a", 0)
    with pytest.raises(SystemExit, match=r"error: .*missing/x\.html"):
        report.main([str(workdir), f"--out={tmp_path}/missing/x.html"])


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("runs/a", "runs/b"), ["a", "b"]),
        (("x/a/0", "x/b/0"), ["a/0", "b/0"]),
        (("a", "a"), ["a", "a"]),
    ],
)
def test_titles_tell_the_folders_apart(tmp_path, names, shown):
    found = report.titles([tmp_path / name for name in names])
    assert found == shown
