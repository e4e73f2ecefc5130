"""GSM8K and MATH: solutions become rationales, from JSON lines and parquet alike."""

import json

import pyarrow as pa
import pytest

from care_jax.batch import Unusable
from care_jax.data.readers import worked_math
from care_jax.data.sources import open_source

GSM8K = {
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many?",
    "answer": "In May 48/2 = <<48/2=24>>24 clips.\nTogether <<48+24=72>>72 clips.\n#### 1,072",
}
MATH = {
    "problem": "Let $f(x) = x^2$. What is $f(\\tfrac12)$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "First $\\boxed{\\text{no}}$. Then \\[f = \\boxed{\\frac{1}{4}}.\\]",
}
MATH_500 = {
    "problem": "Is it even?",
    "solution": "It is 3, so $\\boxed{\\text{no}}$.",
    "answer": "\\text{no}",
    "subject": "Number Theory",
    "level": 2,
    "unique_id": "test/number_theory/515.json",
}


def write_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_solution_of_gsm8k_is_the_rationale_without_calculator_notes(tmp_path):
    (row,) = worked_math.open_gsm8k(write_lines(tmp_path / "train.jsonl", GSM8K))
    assert (row.id, row.source, row.answer, row.images) == ("0", "gsm8k", "1,072", ())
    assert row.rationale == "In May 48/2 = 24 clips.\nTogether 72 clips."
    assert row.response == f"<think>{row.rationale}</think><answer>1,072</answer>"


def test_the_answer_of_math_is_the_last_box_or_given(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", MATH, MATH_500)
    one, other = worked_math.open_math(path, think_tag="reasoning")
    assert one.answer == "\\frac{1}{4}" and one.extra == {"level": "Level 1", "type": "Algebra"}
    assert one.response == (
        f"<reasoning>{MATH['solution']}</reasoning><answer>\\frac{{1}}{{4}}</answer>"
    )
    assert (other.id, other.answer) == ("test/number_theory/515.json", "\\text{no}")
    assert other.extra == {"subject": "Number Theory", "level": 2}


def test_a_release_in_parquet_has_its_splits_and_the_main_configuration(tmp_path, write_parquet):
    for config, split, row in (
        ("main", "train", GSM8K),
        ("main", "test", {**GSM8K, "question": "Held out?"}),
        ("socratic", "test", {**GSM8K, "question": "Socratic?"}),
    ):
        types = dict.fromkeys(row, pa.string())
        write_parquet(tmp_path / config / f"{split}-00000-of-00001.parquet", [row], types)
    (row,) = open_source("gsm8k", path=str(tmp_path), split="test")
    assert row.question == "Held out?" and row.id == "test-0"
    assert len(open_source("gsm8k", path=str(tmp_path), split="all")) == 2


def test_problems_that_a_release_has_again_by_subject_are_read_once(tmp_path, write_parquet):
    types = dict.fromkeys(MATH, pa.string())
    for folder in ("algebra", "data", "geometry"):
        for split in ("train", "test"):
            path = tmp_path / folder / f"{split}-00000-of-00001.parquet"
            write_parquet(path, [MATH | {"type": folder}], types)
    (row,) = open_source("math", path=str(tmp_path), split="test")
    assert row.extra["type"] == "data"


def test_a_folder_of_json_lines_has_a_file_for_each_split(tmp_path):
    write_lines(tmp_path / "train.jsonl", MATH)
    write_lines(tmp_path / "test.jsonl", MATH_500, MATH_500)
    assert len(open_source("math", path=str(tmp_path), split="test")) == 2
    with pytest.raises(ValueError, match=r"files of one split in .*, got test, train; set the"):
        open_source("math", path=str(tmp_path))
    every = open_source("math", path=str(tmp_path), split="all")
    both = [every[index].question for index in range(3)]
    assert both == [MATH_500["problem"]] * 2 + [MATH["problem"]]
    with pytest.raises(ValueError, match="expected parquet files of split 'dev'"):
        open_source("math", path=str(tmp_path), split="dev")


@pytest.mark.parametrize(
    ("open_rows", "row", "reason"),
    [
        (worked_math.open_gsm8k, GSM8K | {"answer": "It is 72."}, "no number after ####"),
        (worked_math.open_gsm8k, GSM8K | {"answer": "It is 72.\n#### "}, "no number after ####"),
        (worked_math.open_gsm8k, GSM8K | {"answer": 72}, "answer is not text"),
        (worked_math.open_gsm8k, GSM8K | {"question": " "}, "no question"),
        (worked_math.open_math, MATH | {"solution": "It is 4."}, "no boxed answer in the solution"),
        (worked_math.open_math, MATH | {"solution": "\\boxed{"}, "no boxed answer in the solution"),
        (worked_math.open_math, MATH | {"solution": None}, "solution is not text"),
    ],
)
def test_bad_rows_are_unusable(tmp_path, open_rows, row, reason):
    rows = open_rows(write_lines(tmp_path / "a.jsonl", row))
    with pytest.raises(Unusable, match=reason):
        _ = rows[0]
