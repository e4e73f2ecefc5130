"""Files of JSON lines: usable rows in order, the others left out and counted by reason."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
from PIL import Image

from care_jax.batch import Unusable
from care_jax.data.readers import jsonl
from care_jax.data.rows import (
    CONTEXT_ALONE,
    NO_ANSWER_TAGS,
    NO_RESPONSE,
    NO_TEXT_LEFT,
    NO_THINK_TAGS,
    NOT_TEXT,
    OTHER_ANSWER,
    OTHER_TAG,
    OUTSIDE,
    checked,
    with_responses,
    with_text_answers,
)
from care_jax.data.sources import open_source
from care_jax.data.texts import IMAGE_IN_MESSAGE, TAGS_IN_ANSWER

tagged_responses = functools.partial(
    with_responses, instruction="<{tag}> and <answer>", are_right=True
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
    data = (tmp_path / "ok.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])

    def write(*rows):
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"\n".join(lines))
        return path

    return write


THREE = "<think>x</think><answer>3</answer>"
TEXT = {"question": "How many?", "answer": "3"}
NAN = float("nan")
INTEGER = "an integer answer to choices may count from 0 or 1"
BASE64 = "image in base64, which is not read; save it as a file"
USER = {"role": "user"}
INSIDE_URL = [{"type": "image_url", "image_url": {"url": "https://a.org/b.png"}}]
OUTSIDE_PART = [{"type": "image", "image": "file:///etc/hostname"}]
PARTS = [{"type": "image"}, {"type": "text", "text": "How many?"}]
TWO = {"image": None, "images": ["ok.png", "two.jpg"]}
DIFFER = "images and placeholders differ in number"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": None}, "no question"),
        ({"question": "\u2060 "}, "no question"),
        ({"question": 5}, "question is not text"),
        ({"answer": "\u200b\ufeff "}, "no answer"),
        ({"answer": True}, "answer is neither text nor a number"),
        ({"answer": NAN}, "answer is not a finite number"),
        ({"answer": [0, float("-inf")]}, "a number in the answer is not finite"),
        ({"answer": {"x": [NAN]}}, "a number in the answer is not finite"),
        ({"options": [1, NAN], "answer": "A"}, "a choice is not a finite number"),
        ({"options": "AB"}, "choices are not a list of texts and numbers"),
        ({"options": [None]}, "choices are not a list of texts and numbers"),
        ({"options": ["x"] * 27}, "more than 26 choices"),
        ({"options": ["1", "2"]}, "answer not among the choices"),
        ({"options": ["2", "3", "1"], "answer": 1}, INTEGER),
        ({"options": [2, 3, 1], "answer": 3.0}, INTEGER),
        ({"options": ["2", "3"], "answer": 0}, INTEGER),
        ({"options": ["12", "15"], "answer": 14}, "answer not among the choices"),
        ({"options": "A. 2\nC. 3"}, "choices are not a list of texts and numbers"),
        ({"options": {"A": "2", "C": "3"}}, "choices are not a list of texts and numbers"),
        ({"options": "['\\frac12', '3']"}, "choices are not a list of texts and numbers"),
        ({"options": "[" * 9_000}, "choices are not a list of texts and numbers"),
        ({"answer": "<answer></answer>"}, "no answer"),
        ({"answer": "<answer>3</answer> or <answer>4</answer>"}, TAGS_IN_ANSWER),
        ({"answer": "<answer>3"}, TAGS_IN_ANSWER),
        ({"answer": "<think>3</think>"}, TAGS_IN_ANSWER),
        ({"question": "<img1>?"}, "a placeholder that is not read; write <image>"),
        ({"question": "<image>a</image>?"}, "a placeholder that is not read; write <image>"),
        ({"question": "Which?", "options": ["<IMG src=a>", "3"]}, "a placeholder that is not"),
        ({"question": [{"role": "system", "content": "?"}]}, "messages without one of the user"),
        ({"question": [USER | {"content": [{"type": "video"}]}]}, "a part of a message is neither"),
        ({"question": [USER | {"content": None}]}, "no question"),
        ({"question": [USER | {"content": PARTS}], "image": None}, IMAGE_IN_MESSAGE),
        ({"question": [USER | {"content": INSIDE_URL}], "image": None}, "image is a URL, which"),
        ({"question": [USER | {"content": OUTSIDE_PART}], "image": None}, OUTSIDE),
        ({"context": "Cats sleep."}, CONTEXT_ALONE),
        ({"image": "iVBORw0KGgoAAAANS" + "A" * 5_000}, BASE64),
        ({"image": "/9j/4AAQSkZJRg" + "Ab/" * 300}, BASE64),
        ({"image": '["ok.png"]'}, "images are a list written as text; write a list"),
        ({"question": "?" * 20_000}, "text too long"),
        ({"response": "?" * 70_000}, "text too long"),
        ({"image": 5}, "image is neither a path nor bytes"),
        ({"images": ["ok.png"]}, "both image and images"),
        ({"image": "gone.png"}, "image missing"),
        ({"image": "cut.png"}, "image unreadable or truncated"),
        ({"question": "<image><image>?"}, DIFFER),
        ({"question": "<image1>?", **TWO}, DIFFER),
        ({"question": f"<image{'1' * 5000}>?", **TWO}, DIFFER),
        ({"image": "a/../../ok.png"}, OUTSIDE),
        ({"image": "/etc/hostname"}, OUTSIDE),
        ({"question": "<|image_pad|>?"}, "a special token in the text"),
        ({"context": "<think><|image_pad|>", "response": "x"}, "a special token in the text"),
        ({"context": ["No."]}, "context is not text"),
        ({"units": "cm"}, 'units is neither empty nor "matter"'),
    ],
)
def test_bad_row_is_left_out_and_counted(write, change, reason):
    examples, skipped = load(write(GOOD, GOOD | change, GOOD | {"id": "b"}))
    assert [example.id for example in examples] == ["a", "b"]
    assert [(each[: len(reason)], count) for each, count in skipped.items()] == [(reason, 1)]


def test_what_was_found_is_told(write):
    with pytest.raises(ValueError, match=r"units is neither .* \(first is row 1: 'cm'\)"):
        load(write(GOOD | {"units": "cm"}))


@pytest.mark.parametrize(
    "answer", ["<think>It is 4.</think>\n<ANSWER> 3 </ANSWER>", "<answer>3</answer>", "3 "]
)
def test_an_answer_in_tags_is_what_they_hold(write, answer):
    assert load(write(GOOD | {"answer": answer}))[0][0].answer == "3"


TURNS = [{"role": "system", "content": "Be brief."}, USER | {"content": "Hello"}]


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        ([*TURNS, USER | {"content": "How many <image>?"}], "How many <image>?"),
        ([*TURNS, USER | {"content": PARTS}, {"role": "assistant"}], "<image>How many?"),
        ([{"from": "human", "value": "How many?"}], "<image>How many?"),
    ],
)
def test_of_messages_the_last_of_the_user_is_the_question(write, messages, question):
    assert load(write(GOOD | {"question": messages}))[0][0].question == question


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "two.jpg"},
        {"type": "image", "path": "file://two.jpg"},
        {"type": "image_url", "image_url": {"url": "two.jpg"}},
        {"type": "image_url", "image_url": "two.jpg"},
    ],
)
def test_an_image_may_be_in_its_message(write, part):
    chat = [USER | {"content": [PARTS[1], part]}]
    (example,), _ = load(write({"messages": chat, "answer": "3"}))
    assert example.question == "How many?<image>" and example.images[0].name == "two.jpg"
    (example,), _ = load(write({"messages": chat, "answer": "3", "image": "ok.png"}))
    assert [image.name for image in example.images] == ["ok.png"]


@pytest.mark.parametrize(
    "options",
    [
        "['30', \"45\"]",
        '["30", 45]',
        {"B": "45", "A": "30", "C": None},
        "A. 30\n\n B. 45 ",
        ["A. 30", "(B) 45"],
    ],
)
def test_choices_may_be_written_in_several_ways(write, options):
    (example,), _ = load(write(GOOD | {"options": options, "answer": "B"}))
    assert example.choices == ("30", "45") and example.question.endswith("(A) 30\n(B) 45")


@pytest.mark.parametrize("mark", ["<image_1>", "<image-1>", "<IMAGE>", "<image/>", "<image 1/>"])
def test_a_placeholder_may_be_spelled_in_several_ways(write, mark):
    assert load(write(GOOD | {"question": f"In {mark}?"}))[0][0].question == "In <image>?"


def test_row_becomes_an_example(write):
    row = {
        "id": 7,
        "question": "Which?\n<image>",
        "options": ["one", "2"],
        "answer": "2",
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


@pytest.mark.parametrize(
    ("answer", "options"),
    [("AC", ["1", "2", "3"]), ("A and C", ["1", "2", "3"]), ("45", ["$45^\\circ$", "30"]),
     ("0.5", ["1/2", "2"]), ("5", ["5 cm", "6 cm"])],
)  # fmt: skip
def test_an_answer_that_the_verifier_can_judge_names_a_choice(write, answer, options):
    examples, skipped = load(write(GOOD, GOOD | {"id": "b", "options": options, "answer": answer}))
    assert [example.id for example in examples] == ["a", "b"] and not skipped


@pytest.mark.parametrize("image", [None, "", [], [None], {"path": ""}])
def test_a_row_without_an_image_is_a_question_in_text(write, image):
    (example,), skipped = load(write(b"", GOOD | {"image": image}))
    assert not skipped and not example.images and "<image>" not in example.question


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


@pytest.mark.parametrize(
    ("only", "change", "reason"),
    [
        (with_text_answers, {"answer": [0, 1]}, NOT_TEXT),
        (with_text_answers, {"answer": "$$"}, NO_TEXT_LEFT),
        (with_text_answers, {"answer": "\\left.\\right."}, NO_TEXT_LEFT),
        (with_text_answers, {"answer": "\\boxed{}"}, NO_TEXT_LEFT),
        (with_responses, {"response": None}, NO_RESPONSE),
        (with_responses, {"response": " \n\u200b"}, NO_RESPONSE),
        (tagged_responses, {"response": "<think>x</think> 3"}, NO_ANSWER_TAGS),
        (tagged_responses, {"response": "<think>x</think><answer>3"}, NO_ANSWER_TAGS),
        (tagged_responses, {"response": "Three. <answer>3</answer>"}, NO_THINK_TAGS),
        (tagged_responses, {"response": f"{THREE} It is."}, NO_THINK_TAGS),
        (tagged_responses, {"response": THREE.replace("think", "plan")}, OTHER_TAG),
        (tagged_responses, {"response": "<answer>3</answer>"}, OTHER_TAG),
        (with_responses, {"response": THREE.replace("think", "plan")}, OTHER_TAG),
        (tagged_responses, {"answer": "4"}, OTHER_ANSWER),
        (tagged_responses, {"answer": "B", "options": ["3", "4"]}, OTHER_ANSWER),
    ],
)
def test_rows_that_a_stage_cannot_use_are_left_out(write, only, change, reason):
    """An empty gold answer would equal any empty answer; an empty response teaches to stop."""
    good = GOOD | {"response": THREE}
    other = {"id": "c", "answer": "A", "options": ["3.0", "4"]}
    path = write(good, good | change | {"id": "b"}, good | other)
    examples, skipped = checked(only(jsonl.open_rows(str(path))), "rows")
    assert [example.id for example in examples] == ["a", "c"] and skipped == {reason: 1}


@pytest.mark.parametrize("images", [{}, {"image": ""}, {"images": []}])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_path", "images/a"),
        ("figure", "images/a.PNG"),
        ("img_paths", ["a"]),
        ("Picture", {"url": "https://a.org/b"}),
        ("file_name", "a"),
    ],
)
def test_an_image_in_a_field_that_is_not_read_is_no_question_without_one(
    write, field, value, images
):
    row = TEXT | {field: value, **images}
    message = re.escape(f"'{field}' has {value!r}; call the field image, or name it in columns.")
    with pytest.raises(ValueError, match=message):
        load(write(row))
    none = jsonl.open_rows(str(write(row)), columns={"images": "none"})
    assert none[0].images == () and none[0].extra[field] == value
    assert len(load(write(GOOD | {field: "ok.png"}))[0]) == 1


@pytest.mark.parametrize(
    "change",
    [{"source_url": "https://a.org/b.png"}, {"image_path": ""}, {"img": [None]}, {"image_id": 3}],
)
def test_a_field_without_an_image_is_no_reason(write, change):
    assert load(write(TEXT | change))[0][0].images == ()


@pytest.mark.parametrize("images", [[], "", None])
def test_one_of_image_and_images_may_be_empty(write, images):
    assert len(load(write(GOOD | {"images": images}))[0][0].images) == 1


def test_fields_may_have_other_names(write):
    path = write(
        {
            "problem": [USER | {"content": PARTS}],
            "reward_model": {"ground_truth": "3", "style": "rule"},
            "answer": "three",
            "views": ["ok.png"],
            "picture": None,
        }
    )
    columns = {"question": "problem", "answer": "reward_model.ground_truth", "images": "views,p"}
    example = open_source("jsonl", path=str(path), columns=columns)[0]
    assert (example.question, example.answer) == ("<image>How many?", "3")
    assert len(example.images) == 1 and set(example.extra) == {"reward_model", "answer", "picture"}


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_messages_are_the_question_of_a_row_without_one(write, field):
    chat = [USER | {"content": "How few?"}]
    row = GOOD | {field: chat}
    asked = load(write(row | {"question": None}))[0][0]
    assert (asked.question, asked.extra) == ("<image>How few?", {})
    assert load(write(row))[0][0].extra == {field: chat}


def test_image_paths_stay_below_the_images_folder_unless_allowed(write, tmp_path):
    path = str(write(GOOD | {"image": "../ok.png"}, GOOD | {"image": f"{tmp_path}/ok.png"}))
    inner = tmp_path / "inner"
    inner.mkdir()
    assert checked(jsonl.open_rows(path), "rows")[1] == {OUTSIDE: 1}  # an absolute path below it
    with pytest.raises(ValueError, match=f"2 x {re.escape(OUTSIDE)}"):
        checked(jsonl.open_rows(path, images=str(inner)), "rows")
    rows = jsonl.open_rows(path, images=str(inner), images_outside=True)
    assert len(checked(rows, "rows")[0]) == 2


def test_a_path_may_begin_with_the_home_folder(write, tmp_path, monkeypatch):
    path = write(GOOD)
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = jsonl.open_rows(f"~/{path.name}", images="~")
    assert rows[0].images == jsonl.open_rows(str(path))[0].images


def test_rows_from_python_may_name_any_file(write, monkeypatch):
    folder = write().parent
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    (example,), _ = checked(jsonl.in_memory([GOOD | {"image": "../ok.png"}], "train"), "train")
    assert example.id == "a"


REFUSED = [
    ({"id": "\ud800", "question": "?", "answer": "1"}, Unusable, "lone surrogate in the text"),
    ({"question": "?", "answer": 10**5000}, Unusable, "text too long"),  # str() refuses it
    (("?", "1"), ValueError, "a mapping with question and answer as row 0 of train, got a tuple"),
]


@pytest.mark.parametrize(("row", "error", "message"), REFUSED)
def test_bad_row_from_python_is_refused(row, error, message):
    with pytest.raises(error, match=message):
        _ = jsonl.in_memory([row], "train")[0]


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


def test_rows_from_python_may_have_the_values_of_a_data_frame(write):
    write(GOOD)
    row = GOOD | {"answer": np.float32(0.1), "options": np.array([0.1, 7]), "rationale": np.nan}
    row |= {"id": np.int64(3), "image": np.nan, "images": np.array([{"path": "ok.png"}], object)}
    example = jsonl.in_memory([row], "train")[0]
    assert (example.id, example.answer, example.rationale) == ("3", "0.1", "")
    assert example.choices == ("0.1", "7.0") and len(example.images) == 1


def test_a_table_of_columns_is_refused():
    class Columns:
        """As a pandas.DataFrame is."""

        def __len__(self):
            return 2

        def __iter__(self):
            return iter(("question", "answer"))

        def __getitem__(self, column):
            return {"question": ["?", "?"], "answer": ["1", "2"]}[column]

    with pytest.raises(ValueError, match=r'this Columns has no .*df.to_dict\("records"\)'):
        _ = jsonl.in_memory(Columns(), "train")[0]


def test_images_from_python_may_be_open_or_bytes(write):
    path = write()
    data = (path.parent / "ok.png").read_bytes()
    image = Image.open(path.parent / "ok.png")
    rows = [GOOD | {"image": image}, GOOD | {"image": None, "images": (data, image)}]
    found = jsonl.in_memory(rows, "train")
    assert found[0].images == (image,) and found[1].images == (data, image)


@pytest.mark.parametrize(
    ("question", "images", "expected", "order"),
    [
        ("Which?", ["ok.png", "two.jpg"], "<image><image>Which?", (0, 1)),
        ("Which?", [], "Which?", ()),
        ("<image2> or <image1>?", ["ok.png", "two.jpg"], "<image> or <image>?", (1, 0)),
        ("<image 1> or <image 2>?", ["ok.png", "two.jpg"], "<image> or <image>?", (0, 1)),
        ("<image1> to <image2>?", ["ok.png"], "<image> to (picture 2)?", (0,)),
    ],
)
def test_placeholders_and_images_are_brought_together(write, question, images, expected, order):
    path = write({"question": question, "answer": "1", "images": images})
    (example,), _ = load(path)
    assert example.question == expected
    assert example.images == tuple(path.parent / images[i] for i in order)
    assert example.id == "1"


@pytest.mark.parametrize(
    ("lines", "message"),
    [((b"{", b"}"), "no row of .* can be used: 2 x not JSON"), ((), "can be used: it is empty")],
)
def test_file_without_a_usable_row_is_refused(write, lines, message):
    with pytest.raises(ValueError, match=message):
        load(write(*lines))


def test_whole_of_math_vision_testmini_can_be_used(shared):
    examples, skipped = load(shared / "data" / "mathvision_mini" / "testmini.jsonl")
    assert len(examples) == 304
    assert not skipped
    assert all(e.question.count("<image>") == len(e.images) == 1 for e in examples)
    by_id = {example.id: example for example in examples}
    assert by_id["27"].question.endswith("\n(E) $\\square, \\bullet, \\Delta$")
