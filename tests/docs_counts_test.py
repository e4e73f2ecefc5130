"""The scripts that counted what docs/experiments/ says of rollouts and sampled answers."""

import json
import pathlib
import re
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
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, SCRIPTS / script, tmp_path / "sweep" / "made", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr)
        return done.stdout.splitlines()

    return count


def test_outcomes_are_shares_of_the_groups_of_a_run(count):
    """Also of those in the older file, into which a long run moves what it has."""
    names = ("repaired", "all correct", "all correct", "mixed")
    groups = [{"outcome": name, "step": step} for step, name in enumerate(names)]
    files = {"rollouts.1.jsonl": groups[:2], "rollouts.jsonl": groups[2:]}
    files = {f"made/care/seed_3/{name}": rows for name, rows in files.items()}
    head, row = count("outcomes.py", files)
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
        group | {"step": 0, "responses": responses},
        group | {"step": 95, "responses": responses},
        missing | {"step": 99, "responses": [said("There are 4. To have 6 of them", 0.0)]},
        {
            "source": "readings/twice",
            "question": "Twice?",
            "gold": "8",
            "step": 99,
            "responses": [],
        },
    ]
    files = {"made/grpo/seed_0/rollouts.jsonl": groups}
    _, row = count("readings.py", files | {"made/grpo/seed_0/config.json": [{"data": {}}]})
    assert row == "grpo,0,0.800,0.750,0.333,1.000,1.000"


def test_readings_of_every_kind_count_where_every_kind_is_misread(count):
    """Of the steps given: two failures of three state the right count of its figure."""
    cases = (
        ("twice", "Twice?", "8", "There are 4."),
        ("difference", "With 2 fewer?", "2", "I have 4."),
        ("missing", "How many to 6?", "2", "There are 5."),
    )
    groups = [
        {
            "source": f"readings/{kind}",
            "question": question,
            "gold": gold,
            "step": 1,
            "responses": [{"text": text, "acc": 0.0, "role": "unused"}],
        }
        for kind, question, gold, text in cases
    ]
    files = {
        "made/care/seed_2/rollouts.jsonl": [
            groups[0] | {"step": 0},
            *groups,
            groups[0] | {"step": 5},
        ],
        "made/care/seed_2/config.json": [{"data": {"mixed_errors": True}}],
    }
    _, row = count("readings.py", files, "1:5")
    assert row == "care,2,1.000,0.667,0.000,0.000,0.667"


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


def test_samples_of_two_cold_starts_of_a_seed_or_of_other_questions_are_refused(count, tmp_path):
    row = {"id": "q", "source": "a", "acc": 1.0}  # of a single sample, which has no `accs`
    files = {f"cold_start/{name}/seed_1/samples_sft.jsonl": [row] for name in ("1aa", "9ff")}
    files |= {"made/care/seed_1/samples_rl.jsonl": [row]}
    with pytest.raises(ValueError, match="expected one cold start of seed 1, got another in"):
        count("samples.py", files, tmp_path)
    (tmp_path / "sweep" / "cold_start" / "9ff" / "seed_1" / "samples_sft.jsonl").unlink()
    files = {"made/care/seed_1/samples_rl.jsonl": [row | {"source": "b"}]}
    with pytest.raises(ValueError, match="the same questions of cold_start and care, got others"):
        count("samples.py", files, tmp_path)


def curve(arm, seed, *accs):
    return [f"held_out_by_tokens,{arm},{seed},{x}.0,{y},," for x, y in enumerate(accs)]


def compare(tmp_path, files, *arguments):
    for name, rows in files.items():
        text = "\n".join(["panel,arm,seed,x,y,low,high", *rows])
        (tmp_path / name).write_text(text)
    command = [sys.executable, SCRIPTS / "pairs.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_arms_of_two_figures_are_compared_at_the_tokens_that_both_have_decoded(tmp_path):
    """Seed 0: 70 at 1 token, against 60. Seed 1: 90 at 2 tokens, against 70."""
    files = {
        "a.csv": [*curve("one", 0, 50, 70, 99), *curve("two", 0, 50, 60), "acc,two,0,9.0,1,,"],
        "b.csv": [*curve("one", 1, 40, 50, 90, 95), *curve("one", "", 45, 60)],
        "c.csv": curve("two", 1, 40.05, 60, 70),
    }
    done = compare(tmp_path, files, "a.csv:one,b.csv:one", "a.csv:two,c.csv:two")
    assert done.stdout.splitlines() == [
        "seed,tokens,one,other,difference",
        "0,1.000,70.00,60.00,10.00",
        "1,2.000,90.00,70.00,20.00",
        "one leads by 15.0 ± 63.5, on 2 of 2 seeds",  # 12.706 · 7.071 / √2
    ]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("a.csv:one", "a.csv:none", "expected an arm of the panel held_out_by_tokens of a.csv"),
        ("a.csv:one", "b.csv:two", "expected one cold start of seed 0, got accuracies of"),
        ("a.csv:one", "b.csv:three", r"expected seeds in common, got \[0\] and \[1\]"),
        ("a.csv:one,a.csv:one", "b.csv:two", r"expected every seed once, got \[0\] again"),
    ],
)
def test_curves_that_cannot_be_paired_are_refused(tmp_path, first, second, message):
    files = {
        "a.csv": curve("one", 0, 50, 60),
        "b.csv": [*curve("two", 0, 50.2, 60), *curve("three", 1, 50, 60)],
    }
    done = compare(tmp_path, files, first, second)
    assert done.returncode == 1 and re.search(message, done.stderr)
