"""Rows and files that a benchmark cannot have are refused when it is opened."""

import json
import shutil

import pytest
from PIL import Image

from care_jax.benchmarks import releases, row_checks
from care_jax.benchmarks.suite import BLANK, Benchmark

TEN = [f"option {number}" for number in range(10)]
IMAGE = {"image": "images/1.png"}
ROWS = {
    "mathvista": {"pid": "1", "question": "How?", "choices": ["1", "2"], "answer": "1",
                  "answer_type": "text", "metadata": {"skills": []}},
    "mathverse": {"sample_index": "1", "question": "", "query_wo": "See the image.", "answer": "x",
                  "question_type": "free-form", "problem_version": "Vision Only"},
    "mathvision": {"id": "1", "question": "How?", "options": ["1", "2"], "answer": "A"},
    "mmmu": {"id": "validation_Art_1", "question": "See <image 1>?", "options": "['1', '2']",
             "answer": "A", "question_type": "multiple-choice", "image_1": "images/1.png"},
    "mmmu_pro": {"id": "test_Art_1", "question": "See <image 1>?", "options": str(TEN),
                 "answer": "J", "image_1": "images/1.png"},
    "mmmu_pro_vision": {"id": "test_Art_1", "options": str(TEN), "answer": "J"},
}  # fmt: skip
# Fields that are changed, or the row of another release.
WRONG = {
    "another release": ("mathvision", ROWS["mathvista"], r"the fields id, .* got answer, answer_t"),
    "standard": ("mmmu_pro_vision", ROWS["mmmu_pro"], "no text in its field 'question', got 'See"),
    "vision": ("mmmu_pro", ROWS["mmmu_pro_vision"], "the fields id, question, .*, image_1, got"),
    "few options": ("mmmu_pro", {"options": str(TEN[:4]), "answer": "A"}, "10 .* at most 4; take"),
    "no answer": ("mathvista", {"answer": ""}, r"1 of 1 that .* '' to the options .* 'testmini'"),
    "null": ("mathvision", {"answer": None}, "has the answer '' to the options"),
    "unknown answer": ("mmmu", {"answer": "?"}, r"answer '\?' to .* the split 'validation'"),
    "free and unknown": ("mathverse", {"answer": "?"}, r"answer '\?' to an open question"),
    "letter for text": ("mathvista", {"answer": "A"}, r"the answer 'A' to the options \('1', '2'"),
    "letter of no option": ("mathvision", {"answer": "C"}, "the answer 'C' to the options"),
    "list": ("mathvista", {"answer": ["1"]}, r"text or a number as its answer, got \['1'\]"),
    "no text": ("mathvista", {"question": None}, "text in its field 'question', got None"),
    "text as number": ("mathvista", {"question": 3}, "text in its field 'question', got 3"),
    "type": ("mathvista", {"choices": None}, r"answer_type int.* got 'text' \(precision None\)"),
    "precision": (
        "mathvista",
        {"choices": None, "answer_type": "float", "precision": 3, "answer": "1.234"},
        r"got 'float' \(precision 3\)",
    ),
    "text of metadata": ("mathvista", {"metadata": "{}"}, "expected an object as its metadata"),
    "no literal": ("mmmu", {"options": "A. 1 B. 2"}, "its Python literal, got 'A. 1 B. 2'"),
    "object": ("mathvista", {"choices": {"A": "1"}}, "its Python literal, got {'A': '1'}"),
    "no image": ("mathvision", {"image": None}, "image in its field 'decoded_image', got 0"),
    "missing": ("mmmu", {"image_1": "images/2.png"}, r"image missing \(.*images/2.png\)"),
    "broken": ("mathvista", {"image": "images/broken.png"}, r"damaged \(.*images/broken.png\)"),
    "outside": ("mathvision", {"image": "../1.png"}, r"outside the images folder \(\.\./1.png\)"),
    "outside, in the field": ("mmmu", {"image_1": "../1.png"}, "outside the images folder"),
    "absolute": ("mathvision", {"image": "/etc/hosts"}, r"the images folder \(/etc/hosts\); hf"),
}


@pytest.fixture
def write(tmp_path):
    """Writes rows as a release that has an image beside it; gives the file."""
    images = tmp_path / "images"
    images.mkdir()
    Image.linear_gradient("L").save(images / "1.png")
    shutil.copy(images / "1.png", tmp_path.parent)
    (images / "broken.png").write_bytes(b"no image")
    (images / "cut.png").write_bytes((images / "1.png").read_bytes()[:150])

    def write(*rows):
        path = tmp_path / "testmini.jsonl"
        path.write_text("".join(json.dumps(IMAGE | row) + "\n" for row in rows))
        return path

    return write


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_release_is_accepted(write, name):
    benchmark = Benchmark(name, write(ROWS[name]))
    assert len(benchmark[0].images) == 1
    (note,) = benchmark.notes
    assert f"{name} has 1 rows, a partial download: " in note


@pytest.mark.parametrize(("name", "row", "message"), WRONG.values(), ids=WRONG)
def test_a_row_that_cannot_be_asked_or_scored_is_refused(write, name, row, message):
    path = write(row if {"id", "pid"} & set(row) else ROWS[name] | row)
    with pytest.raises(ValueError, match=message) as refused:
        Benchmark(name, path)
    assert f"line 1 of {path}" in str(refused.value) or "options" in row


def test_rows_that_are_there_twice_are_refused(write):
    row = ROWS["mathvision"]
    with pytest.raises(ValueError, match=r"line 2 of .* once, got '1' of line 1 of .* again"):
        Benchmark("mathvision_testmini", write(row, row))


def test_a_few_gold_answers_may_be_none_that_the_rules_accept(write):
    rows = [ROWS["mathvista"] | {"pid": str(number)} for number in range(200)]
    rows[7] |= {"answer": "A"}
    first, note = Benchmark("mathvista", write(*rows)).notes
    assert "200 rows, a partial download: 1,000 are published" in first
    assert "1 rows of mathvista have gold answers that" in note and "line 8 of" in note
    for number in range(100, 200):
        rows[number] |= {"answer": None}
    with pytest.raises(ValueError, match="got 101 of 200 that they do not"):
        Benchmark("mathvista", write(*rows))


def test_a_broken_image_is_named_with_its_row(write):
    benchmark = Benchmark("mathvision", write(ROWS["mathvision"] | {"image": "images/cut.png"}))
    with pytest.raises(ValueError, match=r"of line 1 of .*/cut.png that .* decoded \(.*; hf"):
        _ = benchmark[0]


def test_images_are_decoded_as_the_official_harness_does_and_blank_ones_counted(write, tmp_path):
    """Black lines on transparent black are all black; 16 bits are clipped."""
    transparent = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    transparent.paste((0, 0, 0, 255), (5, 5, 20, 9))
    transparent.save(tmp_path / "images" / "2.png")
    Image.linear_gradient("L").convert("I;16").point(lambda x: x * 257).save(
        tmp_path / "images" / "3.png"
    )
    rows = [ROWS["mathvision"] | {"id": str(k), "image": f"images/{k}.png"} for k in (1, 2, 3)]
    benchmark = Benchmark("mathvision", write(*rows))
    plain, blank, deep = benchmark
    assert blank.images[0].getcolors() == [(1600, (0, 0, 0))] and blank.extra[BLANK] == 1
    assert {pixel for _, (pixel, _, _) in deep.images[0].getcolors()} == {0, 255}
    assert BLANK not in deep.extra | plain.extra


FILES = {
    "tsv": ("MathVista_MINI.tsv", r"got a TSV of .* not read; hf download AI4Math/MathVista"),
    "tsv in a folder": (".", r"got no such file \(MathVista_MINI.tsv\); hf download"),
    "hub id": ("AI4Math/MathVista", "got nothing: no such path; hf download AI4Math/MathVista"),
    "archive": ("images.zip", r"got a \.zip file; hf"),
}


@pytest.mark.parametrize(("name", "message"), FILES.values(), ids=FILES)
def test_files_that_are_not_read_are_told_with_the_release_that_is(tmp_path, name, message):
    (tmp_path / "MathVista_MINI.tsv").write_text("index\tquestion\n")
    if name.endswith("zip"):
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match=message):
        Benchmark("mathvista", tmp_path / name)


def test_several_revisions_in_the_hubs_cache_are_refused(write, tmp_path):
    folder = tmp_path / "datasets--AI4Math--MathVista" / "snapshots"
    for revision in ("aaa", "bbb"):
        (folder / revision / "images").mkdir(parents=True)
        shutil.copy(tmp_path / "images" / "1.png", folder / revision / "images")
        shutil.copy(write(ROWS["mathvista"]), folder / revision)
    with pytest.raises(ValueError, match=r"one revision .*, got .*/aaa, .*/bbb; name the folder"):
        Benchmark("mathvista", folder.parent)
    assert len(Benchmark("mathvista", folder / "aaa")) == 1
    shutil.rmtree(folder / "aaa")
    assert len(Benchmark("mathvista", folder.parent)) == 1


def test_every_release_has_the_published_number_of_rows():
    sizes = {name: release.num_rows for name, release in releases.RELEASES.items()}
    assert sizes == {
        "mathvista": 1000,
        "mathverse": 3940,
        "mathvision": 3040,
        "mathvision_testmini": 304,
        "mmmu": 900,
        "mmmu_pro": 1730,
        "mmmu_pro_vision": 1730,
    }
    assert row_checks.check_rows("mmmu", releases.RELEASES["mmmu"], _whole("mmmu", 900)) == []


def _whole(name, number):
    row = ROWS[name] | {"question": "No image?"}
    return ((f"row {k}", str(k), row) for k in range(number))
