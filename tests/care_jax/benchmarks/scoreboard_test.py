"""Figures of made samples, by hand."""

import json

import pytest
from PIL import Image

from care_jax.benchmarks import scoreboard
from care_jax.benchmarks.suite import Benchmark
from care_jax.report.accuracy import wilson_interval


@pytest.fixture
def benchmark(tmp_path):
    rows = [
        {"id": i, "question": "?", "answer": "1", "subject": subject, "level": 1, "image": "1.png"}
        for i, subject in enumerate("aabb")
    ]
    Image.new("RGB", (4, 4)).save(tmp_path / "1.png")
    (tmp_path / "testmini.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Benchmark("mathvision_testmini", tmp_path)


def sample(place, acc, **changes):
    flags = {"is_parsed": True, "is_complete": True, "is_dropped": False, "acc_judged": None}
    return {"doc_id": place, "acc": acc} | flags | changes


def test_accuracy_is_over_all_rows_and_by_category(benchmark):
    samples = [
        sample(3, 0.0, is_dropped=True, is_parsed=False, is_complete=False),
        sample(1, 1.0),
        sample(0, 1.0, is_complete=False),
        sample(2, 0.0, is_parsed=False),
    ]
    figures = scoreboard.score(samples, benchmark.categories)
    assert (figures["acc"], figures["num_rows"]) == (0.5, 4)
    assert (figures["acc_low"], figures["acc_high"]) == wilson_interval(2, 4)
    names = ("num_unparsable", "num_truncated", "num_dropped")
    assert [figures[name] for name in names] == [1, 1, 1]
    accs = {group: values["acc"] for group, values in figures["categories"].items()}
    assert accs == {"subject/a": 1.0, "subject/b": 0.0, "level/1": 0.5}
    assert "acc_judged" not in figures


def test_the_judge_adds_to_what_the_rules_found(benchmark):
    samples = [sample(0, 1.0), sample(1, 0.0, acc_judged=1.0), sample(2, 0.0, acc_judged=0.0)]
    figures = scoreboard.score([*samples, sample(3, 0.0)], benchmark.categories)
    assert (figures["acc"], figures["acc_judged"]) == (0.25, 0.5)


def test_the_mean_counts_benchmarks_alike_and_no_part_twice():
    scores = {
        "mmmu": {"acc": 0.5, "acc_low": 0.44, "acc_high": 0.58},
        "mathvista": {"acc": 0.7, "acc_low": 0.62, "acc_high": 0.76},
        "mathvision_testmini": {"acc": 0.0, "acc_low": 0.0, "acc_high": 0.1},
    }
    macro = scoreboard.macro_average(scores)
    assert macro["benchmarks"] == ["mmmu", "mathvista"]
    # sqrt(0.06² + 0.08²) / 2 = 0.05 on either side.
    assert macro["acc"] == pytest.approx(0.6)
    assert (macro["acc_low"], macro["acc_high"]) == pytest.approx((0.55, 0.65))
    alone = scoreboard.macro_average({"mathvision_testmini": scores["mathvision_testmini"]})
    assert (alone["acc"], alone["acc_high"]) == (0.0, 0.1)


def test_the_tables_hold_the_figures(benchmark):
    figures = scoreboard.score([sample(i, float(i < 3)) for i in range(4)], benchmark.categories)
    scores = {"mathvision_testmini": figures}
    text = scoreboard.to_markdown({"benchmarks": scores, "macro": scoreboard.macro_average(scores)})
    assert "| mathvision_testmini | 75.0 | 30.1 to 95.4 | 4 | 0 | 0 | 0 |" in text
    assert "| mean of 1 | 75.0 |" in text
    assert "| subject/b | 50.0 |" in text
