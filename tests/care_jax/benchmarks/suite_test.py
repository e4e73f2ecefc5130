"""Small files in the published formats, read and asked as the official harness asks."""

import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from care_jax.benchmarks.releases import RELEASES
from care_jax.benchmarks.suite import Benchmark

MATHVISION_MINI = Path(__file__).parents[3].parent / "shared" / "data" / "mathvision_mini"
OPTIONS = "['<image 2>', 'a cup', '<image 1> again']"
PRO_OPTIONS = f"{OPTIONS[:-1]}, 'a hat', 'a dog']"
ROWS = {
    "mathvista": {
        "pid": "7", "question": "How high?", "image": "images/7.jpg", "decoded_image": "red",
        "choices": None, "unit": "cm", "precision": 2.0, "answer": "1.2",
        "question_type": "free_form", "answer_type": "float",
        "metadata": {"category": "general-vqa", "source": "IconQA", "skills": ["logic", "algebra"],
                     "grade": "high school", "context": "bar chart", "task": "VQA",
                     "language": "english", "split": "testmini", "img_height": 3, "img_width": 4},
        "query": "Hint: Please answer the question requiring a floating-point number with two "
                 "decimal places and provide the final value, e.g., 1.23, 1.34, 1.45, at the end.\n"
                 "Question: How high? (Unit: cm)",
    },
    "mathverse": {
        "sample_index": "3", "problem_index": "1", "problem_version": "Text Dominant",
        "question": "What is x?\nChoices:\nA:1\nB:2", "image": "red", "answer": "B",
        "question_type": "multi-choice",
        "metadata": {"split": "testmini", "source": "GeoQA", "subject": "Plane Geometry",
                     "subfield": "Angle"},
        "query_wo": "Please directly answer.\nQuestion: What is x?\nChoices:\nA:1\nB:2",
        "query_cot": "Please first conduct reasoning.",
        "question_for_eval": "What is x?\nChoices:\nA:1\nB:2",
    },
    "mathvision": {
        "id": "1", "question": "Which?\n<image1>", "options": ["$1$", "$2$"],
        "image": "images/1.jpg", "decoded_image": "red", "answer": "A", "solution": None,
        "level": 2, "subject": "algebra",
    },
    "mmmu": {
        "id": "validation_Art_1", "question": "See <image 1>. Which?", "options": OPTIONS,
        "explanation": "", "image_1": "red", "image_2": "blue", "image_3": None, "img_type": "[]",
        "answer": "C", "topic_difficulty": "Easy", "question_type": "multiple-choice",
        "subfield": "Drawing",
    },
    "mmmu_pro": {
        "id": "test_Art_1", "question": "See <image 1>. Which?", "options": PRO_OPTIONS,
        "explanation": "", "image_1": "red", "image_2": "blue", "image_3": None, "img_type": "[]",
        "answer": "C", "topic_difficulty": "Easy", "subject": "Art",
    },
    "mmmu_pro_vision": {
        "id": "test_Art_1", "image": "red", "options": PRO_OPTIONS, "answer": "C", "subject": "Art",
    },
}  # fmt: skip
ROWS["mathvision_testmini"] = ROWS["mathvision"]
# File of the release, text of the question, colours of the images.
EXPECTED = {
    "mathvista": ("data/testmini-00000-of-00001-7.parquet", ROWS["mathvista"]["query"], ["red"]),
    "mathverse": ("testmini.parquet", ROWS["mathverse"]["query_wo"], ["red"]),
    "mathvision": (
        "data/test-00000-of-00001-3.parquet",
        'Please solve the problem step by step and put your answer in one "\\boxed{}".Which?\n'
        "<image1>\nChoices: A. $1$\nB. $2$\nAnswer the question with the option's letter from the "
        "given choices directly.",
        ["red"],
    ),
    "mmmu": (
        "Art/validation-00000-of-00001.parquet",
        "See <image>. Which?\nA. <image>\nB. a cup\nC. image 1 again\n\n"
        "Answer with the option's letter from the given choices directly.",
        ["red", "blue"],
    ),
    "mmmu_pro": (
        "standard (10 options)/test-00000-of-00001.parquet",
        "See <image>. Which?\nA. <image>\nB. a cup\nC. image 1 again\nD. a hat\nE. a dog\n\n"
        "Answer with the option letter from the given choices directly.",
        ["red", "blue"],
    ),
    "mmmu_pro_vision": (
        "vision/test-00000-of-00001.parquet",
        "Answer with the option letter from the given choices directly.",
        ["red"],
    ),
}
EXPECTED["mathvision_testmini"] = (
    "data/testmini-00000-of-00001-8.parquet",
    *EXPECTED["mathvision"][1:],
)
IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def picture(colour):
    if colour not in ("red", "blue"):
        return None
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def write(folder, name, rows):
    """A parquet file of one row group per row, images as structs."""
    columns = {}
    for field in rows[0]:
        values = [row[field] for row in rows]
        is_image = field == "decoded_image" or (
            field.startswith("image") and values[0] in ("red", "blue", None)
        )
        columns[field] = (
            pyarrow.array([picture(value) for value in values], IMAGE) if is_image else values
        )
    path = folder / EXPECTED[name][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1)
    return path


def colour_of(image):
    return {(255, 0, 0): "red", (0, 0, 255): "blue"}[image.getpixel((3, 3))]


@pytest.fixture
def releases(tmp_path):
    """A folder in which all the files of all releases lie, those of MATH-Vision side by side."""
    for name, row in ROWS.items():
        write(tmp_path / RELEASES[name].scorer.__name__, name, [row])
    return tmp_path


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_is_asked_as_the_official_harness_asks(releases, name):
    benchmark = Benchmark(name, releases / RELEASES[name].scorer.__name__)
    (example,) = benchmark
    _, text, colours = EXPECTED[name]
    placed = name in ("mmmu", "mmmu_pro")  # the others show their picture first
    assert example.question == text if placed else example.question == "<image>" + text
    assert [colour_of(image) for image in example.images] == colours
    assert example.question.count("<image>") == len(colours)
    assert example.source == name
    assert not any(isinstance(value, bytes) for value in benchmark.rows[0].values())


@pytest.mark.parametrize("name", RELEASES)
def test_a_file_of_a_release_is_scored_by_its_own_rules(releases, name):
    file = releases / RELEASES[name].scorer.__name__ / EXPECTED[name][0]
    benchmark = Benchmark(name, file)
    gold, wrong = {"A": ("(A)", "B"), "1.2": ("<answer>1.2</answer>", "1.3")}.get(
        ROWS[name]["answer"], (f"<answer>{ROWS[name]['answer']}</answer>", "A")
    )
    row = benchmark.rows[0]
    assert benchmark.scorer.is_correct(gold, row)
    assert not benchmark.scorer.is_correct(wrong, row)


def test_rows_are_counted_in_their_categories(releases):
    def groups(name):
        benchmark = Benchmark(name, releases / RELEASES[name].scorer.__name__)
        return set(benchmark.categories({"doc_id": 0, "id": benchmark.ids[0]}))

    assert {"task/VQA", "skill/logic", "skill/algebra", "answer_type/float"} <= groups("mathvista")
    assert {"problem_version/Text Dominant", "subfield/Angle"} <= groups("mathverse")
    assert groups("mathvision") == {"subject/algebra", "level/2"}
    assert {"subject/Art", "question_type/multiple-choice"} <= groups("mmmu")
    assert groups("mmmu_pro_vision") == {"subject/Art"}


def test_rows_of_several_files_and_groups_keep_their_images(tmp_path):
    rows = [ROWS["mmmu"] | {"id": f"validation_Art_{i}"} for i in range(3)]
    rows[1] |= {"image_1": "blue", "image_2": "red"}
    write(tmp_path, "mmmu", rows)
    other = tmp_path / "Biology" / "validation-00000-of-00001.parquet"
    other.parent.mkdir()
    (tmp_path / "Art" / "validation-00000-of-00001.parquet").rename(other)
    write(tmp_path, "mmmu", [rows[0] | {"id": "validation_Art_9"}])
    (tmp_path / "Art" / "test-00000-of-00001.parquet").write_bytes(b"no parquet")
    benchmark = Benchmark("mmmu", tmp_path)
    assert benchmark.ids == ["validation_Art_9", *(f"validation_Art_{i}" for i in range(3))]
    for place, colours in ((3, ["red", "blue"]), (2, ["blue", "red"]), (1, ["red", "blue"])):
        assert [colour_of(image) for image in benchmark[place].images] == colours


def test_an_image_may_lie_beside_the_file(tmp_path):
    row = ROWS["mathvision"] | {"image": "images/1.png", "note": "one\u2028line"}
    del row["decoded_image"]
    text = json.dumps(row, ensure_ascii=False) + "\n\n"
    (tmp_path / "testmini.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "images").mkdir()
    Image.new("RGBA", (40, 30), (0, 0, 255, 9)).save(tmp_path / "images" / "1.png")
    (example,) = Benchmark("mathvision_testmini", tmp_path)
    assert colour_of(example.images[0]) == "blue"


REFUSED = {
    "unknown": ("chartqa", "", "must name one of mathvista, .*, got 'chartqa'"),
    "no file": ("mmmu", "", r"validation-\*\.parquet or validation\.jsonl in .*, got no such file"),
    "other configuration": ("mmmu_pro", "", r"under 'standard \(10 options\)' in .*, got no such"),
    "no JSON": ("mathvista", "{", "expected JSON on line 1 of .*, got not JSON; repair the file"),
    "no rows": (
        "mathvista",
        "",
        "expected rows of mathvista, got none; hf download AI4Math/MathVista",
    ),
}


@pytest.mark.parametrize(("name", "text", "message"), REFUSED.values(), ids=REFUSED)
def test_incomplete_release_is_refused(tmp_path, name, text, message):
    """The folder has another configuration of MMMU-Pro."""
    write(tmp_path, "mmmu_pro", [ROWS["mmmu_pro"]])
    (tmp_path / EXPECTED["mmmu_pro"][0]).parent.rename(tmp_path / "standard (4 options)")
    (tmp_path / "testmini.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        _ = Benchmark(name, tmp_path)[0]


def test_an_image_is_turned_as_its_exif_tag_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 2)).save(tmp_path / "images" / "1.jpg", exif=exif)
    row = {"id": "1", "question": "?", "image": "images/1.jpg", "answer": "1", "options": []}
    (tmp_path / "testmini.jsonl").write_text(json.dumps(row) + "\n")
    (example,) = Benchmark("mathvision_testmini", tmp_path)
    assert [image.size for image in example.images] == [(2, 4)]


def test_real_figures_are_read():
    if not MATHVISION_MINI.exists():
        pytest.skip(f"{MATHVISION_MINI.name} is not beside this checkout")
    benchmark = Benchmark("mathvision_testmini", MATHVISION_MINI)
    assert len(benchmark) == 304
    assert benchmark[0].images[0].size > (1, 1)
    assert all(benchmark.scorer.is_correct(row["answer"], row) for row in benchmark.rows)
