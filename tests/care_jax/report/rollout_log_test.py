"""rollouts.jsonl holds every response, stays within its size and resumes without repeats."""

import json

import numpy as np
import pytest
from sampled_group import CONTEXT, CUE, HOSTILE, REPAIR, RIGHT, WORDING, WRONG, make_sampled

from care_jax.report.rollout_log import RolloutLog

ROW = [{"acc": 1.0, "brief": 0.25}, {"acc": 0.0}, {}, {"acc": 1.0}, {"acc": 1.0}]


@pytest.fixture
def log(tmp_path):
    return RolloutLog(tmp_path, max_megabytes=64, wording=WORDING)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_response_stands_there_with_what_it_was_given(log):
    log.add(3, make_sampled(components=ROW))
    log.add(4, make_sampled(name="q1", repair=None))
    first, second = lines(log.path)
    assert (first["step"], first["id"], second["step"], second["id"]) == (3, "q0", 4, "q1")
    assert first["gold"] == "2" and first["outcome"] == "repaired"
    by_number = sorted(first["responses"], key=lambda response: response["number"])
    texts = [response["text"] for response in by_number]
    assert texts == [RIGHT, WRONG, HOSTILE, RIGHT + " ", CONTEXT + CUE + REPAIR]
    assert [response["components"] for response in by_number] == ROW
    assert [response["role"] for response in by_number] == [
        *("anchor", "hard negative", "hard negative", "unused", "reflected")
    ]
    sampled = make_sampled()
    for name, values in (("acc", sampled.scores.acc), ("advantage", sampled.advantage)):
        np.testing.assert_allclose([r[name] for r in by_number], values[0], rtol=1e-3)
    assert len(second["responses"]) == 4


def test_a_resumed_run_repeats_no_step_and_drops_half_a_line(log, tmp_path):
    for step in range(4):
        log.add(step, make_sampled())
    with log.path.open("ab") as file:
        file.write('{"step": 1, "id": "cut insidé'.encode()[:-1])
    again = RolloutLog(tmp_path, max_megabytes=64, wording=WORDING)
    again.begin(2)
    again.add(2, make_sampled())
    assert [line["step"] for line in lines(log.path)] == [0, 1, 2]


def test_a_response_with_line_separators_of_unicode_survives_a_resume(log, tmp_path):
    strange = "<think>one\u2028two\u0085three</think><answer>2</answer>"
    log.add(0, make_sampled(texts=(strange, WRONG, HOSTILE, RIGHT)))
    again = RolloutLog(tmp_path, max_megabytes=64, wording=WORDING)
    again.begin(1)
    (line,) = log.path.read_text(encoding="utf-8").split("\n")[:-1]
    assert strange in [response["text"] for response in json.loads(line)["responses"]]


def test_it_stays_within_its_size_and_keeps_the_last_steps(tmp_path):
    size = len(json.dumps({"step": 0})) + 3000
    log = RolloutLog(tmp_path, max_megabytes=10 * size / 2**20, wording=WORDING)
    for step in range(60):
        log.add(step, make_sampled())
    assert log.path.stat().st_size + log.former.stat().st_size < 12 * size
    steps = [line["step"] for path in (log.former, log.path) for line in lines(path)]
    assert steps == list(range(steps[0], 60)) and steps[0] > 0
    log.begin(steps[1])
    assert [line["step"] for line in lines(log.former)] == steps[:1] and not lines(log.path)


def test_nothing_is_written_without_room(tmp_path):
    log = RolloutLog(tmp_path, max_megabytes=0, wording=WORDING)
    log.begin(0)
    log.add(0, make_sampled())
    assert not list(tmp_path.iterdir())


def test_each_process_writes_the_prompts_it_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 3)
    log = RolloutLog(tmp_path, max_megabytes=1, wording=WORDING)
    log.add(0, make_sampled())
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts_3.jsonl"]
