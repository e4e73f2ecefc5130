"""Files of JSON lines: usable rows in order, the others left out and counted by reason."""

import dataclasses
import json

import pytest
from PIL import Image

from care_jax.batch import Unusable
from care_jax.data.readers import jsonl
from care_jax.data.rows import (
    NO_RESPONSE,
    NO_TEXT_LEFT,
    OUTSIDE,
    checked,
    with_responses,
    with_text_answers,
)

GOOD = {"id": "a", "question": "How many?", "answer": "3", "image": "ok.png"}


def load(path):
    return checked(jsonl.open_rows(str(path)), str(path))


@pytest.fixture
def write(tmp_path):
    """Writes rows (objects, or lines as they are) beside a few images."""
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    noise.save(tmp_path / "ok.png")
    noise.rotate(90).save(tmp_path / "two.jpg")
    for name in ("ok.png", "two.jpg"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / f"cut-{name}").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (401, 2)).save(tmp_path / "narrow.png")
    Image.new("1", (30_000, 200)).save(tmp_path / "large.png")
    Image.new("1", (19_999, 19_999)).save(tmp_path / "bomb.png")

    def write(*rows):
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"\n".join(lines))
        return path

    return write


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        ([GOOD], "not an object"),
        (GOOD | {"question": None}, "no question"),
        (GOOD | {"question": " "}, "no question"),
        (GOOD | {"question": 5}, "question of a wrong type"),
        (GOOD | {"answer": ""}, "no answer"),
        (GOOD | {"answer": "\u200b\ufeff "}, "no answer"),
        (GOOD | {"question": "\u2060"}, "no question"),
        (GOOD | {"answer": True}, "answer of a wrong type"),
        (GOOD | {"answer": float("nan")}, "answer is not a finite number"),
        (b'{"question": "?", "answer": 1e999}', "answer is not a finite number"),
        (GOOD | {"answer": [0, float("-inf")]}, "a number in the answer is not finite"),
        (GOOD | {"answer": {"x": [float("nan")]}}, "a number in the answer is not finite"),
        (GOOD | {"options": [1, float("nan")], "answer": "A"}, "a choice is not a finite number"),
        (GOOD | {"options": "AB"}, "choices of a wrong type"),
        (GOOD | {"options": [None]}, "choices of a wrong type"),
        (GOOD | {"options": ["x"] * 27}, "more than 26 choices"),
        (GOOD | {"options": ["1", "2"]}, "answer not among the choices"),
        (GOOD | {"question": "?" * 20_000}, "text too long"),
        (GOOD | {"image": "large.png"}, "image too large"),
        (GOOD | {"image": "bomb.png"}, "image too large"),
        (GOOD | {"image": 5}, "image of a wrong type"),
        (GOOD | {"images": ["ok.png"]}, "both image and images"),
        (GOOD | {"image": "gone.png"}, "image missing"),
        (GOOD | {"image": "text.png"}, "image unreadable or truncated"),
        (GOOD | {"image": "cut-ok.png"}, "image unreadable or truncated"),
        (GOOD | {"image": "cut-two.jpg"}, "image unreadable or truncated"),
        (GOOD | {"image": "narrow.png"}, "image too narrow"),
        (GOOD | {"question": "<image><image>?"}, "images and placeholders differ in number"),
        (
            {"question": "<image1>?", "answer": "1", "images": ["ok.png", "two.jpg"]},
            "images and placeholders differ in number",
        ),
        ({"question": "<image>?", "answer": "1"}, "images and placeholders differ in number"),
        (
            {"question": f"<image{'1' * 5000}>?", "answer": "1"},
            "images and placeholders differ in number",
        ),
        (GOOD | {"image": "../ok.png"}, OUTSIDE),
        (GOOD | {"image": "a/../../ok.png"}, OUTSIDE),
        (GOOD | {"image": "/etc/hostname"}, OUTSIDE),
        (GOOD | {"question": "<|image_pad|>?"}, "a special token in the text"),
        (GOOD | {"question": "\ud800?"}, "half a character in the text"),
        (GOOD | {"id": "\udc00"}, "half a character in the text"),
        (GOOD | {"context": "<think><|image_pad|>"}, "a special token in the text"),
        (GOOD | {"context": ["No."]}, "context of a wrong type"),
        (GOOD | {"size": [{"\ud800": 1}]}, "half a character in the text"),
    ],
)
def test_bad_row_is_left_out_and_counted(write, row, reason):
    examples, skipped = load(write(GOOD, row, GOOD | {"id": "b"}))
    assert [example.id for example in examples] == ["a", "b"]
    assert skipped == {reason: 1}


def test_row_becomes_an_example(write):
    row = {
        "id": 7,
        "question": "Which?\n<image>",
        "options": ["one", "2"],
        "answer": 2,
        "images": ["ok.png"],
        "rationale": "Count.",
        "units": "matter",
        "response": "<think>Count.</think><answer>4</answer>",
    }
    path = write(b"", row)
    (example,), skipped = load(path)
    assert not skipped
    assert example.id == "7"
    assert example.source == "rows"
    assert example.question == "Which?\n<image>\n(A) one\n(B) 2"
    assert example.choices == ("one", "2")
    assert example.answer == "2"
    assert example.images == (path.parent / "ok.png",)
    assert example.response == row["response"]
    assert example.rationale == "Count."
    assert example.units == "matter"
    assert example.extra == {}


def test_the_space_between_context_and_response_is_kept(write):
    given = {"context": " <think>5. Wait,\n", "response": " 4</think><answer>4</answer>\n"}
    (example, bare), _ = load(write(GOOD | given, GOOD | {"id": "b", "response": " 4 "}))
    assert example.context == "<think>5. Wait,\n"
    assert example.response == " 4</think><answer>4</answer>"
    assert (bare.context, bare.response) == ("", "4")


BOX = GOOD | {"id": "box", "answer": [0.5, 0, 4, 4], "size": [8, 8], "unit": None}


def test_unknown_fields_and_answers_that_are_no_texts_are_kept(write):
    examples, skipped = load(write(BOX, BOX | {"answer": {"x": 1}}, BOX | {"answer": []}))
    assert not skipped
    assert [example.answer for example in examples] == [[0.5, 0, 4, 4], {"x": 1}, []]
    assert [example.extra for example in examples] == [{"size": [8, 8], "unit": None}] * 3


def test_without_a_reward_function_answers_must_be_texts(write):
    """What the built-in verifier cannot compare is left out, and says what it needs."""
    rows = with_text_answers(jsonl.open_rows(str(write(GOOD, BOX))))
    examples, skipped = checked(rows, "rows")
    assert [example.id for example in examples] == ["a"]
    assert skipped == {"answer is a list or an object, which needs verifier.reward": 1}


@pytest.mark.parametrize("answer", ["$$", "\\left.\\right.", "\\boxed{}"])
def test_the_verifier_needs_an_answer_inside_the_marks(write, answer):
    """An empty gold answer would equal whatever has no text either."""
    examples, skipped = checked(
        with_text_answers(jsonl.open_rows(str(write(GOOD, GOOD | {"answer": answer})))), "rows"
    )
    assert len(examples) == 1 and skipped == {NO_TEXT_LEFT: 1}


@pytest.mark.parametrize("response", [None, "", " \n", "\u200b"])
def test_the_cold_start_leaves_rows_without_a_response_out(write, response):
    """Their target would be the end token alone."""
    taught = GOOD | {"response": "<think>x</think><answer>3</answer>"}
    rows = with_responses(jsonl.open_rows(str(write(taught, GOOD | {"response": response}))))
    examples, skipped = checked(rows, "rows")
    assert [example.response for example in examples] == [taught["response"]]
    assert skipped == {NO_RESPONSE: 1}


def test_image_paths_stay_below_the_folder_of_images_unless_told_otherwise(write, tmp_path):
    path = str(write(GOOD | {"image": "../ok.png"}, GOOD | {"image": f"{tmp_path}/ok.png"}))
    inner = tmp_path / "inner"
    inner.mkdir()
    assert checked(jsonl.open_rows(path), "rows")[1] == {OUTSIDE: 1}  # an absolute path below it
    with pytest.raises(ValueError, match=f"2 x {OUTSIDE}"):
        checked(jsonl.open_rows(path, images=str(inner)), "rows")
    rows = jsonl.open_rows(path, images=str(inner), images_outside=True)
    assert len(checked(rows, "rows")[0]) == 2


def test_rows_from_python_may_name_any_file(write, monkeypatch):
    folder = write().parent
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    (example,), _ = checked(jsonl.in_memory([GOOD | {"image": "../ok.png"}], "train"), "train")
    assert example.id == "a"


def test_half_a_character_from_python_is_left_out():
    rows = jsonl.in_memory([{"id": "\ud800", "question": "?", "answer": "1"}], "train")
    with pytest.raises(Unusable, match="half a character"):
        _ = rows[0]


def test_a_number_that_python_cannot_write_is_left_out():
    rows = jsonl.in_memory([{"question": "?", "answer": 10**5000}], "train")
    with pytest.raises(Unusable, match="text too long"):
        _ = rows[0]


def test_rows_from_python_are_those_of_a_file(write, monkeypatch):
    path = write(BOX, GOOD)
    monkeypatch.chdir(path.parent)
    rows = [BOX, GOOD]
    expected = [dataclasses.replace(example, source="train") for example in load(path)[0]]
    given = [jsonl.in_memory(kind, "train") for kind in (rows, iter(rows))]
    for found in given:
        assert [
            dataclasses.replace(example, images=expected[0].images)
            for example in checked(found, "")[0]
        ] == expected


def test_images_from_python_may_be_open_or_bytes(write):
    path = write()
    data = (path.parent / "ok.png").read_bytes()
    image = Image.open(path.parent / "ok.png")
    rows = [GOOD | {"image": image}, GOOD | {"image": None, "images": (data, image)}]
    found = jsonl.in_memory(rows, "train")
    assert found[0].images == (image,) and found[1].images == (data, image)


def test_a_row_from_python_that_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match="expected a mapping with question and answer as row 0 of"):
        _ = jsonl.in_memory([("q", "a")], "train")[0]


@pytest.mark.parametrize(
    ("question", "images", "expected", "order"),
    [
        ("Which?", ["ok.png", "two.jpg"], "<image><image>Which?", (0, 1)),
        ("Which?", [], "Which?", ()),
        ("<image2> or <image1>?", ["ok.png", "two.jpg"], "<image> or <image>?", (1, 0)),
        ("<image1> to <image2>?", ["ok.png"], "<image> to (picture 2)?", (0,)),
    ],
)
def test_placeholders_and_images_are_brought_together(write, question, images, expected, order):
    path = write({"question": question, "answer": "1", "images": images})
    (example,), _ = load(path)
    assert example.question == expected
    assert example.images == tuple(path.parent / images[i] for i in order)
    assert example.id == "1"


def test_file_without_a_usable_row_is_refused(write, tmp_path):
    with pytest.raises(ValueError, match=r"no row of .* can be used: 2 x not JSON"):
        load(write(b"{", b"}"))
    with pytest.raises(ValueError, match="can be used: it is empty"):
        load(write())
    with pytest.raises(ValueError, match=r"expected a file of JSON rows, got .*gone\.jsonl"):
        load(tmp_path / "gone.jsonl")


def test_whole_of_math_vision_testmini_can_be_used(shared):
    examples, skipped = load(shared / "data" / "mathvision_mini" / "testmini.jsonl")
    assert len(examples) == 304
    assert not skipped
    assert all(e.question.count("<image>") == len(e.images) == 1 for e in examples)
    by_id = {example.id: example for example in examples}
    assert by_id["27"].question.endswith("\n(E) $\\square, \\bullet, \\Delta$")
