"""The comparison behind a kill: every way in which a restart can be wrong is told."""

import json
import subprocess
import sys

import numpy as np
import psutil
import pytest

from perf.faults import killing, runs, soaking

METRICS = [
    {"stage": "sft", "step": 1, "loss": 2.5, "seconds": 3.0},
    {"stage": "rl", "step": 1, "loss": 0.5, "host/memory_gib": 1.0},
]


def write(workdir, lines=METRICS, sums=None):
    (workdir / "export").mkdir(parents=True, exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "export" / "sha256.json").write_text(json.dumps(sums or {"weights": "ab"}))
    return workdir


@pytest.fixture
def restarted(monkeypatch):
    """Makes every run end with these statuses, and leave what its workdir has already."""
    started = []

    def restarted(*statuses):
        class Ended:
            is_running = False

            def __init__(self, *args, **_):
                started.append(args)

            def finish(self):
                return list(statuses), "error: something"

        monkeypatch.setattr(killing, "Launched", Ended)
        return started

    return restarted


@pytest.mark.parametrize(
    ("lines", "sums", "problem"),
    [
        (METRICS, None, ""),
        ([METRICS[0] | {"seconds": 9.0}, METRICS[1] | {"host/memory_gib": 4.0}], None, ""),
        (METRICS[:1], None, "the lines are of other steps: [('sft', 1)]"),
        ([*METRICS, METRICS[1]], None, "the lines are of other steps"),
        ([METRICS[0], METRICS[1] | {"loss": 0.25}], None, "rl 1 differs in loss"),
        (METRICS, {"weights": "cd"}, "other weights were exported"),
    ],
)
def test_a_restart_must_end_like_the_unbroken_run(tmp_path, restarted, lines, sums, problem):
    restarted(0)
    whole = write(tmp_path / "whole")
    expected = runs.metrics(whole), runs.exported_sums(whole)
    case = killing.CASES[0]
    told = killing._restart(case, write(tmp_path / "killed", lines, sums), tmp_path, *expected)
    assert told.startswith(problem) and bool(told) == bool(problem)


def test_on_another_mesh_only_the_lines_and_the_end_count(tmp_path, restarted):
    started = restarted(0)
    whole = write(tmp_path / "whole")
    expected = runs.metrics(whole), runs.exported_sums(whole)
    (case,) = (case for case in killing.CASES if case.restart_devices)
    other = write(tmp_path / "killed", [METRICS[0], METRICS[1] | {"loss": 0.25}], {"weights": "cd"})
    assert killing._restart(case, other, tmp_path, *expected) == ""
    assert started[0][-1] == 2
    assert "of other steps" in killing._restart(
        case, write(other, METRICS[:1]), tmp_path, *expected
    )


def test_a_restart_that_fails_is_told_with_its_last_line(tmp_path, restarted):
    restarted(0, 1)
    told = killing._restart(killing.CASES[1], tmp_path, tmp_path, [], {})
    assert told == "the restart ended with [0, 1]: error: something"


def test_a_torn_line_is_an_error(tmp_path):
    write(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    with pytest.raises(ValueError, match="Unterminated"):
        runs.metrics(tmp_path)


def test_children_that_live_on_are_told(monkeypatch):
    monkeypatch.setattr(killing, "LEAVE", 0.2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert killing._left([psutil.Process(child.pid)]) == "1 workers lived on for 0.2 s"
    finally:
        child.kill()
        child.wait()
    assert killing._left([]) == ""


@pytest.mark.parametrize(
    ("late", "compiled", "used", "grown_rows"),
    [
        (1.02, False, 0.9, []),
        (1.2, False, 0.9, [0]),
        (1.02, True, -2.0, [3]),
        (1.2, True, 0.9, [0, 3]),
        (1.02, False, 1.4, [4]),
    ],
)
def test_what_grows_and_what_is_compiled_late_is_told(
    tmp_path, restarted, monkeypatch, late, compiled, used, grown_rows
):
    """`used`: MB per 1000 steps of a second, of which a day has 86,400."""
    restarted(0)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "jit_update-1-cache").write_text("")

    def finish(self, timeout):
        if compiled:
            (tmp_path / "cache" / "jit_update-2-cache").write_text("")
        return [0], ""

    monkeypatch.setattr(killing.Launched, "finish", finish)
    monkeypatch.setattr(soaking, "Launched", killing.Launched)
    usage = {"host/open_files": 30, "host/threads": 12}
    usage |= {"rollout_seconds": 0.25, "train_seconds": 0.75}
    noise = np.random.default_rng(0).normal(0, 0.001, 41)

    def used_at(step):  # as of every tenth step, at first with much that is bounded
        counted = step // 10 * 10
        megabytes = 500 + min(counted, 200) + used * counted / 1000 + noise[step // 10]
        return megabytes * 1e6 / 2**30

    lines = [
        {"stage": "rl", "step": step, "host/memory_gib": 1.0 if step <= 200 else late, **usage}
        | {"host/used_gib": used_at(step)}
        for step in range(1, 401)
    ]
    write(tmp_path / "soak", lines)
    rows, grown = soaking.run(400, tmp_path)
    assert rows[0] == f"memory_gib 1 at step 200, {late:.3g} at the end" and len(rows) == 5
    assert f", {used:+.2f} ± 0.00 MB per 1000 steps, {used * 86.4:+.0f} ± 0 MB in a day" in rows[4]
    assert rows[3] == f"1 programs compiled in the first half, {int(compiled)} in the second"
    assert grown == [rows[index] for index in grown_rows]


def test_what_a_run_says_last_is_told_also_after_much_else(tmp_path, monkeypatch):
    """More than a pipe holds."""
    script = "import sys; sys.stderr.write('x' * 200_000 + '\\nerror: at last\\n'); sys.exit(3)"
    real = subprocess.Popen

    def scripted(command, *, stderr, **_):
        return real([sys.executable, "-c", script], stderr=stderr)

    monkeypatch.setattr(runs.subprocess, "Popen", scripted)
    launched = runs.Launched(tmp_path / "run", {}, tmp_path / "cache")
    assert launched.finish(timeout=60) == ([3], "error: at last")
    assert not launched.is_running
