"""Benchmarks and the judge, around a scripted sampler."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from scripted_answers import ROWS, SAMPLED, benchmarked, samples_of

from care_jax.benchmarks.suite import BLANK
from care_jax.devices import distributed
from care_jax.report.accuracy import wilson_interval
from care_jax.stages import evaluate


def test_a_benchmark_is_scored_by_its_own_rules(benchmark_run, asked):
    run = benchmark_run()
    metrics = benchmarked(run)
    assert metrics["mathvision_testmini/acc"] == metrics["mean/acc"] == pytest.approx(3 / 5)
    assert metrics["mathvision_testmini/acc_low"] == wilson_interval(3, 5)[0]
    results = json.loads((run.workdir / "benchmarks_rl" / "results.json").read_text())
    figures = results["benchmarks"]["mathvision_testmini"]
    assert figures["categories"]["subject/a"]["acc"] == 1
    assert "judge" not in results
    assert "| 60.0 |" in (run.workdir / "benchmarks_rl" / "results.md").read_text()
    samples = samples_of(run)
    assert [sample["doc_id"] for sample in samples] == list(range(5))
    assert [sample["resps"] for sample in samples] == [[text] for text in asked[0]]
    assert [sample["filtered_resps"] for sample in samples] == [[x] for _, x, _ in ROWS]
    assert [sample["target"] for sample in samples] == ["0", "1", "2", "3", "4"]
    assert samples[2]["doc"]["question"] == samples[2]["input"] == "1? 1 1"


def test_benchmarks_count_the_mean_of_a_rows_samples(benchmark_run, asked):
    run = benchmark_run(**SAMPLED)
    metrics = benchmarked(run)
    assert metrics["mathvision_testmini/acc"] == metrics["mean/acc"] == pytest.approx(0.3)
    assert metrics["mathvision_testmini/pass@2"] == pytest.approx(3 / 5 * 5 / 6)
    assert samples_of(run)[0]["accs"] == [1, 0, 1, 0] and samples_of(run)[0]["acc"] == 0.5
    assert len(samples_of(run)[0]["resps"]) == len(samples_of(run)[0]["filtered_resps"]) == 4
    results = (run.workdir / "benchmarks_rl" / "results.md").read_text()
    assert "mathvision_testmini: pass@1 30.0, pass@2 50.0, pass@4 60.0" in results
    # Samples of another temperature are not believed.
    asked[1].clear()
    other = benchmark_run(**SAMPLED | {"evaluate.temperature": 0.8})
    benchmarked(other)
    assert asked[1][0]["asked"] == list(range(5))


def test_a_prompt_that_fits_no_bucket_counts_as_wrong(benchmark_run, release, asked, capsys):
    row = {"id": 9, "question": "1?" + " 1" * 300, "answer": "0", "subject": "c"}
    release.write_text(json.dumps(row) + "\n" + release.read_text())
    run = benchmark_run()
    metrics = benchmarked(run)
    assert metrics["mean/acc"] == pytest.approx(3 / 6)
    assert [sample["is_dropped"] for sample in samples_of(run)] == [True] + [False] * 5
    assert "1 of 6 prompts of mathvision_testmini fit no bucket" in capsys.readouterr().out


def test_images_of_one_colour_are_counted(benchmark_run, release, asked, capsys):
    first, *rest = release.read_text().splitlines()
    release.write_text("\n".join([json.dumps(json.loads(first) | {BLANK: 1}), *rest]) + "\n")
    benchmarked(benchmark_run())
    said = capsys.readouterr().out
    assert "1 of 5 questions of mathvision_testmini have an image of one colour" in said
    assert "mathvision_testmini has 5 rows, a partial download: 304 are published" in said


def test_the_judge_is_asked_about_wrong_free_answers_alone(benchmark_run, asked):
    """Two of five answers are wrong; the judge takes both."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "1"}}]}')

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    run = benchmark_run(**{"evaluate.judge_url": url, "evaluate.judge_model": "m"})
    benchmarked(run)
    server.shutdown()
    server.server_close()
    results = json.loads((run.workdir / "benchmarks_rl" / "results.json").read_text())
    figures = results["benchmarks"]["mathvision_testmini"]
    assert (figures["acc"], figures["acc_judged"]) == (pytest.approx(3 / 5), 1.0)
    assert results["judge"]["requests"] == len(seen) == 2
    assert all("Model's answer:\n9" in body["messages"][1]["content"] for body in seen)


def test_the_judge_is_asked_about_each_wrong_sample(benchmark_run, asked, monkeypatch):
    """It takes every second answer it is asked about, and right ones count without it."""
    seen = []

    def verdicts(self, cases):
        seen.extend(cases)
        return [number % 2 == 0 for number in range(len(cases))]

    monkeypatch.setattr(evaluate.Judge, "verdicts", verdicts)
    judge = {"evaluate.judge_url": "http://x", "evaluate.judge_model": "m"}
    run = benchmark_run(**SAMPLED | judge | {"evaluate.num_samples": 2})
    benchmarked(run)
    assert [case.answer for case in seen] == ["9"] * 7  # one of three questions, two of two
    figures = [(sample["acc"], sample["acc_judged"]) for sample in samples_of(run)]
    assert figures == [(0.5, 1.0), (0.0, 0.5), (0.5, 0.5), (0.5, 1.0), (0.0, 0.5)]


JUDGE = {"evaluate.judge_url": "http://x", "evaluate.judge_model": "m"}


@pytest.fixture
def words(monkeypatch):
    """What the judge says, in order, and what it is asked; None is a failure."""
    said, seen = [], []

    def verdicts(self, cases):
        seen.extend(case.gold for case in cases)
        found = [said.pop(0) for _ in cases]
        self.counts["failures"] += found.count(None)
        return found

    monkeypatch.setattr(evaluate.Judge, "verdicts", verdicts)
    return said, seen


def test_a_restart_asks_the_judge_only_for_the_verdicts_that_it_did_not_give(
    benchmark_run, asked, words, capsys
):
    said, seen = words
    run = benchmark_run(**JUDGE)
    said += [True, None]  # on questions 1 and 4
    benchmarked(run)
    assert [sample["acc_judged"] for sample in samples_of(run)] == [None, 1.0, None, None, None]
    told = capsys.readouterr().out
    assert "the judge gave no verdict on 1 answers (); run again with the same" in told
    said += [True, None]
    benchmarked(run, step=2)  # within a stage, which does not repeat it
    told = capsys.readouterr().out
    assert "the judge gave no verdict on 1 answers" in told and "run again" not in told
    for word, judged in ((None, None), (True, 1.0)):
        said.append(word)
        seen.clear()
        benchmarked(run)
        assert seen == ["4"] and samples_of(run)[4]["acc_judged"] == judged
    seen.clear()
    before = samples_of(run)
    benchmarked(run)
    assert not seen and samples_of(run) == before


def test_the_judges_of_all_processes_are_counted(benchmark_run, asked, words, monkeypatch, capsys):
    gather = distributed.gather_json

    def of_two(value):
        if value and isinstance(value, list) and "failures" in value[0]:  # no list of samples
            return [value, [value[0] | {"failures": 3}, 0.5, "503 busy"]]
        return gather(value)

    monkeypatch.setattr(distributed, "gather_json", of_two)
    words[0].extend([True, None])
    run = benchmark_run(**JUDGE)
    benchmarked(run)
    results = json.loads((run.workdir / "benchmarks_rl" / "results.json").read_text())
    assert (results["judge"]["failures"], results["judge"]["cost"]) == (4, 0.5)
    assert "the judge gave no verdict on 4 answers (503 busy)" in capsys.readouterr().out


def test_another_judge_changes_no_verdict_of_the_first(benchmark_run, asked, words):
    said, seen = words
    said += [True, False]
    first = benchmark_run(**JUDGE)
    benchmarked(first)
    before, decoded = samples_of(first), [list(call["asked"]) for call in asked[1]]
    for other in ({"evaluate.judge_model": "n"}, {"evaluate.judge_url": "http://y"}):
        said += [False, None]
        run = benchmark_run(**JUDGE | other)
        benchmarked(run)
        after = samples_of(run)
        assert [sample["acc_judged"] for sample in after] == [None, 0.0, None, None, None]
        for old, new in zip(before, after, strict=True):
            assert old.get("judges", {}).items() <= new.get("judges", {}).items()
        before = after
    benchmarked(benchmark_run())  # without a judge
    assert {sample["acc_judged"] for sample in samples_of(first)} == {None}
    seen.clear()
    benchmarked(first)
    assert [sample["acc_judged"] for sample in samples_of(first)] == [None, 1.0, None, None, 0.0]
    assert not seen
    # Nothing was decoded again.
    assert [call["asked"] for call in asked[1] if call["asked"]] == decoded
