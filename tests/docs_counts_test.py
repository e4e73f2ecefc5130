"""The scripts that counted what docs/experiments.md says of rollouts and sampled answers."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "experiments"


@pytest.fixture
def count(tmp_path):
    """Writes files of JSON lines into a sweep's folder, runs a script on it; what it prints."""

    def count(script, files, *arguments):
        for name, rows in files.items():
            path = tmp_path / "sweep" / name
            path.parent.mkdir(parents=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, SCRIPTS / script, tmp_path / "sweep" / "made", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return count


def test_outcomes_are_shares_of_the_groups_of_a_run(count):
    groups = [{"outcome": name} for name in ("repaired", "all correct", "all correct", "mixed")]
    head, row = count("outcomes.py", {"made/care/seed_3/rollouts.jsonl": groups})
    found = dict(zip(head.split(","), row.split(","), strict=True))
    assert (found["arm"], found["seed"], found["groups"]) == ("care", "3", "4")
    shares = {name: share for name, share in found.items() if "." in share and float(share)}
    assert shares == {"repaired": "0.2500", "all correct": "0.5000", "mixed": "0.2500"}


def test_readings_are_compared_with_what_the_figure_has(count):
    """Four circles and 2 more: the reading is 4. Repairs, and kinds not misread, do not count."""

    def said(text, acc, role="unused"):
        return {"text": text, "acc": acc, "role": role}

    responses = [
        said("There are 4. Add 2.", 1.0),
        said("There are 4. Add 2.", 0.0),
        said("I have 3, no, there are 5.", 1.0),
        said("Add 2.", 1.0),
        said("There are 4.", 1.0, "reflected"),
    ]
    group = {"source": "readings/sum", "question": "With 2 more?", "gold": "6"}
    missing = {"source": "readings/missing", "question": "How many to 6?", "gold": "2"}
    groups = [
        group | {"step": 94, "responses": responses},
        group | {"step": 95, "responses": responses},
        missing | {"step": 99, "responses": [said("There are 4.", 0.0)]},
        {
            "source": "readings/twice",
            "question": "Twice?",
            "gold": "8",
            "step": 99,
            "responses": [],
        },
    ]
    _, row = count("readings.py", {"made/grpo/seed_0/rollouts.jsonl": groups})
    assert row == "grpo,0,0.800,0.750,0.333,1.000"


def test_samples_are_counted_by_kind_and_compared_over_the_same_questions(count, tmp_path):
    def answers(*accs):
        return [
            {"id": f"q{i}", "source": "ab"[i % 2], "acc": sum(each) / 2, "accs": each}
            for i, each in enumerate(accs)
        ]

    files = {
        "cold_start/4af/seed_1/samples_sft.jsonl": answers([1, 0], [0, 0], [0, 0]),
        "made/care/seed_1/samples_rl.jsonl": answers([1, 1], [0, 0], [1, 0]),
        "made/care/seed_2/samples_rl.jsonl": answers([1, 1], [1, 1], [1, 1]),
    }
    count("samples.py", files, tmp_path)
    assert (tmp_path / "by_kind.csv").read_text().splitlines()[:7] == [
        "arm,seed,kind,right,any_right,questions",
        "cold_start,1,all,0.1667,0.3333,3",
        "cold_start,1,a,0.2500,0.5000,2",
        "cold_start,1,b,0.0000,0.0000,1",
        "care,1,all,0.5000,0.6667,3",
        "care,1,a,0.7500,1.0000,2",
        "care,1,b,0.0000,0.0000,1",
    ]
    # Differences 0.5, 0, 0.5: mean 1/3, s = 0.2887, 1.96 s/√3 = 0.3267.
    head, right, any_right = (tmp_path / "paired.csv").read_text().splitlines()
    assert head == "arm,over,seed,measure,difference,low,high,questions"
    assert right == "care,cold_start,1,right,0.3333,0.0067,0.6600,3"
    assert any_right.startswith("care,cold_start,1,any_right,0.3333,")
