"""Geometry3K: open questions from both releases, options and logic forms where they are."""

import json

import pytest

from care_jax.batch import Unusable
from care_jax.data.readers import geometry3k

ROWS = [("<image>Find x.", "4 \\sqrt { 2 }"), ("Find y.", "60"), ("<image><image>Find z.", "5")]


@pytest.fixture
def parquet(tmp_path, geometry3k_parquet):
    geometry3k_parquet(tmp_path / "hub", ROWS)
    geometry3k_parquet(tmp_path / "hub", ROWS[:1], split="validation")
    return str(tmp_path / "hub")


@pytest.fixture
def folder(tmp_path, picture):
    """InterGPS: train/<n>/data.json, logic_form.json, img_diagram.png."""

    def write(number, **changes):
        problem = tmp_path / "gps" / "train" / str(number)
        problem.mkdir(parents=True)
        row = {
            "problem_text": "Find x.",
            "choices": ["3", "4 \\sqrt { 2 }", "7", "9"],
            "precise_value": [3.0, 5.66, 7.0, 9.0],
            "compact_choices": ["3", "4\\sqrt{2}", "7", "9"],
            "answer": "B",
            "problem_type_graph": ["Triangle"],
        }
        (problem / "data.json").write_text(json.dumps(row | changes))
        forms = {"text_logic_form": ["Find(x)"], "diagram_logic_form": ["Equals(AB, 3)", "P(A)"]}
        (problem / "logic_form.json").write_text(json.dumps(forms))
        (problem / "img_diagram.png").write_bytes(picture(number))

    write(10)
    write(9, problem_text="Find y.")
    return str(tmp_path / "gps")


def test_parquet_rows_are_open_questions_with_placeholders_mended(parquet):
    rows = geometry3k.open_rows(parquet, split="train", subset="")
    assert [rows[i].question for i in (0, 1)] == ["<image>Find x.", "<image>Find y."]
    assert [rows[i].repair for i in (0, 1)] == ["", "placeholder put in front"]
    assert rows[0].answer == "4 \\sqrt { 2 }" and rows[0].choices == () and rows[0].id == "g0"
    with pytest.raises(Unusable, match="images and placeholders differ in number"):
        _ = rows[2]
    assert len(geometry3k.open_rows(parquet, split="val", subset="")) == 1


def test_parquet_rows_with_choices_are_answered_by_letters(parquet):
    row = geometry3k.open_rows(parquet, split="train", subset="choices")[1]
    assert row.answer == "B" and row.choices == ("1", "60", "7", "9")
    assert row.question == "<image>Find y.\n(A) 1\n(B) 60\n(C) 7\n(D) 9"


def test_folders_are_read_in_the_order_of_their_numbers(folder):
    rows = geometry3k.open_rows(folder, split="train", subset="")
    assert [rows[i].id for i in (0, 1)] == ["9", "10"]
    assert rows[1].question == "<image>Find x." and rows[1].answer == "4 \\sqrt { 2 }"


def test_folders_have_choices_and_logic_forms(folder):
    row = geometry3k.open_rows(folder, split="train", subset="choices")[1]
    assert row.answer == "B" and row.question.endswith("(C) 7\n(D) 9")
    row = geometry3k.open_rows(folder, split="train", subset="logic")[1]
    assert row.question == "<image>Find x.\nDiagram: Equals(AB, 3); P(A)"


UNUSABLE = {
    "letter": ("data.json", b'{"answer": "E", "choices": ["3"]}', "answer not among the choices"),
    "no letter": ("data.json", b'{"answer": 2, "choices": ["3"]}', "no answer"),
    "bytes": ("data.json", b'{"problem_text": "\xff"}', "not UTF-8"),
    "no forms": ("logic_form.json", None, r"logic_form\.json missing"),
}


@pytest.mark.parametrize(("file", "content", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_broken_problem_is_unusable(folder, tmp_path, file, content, reason):
    rows = geometry3k.open_rows(folder, split="train", subset="logic")
    path = tmp_path / "gps/train/9" / file
    path.write_bytes(content) if content else path.unlink()
    with pytest.raises(Unusable, match=reason):
        _ = rows[0]


REFUSED = [
    ("train", "logic", "subset 'logic' needs InterGPS's folders .*, got parquet files"),
    ("train", "hints", "geometry3k's subset must be one of .*, got 'hints'"),
    ("dev", "", "geometry3k's split must be one of train, val, test, got 'dev'"),
]


@pytest.mark.parametrize(("split", "subset", "message"), REFUSED)
def test_wrong_split_or_subset_is_refused(parquet, split, subset, message):
    with pytest.raises(ValueError, match=message):
        geometry3k.open_rows(parquet, split=split, subset=subset)
