"""Preparing: what is left out and why, the same bytes each time, whole or not at all."""

import io
import json
import pathlib
import subprocess
import sys

import pyarrow as pa
import pytest
from PIL import Image

from care_jax.batch import Example
from care_jax.commands import prepare
from care_jax.commands.dedup import DuplicateIndex, content_of, normalized_text
from care_jax.data.readers import shards
from care_jax.data.sources import open_source
from care_jax.devices.whole_file import sha256
from care_jax.prompts.images import open_image
from configs import common, mixture, tiny

ROOT = pathlib.Path(__file__).resolve().parents[3]
CHARTS = [  # question, label, kind; the picture's seed is the place
    ("How many bars?", ["3"], 0),
    ("Is Peru above Chile?", ["Yes"], 0),
    ("What is the total of it all?", ["12"], 0),
    ("An augmented one?", ["1"], 1),
]


@pytest.fixture
def config(tmp_path, chartqa_parquet, write_parquet, write_json, picture):
    """Two corpora and a benchmark that share questions and pictures."""

    def worse(seed):
        """The same picture, smaller and as another file."""
        file = io.BytesIO()
        Image.open(io.BytesIO(picture(seed))).resize((72, 48)).save(file, "JPEG", quality=80)
        return file.getvalue()

    chartqa_parquet(tmp_path / "charts", CHARTS)
    images = {
        "same.png": picture(0),
        "worse.jpg": worse(0),
        "new.png": picture(50),
        "other.png": picture(51),
        "bench.png": picture(60),
        "cut.png": picture(52)[:100],
    }
    for name, data in images.items():
        (tmp_path / name).write_bytes(data)
    rows = [
        {"id": "kept", "question": "How many dots?", "answer": "4", "image": "new.png"},
        {"question": "How many bars?", "answer": "3", "image": "same.png"},
        {"question": "How many bars?", "answer": "5", "image": "same.png"},
        {"question": "how many BARS", "answer": "3.0", "image": "worse.jpg"},
        {"question": "how many BARS", "answer": "8", "image": "worse.jpg", "id": "relabelled"},
        {"question": "How many dots?", "answer": "4", "image": "other.png", "id": "elsewhere"},
        {"question": "Anything at all?", "answer": "4", "image": "bench.png"},
        {"question": "How many?", "answer": "4", "image": "cut.png"},
        {"question": "How many?" * 60, "answer": "4", "image": "new.png"},
        {"question": "How many?", "answer": "", "image": "new.png"},
        {
            "question": "Which?",
            "answer": "4",
            "image": "other.png",
            "response": "<think>" + "Look at it. " * 80 + "</think><answer>4</answer>",
        },
        {
            "question": "Which one?",
            "answer": "4",
            "image": "other.png",
            "context": "<think>" + "Look at it. " * 14,
            "response": "Look at it. " * 4 + "</think><answer>4</answer>",
        },
    ]
    write_json(tmp_path / "mine.jsonl", rows)
    write_parquet(
        tmp_path / "bench.parquet",
        [
            {"question": "Is Peru above Chile", "answer": "No", "image": {"bytes": worse(1)}},
            {"question": "Another?", "answer": "x", "image": {"bytes": images["bench.png"]}},
            {"question": "Broken?", "answer": "x", "image": {"bytes": b"no image"}},
        ],
        {
            "question": pa.string(),
            "answer": pa.string(),
            "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        },
    )
    config = tiny.get_config()
    config.data.num_workers = 2
    config.data.buckets = ((96, 96),)
    config.data.prepare.shard_megabytes = 1
    config.data.prepare.sources = (
        common.source(
            "chartqa",
            path=str(tmp_path / "charts"),
            split="train",
            subset="human",
            tolerance=0.05,
            max_pixels=2048,
        ),
        common.source("jsonl", path=str(tmp_path / "mine.jsonl")),
    )
    bench = common.source("parquet", path=str(tmp_path / "bench.parquet"))
    bench.columns.update({"question": "question", "answer": "answer", "images": "image"})
    config.data.prepare.benchmarks = (bench,)
    return config


def test_what_is_left_out_is_counted_by_reason_and_listed(config, tmp_path):
    manifest = prepare.prepare(config, tmp_path / "out")
    charts, mine = manifest["sources"].values()
    assert list(manifest["sources"]) == ["chartqa-human", "mine"]
    assert (charts["rows"], charts["kept"]) == (3, 2)
    assert charts["left_out"] == {"question of benchmark bench": 1}
    assert (mine["rows"], mine["kept"]) == (12, 3)
    assert mine["left_out"] == {
        "duplicate of chartqa-human": 1,
        "duplicate of chartqa-human with another answer": 1,
        "near duplicate of chartqa-human": 1,
        "picture of benchmark bench": 1,
        "image unreadable or truncated": 1,
        "prompt fits no bucket": 1,
        "response too long": 2,
        "no answer": 1,
    }
    assert manifest["benchmarks"]["bench"] == {
        "rows": 3,
        "usable": 2,
        "left_out": {"image is none of JPEG, PNG, WEBP, GIF, BMP, TIFF, or damaged": 1},
        "removed": {"chartqa-human": 1, "mine": 1},
    }
    assert manifest["num_examples"] == 5
    lines = (tmp_path / "out" / "left_out.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in lines]
    assert len(listed) == 10
    assert listed[0] == {
        "source": "chartqa-human",
        "row": 2,
        "id": "train-1",
        "reason": "question of benchmark bench",
    }
    cut = next(line for line in listed if "truncated" in line["reason"])
    assert cut["detail"].endswith("cut.png")
    for report in (charts, mine):
        assert report["rows"] == report["kept"] + sum(report["left_out"].values())
    assert prepare.summary(manifest)[-1] == "5 examples in all"


IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_benchmark_rows_that_training_refuses_are_compared(
    config, tmp_path, write_parquet, write_json, picture, kind
):
    """Several images, recurring placeholders, no answer; the copies have one image each."""
    (tmp_path / "cut.png").write_bytes(picture(73)[:100])
    for seed in (70, 71, 72):
        (tmp_path / f"{seed}.png").write_bytes(picture(seed))
        smaller = Image.open(tmp_path / f"{seed}.png").resize((72, 48)).convert("RGB")
        smaller.save(tmp_path / f"{seed}.jpg", quality=80)
    asked = [
        ("In <image 1> and <image 2>; what is <image 1>?", ["70.png", "71.png"], "A"),
        ("Which <image 1> is it?", ["72.png", "71.png"], "?"),
        ("What is 17 times 3?", [], ""),
        ("Cut?", ["cut.png"], "A"),
        (None, [], "A"),
    ]
    if kind == "parquet":
        cells = {path.name: {"bytes": path.read_bytes()} for path in tmp_path.glob("*.png")}
        rows = [
            {"question": text, "answer": gold, "a": None, "b": None}
            | {column: cells[name] for column, name in zip("ab", names, strict=False)}
            for text, names, gold in asked
        ]
        text = pa.string()
        columns = {"question": text, "answer": text, "a": IMAGE, "b": IMAGE}
        write_parquet(tmp_path / "bench.parquet", rows, columns)
        config.data.prepare.benchmarks[0].columns.images = "a,b"
    else:
        rows = [{"question": text, "answer": gold, "images": x} for text, x, gold in asked]
        write_json(tmp_path / "bench.jsonl", rows)
        path = str(tmp_path / "bench.jsonl")
        config.data.prepare.benchmarks = (common.source("jsonl", path=path),)
    copies = [
        {"question": "<image>In and; what is", "answer": "A", "image": "71.jpg"},
        {"question": "which <image> is it", "answer": "B", "image": "72.jpg"},
        {"question": "What is 17 times 3 ?", "answer": "51"},
        {"question": "Another one?", "answer": "51", "image": "70.png"},
        {"question": "Which?", "answer": "B", "image": "72.jpg", "id": "of another text"},
    ]
    write_json(tmp_path / "mine.jsonl", copies)
    config.data.prepare.sources = config.data.prepare.sources[1:]
    manifest = prepare.prepare(config, tmp_path / "out")
    (mine,) = manifest["sources"].values()
    assert mine["left_out"] == {"picture of benchmark bench": 1, "question of benchmark bench": 3}
    assert mine["kept"] == 1
    assert prepare.summary(manifest)[-4:-1] == [
        "benchmark bench: 3 of 5 questions read, 4 matches removed",
        "  not compared 1: image unreadable or truncated",
        "  not compared 1: neither a question nor an image",
    ]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_benchmark_s_fields_are_found_as_for_training(
    config, tmp_path, write_parquet, write_json, picture, kind
):
    """Named ones, also inside of others, and a chat's last question."""
    (tmp_path / "70.png").write_bytes(picture(70))
    smaller = Image.open(tmp_path / "70.png").resize((72, 48)).convert("RGB")
    smaller.save(tmp_path / "70.jpg", quality=80)
    chat = [{"role": "user", "content": "<image>Which one is it?"}]
    texts = ["<image>Which one is it?", "What is 17 times 3?", None]
    rows = [{"task": {"q": text}, "answer": "A", "figure": None} for text in texts]
    (bench,) = config.data.prepare.benchmarks
    if kind == "parquet":
        rows[0]["figure"] = {"bytes": picture(70)}
        task = pa.struct({"q": pa.string()})
        columns = {"task": task, "answer": pa.string(), "figure": IMAGE}
        write_parquet(tmp_path / "bench.parquet", rows, columns)
    else:
        rows[0] |= {"figure": "70.png", "task": {"q": chat}}
        write_json(tmp_path / "bench.jsonl", rows)
        bench = common.source("jsonl", path=str(tmp_path / "bench.jsonl"))
    bench.columns.update(question="task.q", images="figure")
    config.data.prepare.benchmarks = (bench,)
    copies = [
        {"question": "which <image> one is it", "answer": "B", "image": "70.jpg"},
        {"question": "What is 17 times 3 ?", "answer": "51"},
        {"question": "What is 18 times 3 ?", "answer": "54"},
    ]
    write_json(tmp_path / "mine.jsonl", copies)
    config.data.prepare.sources = config.data.prepare.sources[1:]
    manifest = prepare.prepare(config, tmp_path / "out")
    (mine,) = manifest["sources"].values()
    assert mine["left_out"] == {"question of benchmark bench": 2} and mine["kept"] == 1
    (report,) = manifest["benchmarks"].values()
    assert report["left_out"] == {"neither a question nor an image": 1}


def test_a_prepared_folder_is_enough(config, tmp_path, capsys):
    """A node that trains need not have what it was prepared from."""
    manifest = prepare.prepare(config, tmp_path / "out")
    (tmp_path / "mine.jsonl").unlink()
    assert prepare.prepare(config, tmp_path / "out") == manifest
    assert "was prepared before" in capsys.readouterr().out


def test_a_benchmark_without_any_readable_question_is_refused(config, tmp_path, write_json):
    write_json(tmp_path / "bench.jsonl", [{"problem": "What is 2 + 2?"}])
    path = str(tmp_path / "bench.jsonl")
    config.data.prepare.benchmarks = (common.source("jsonl", path=path),)
    with pytest.raises(ValueError, match="no question of benchmark bench can be read"):
        prepare.prepare(config, tmp_path / "out")


def test_what_is_kept_is_what_was_read(config, tmp_path):
    prepare.prepare(config, tmp_path / "out")
    charts = open_source("arrayrecord", path=str(tmp_path / "out"), subset="chartqa-human")
    assert [charts[i].answer for i in range(len(charts))] == ["3", "12"]
    assert charts[0].question == "<image>How many bars?"
    assert (charts[0].tolerance, charts[0].max_pixels) == (0.05, 2048)
    assert open_image(charts[0].images[0]).size == (96, 64)
    mine = open_source("arrayrecord", path=str(tmp_path / "out"), subset="mine")
    assert [mine[i].id for i in range(len(mine))] == ["kept", "relabelled", "elsewhere"]


def test_same_configuration_gives_the_same_bytes(config, tmp_path):
    prepare.prepare(config, tmp_path / "one")
    config.data.num_workers = 5
    prepare.prepare(config, tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(names) == 4
    for name in names:
        one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        assert one == two, name


def test_run_that_died_leaves_no_folder_and_the_next_makes_a_whole_one(
    config, tmp_path, monkeypatch, capsys
):
    """In a folder that is there and empty."""
    out = tmp_path / "out"

    class Killed(Exception):
        pass

    write, count = shards.ShardWriter.write, []

    def dying(self, example):
        count.append(example)
        if len(count) == 3:
            raise Killed
        write(self, example)

    monkeypatch.setattr(shards.ShardWriter, "write", dying)
    with pytest.raises(Killed):
        prepare.prepare(config, out)
    assert not out.exists()
    assert (tmp_path / "out.partial").is_dir()
    monkeypatch.undo()
    out.mkdir()
    manifest = prepare.prepare(config, out)
    assert manifest["num_examples"] == 5 and not (tmp_path / "out.partial").exists()
    for report in manifest["sources"].values():
        for shard in report["shards"]:
            assert sha256(out / shard["file"]) == shard["sha256"]
    # It is done: the same is not done again, and something else does not take its place.
    before = (out / "manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    assert prepare.prepare(config, out) == manifest
    assert "was prepared before, and nothing is read again" in capsys.readouterr().out
    assert (out / "manifest.json").stat().st_mtime_ns == before
    config.data.prepare.near_bits = 3
    with pytest.raises(ValueError, match="was prepared with another configuration; remove it"):
        prepare.prepare(config, out)


def test_command_prints_the_counts_and_refuses_another_configuration(
    tmp_path, write_json, picture, error_of
):
    (tmp_path / "a.png").write_bytes(picture())
    write_json(tmp_path / "a.jsonl", [{"question": "?", "answer": "1", "image": "a.png"}])
    path = str(tmp_path / "a.jsonl")
    (tmp_path / "config.py").write_text(
        "from configs import common, tiny\n"
        "def get_config():\n"
        "    config = tiny.get_config()\n"
        f"    config.data.prepare.sources = (common.source('jsonl', path={path!r}),)\n"
        "    return config\n"
    )

    given = f"--config={tmp_path / 'config.py'}", f"--out={tmp_path / 'out'}"
    command = [sys.executable, "-m", "care_jax.commands.prepare", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a: 1 of 1 rows kept" in done.stdout and "1 examples in all" in done.stdout
    error = error_of(prepare, *given, "--config.data.think_tag=reasoning")
    assert "was prepared with another configuration" in error
    assert "no such key: --config.data.nothing" in error_of(
        prepare, *given, "--config.data.nothing=1"
    )
    for flag in given:
        assert "expected --config=FILE --out=FOLDER" in error_of(prepare, flag)


FILE = common.source("jsonl", path="a/x.jsonl")
REFUSED = {
    "no source": (
        {"sources": ()},
        "at least one source in data.prepare.sources, got none; add one",
    ),
    "unknown": ({"sources": (common.source("csv"),)}, "data.prepare.sources.0.source must be one"),
    "mixture": (
        {"sources": (common.source("mixture", parts=(FILE,)),)},
        "data.prepare.sources must not be mixtures, got one of 1 parts; list its parts",
    ),
    "names": ({"sources": (FILE, FILE)}, "different names, got 2 called 'x'; rename their files"),
    "no file": ({"sources": (FILE,)}, "expected a file of JSON rows, got 'a/x.jsonl'"),
    "key": ({"shard_megabytes": 0}, r"shard_megabytes must lie in \(0, inf\), got 0"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_configuration_is_refused(config, tmp_path, changes, message):
    config.data.prepare.update(changes)
    with pytest.raises(ValueError, match=message):
        prepare.prepare(config, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_sources_of_nothing_but_bad_rows_are_refused(config, tmp_path, write_json):
    (tmp_path / "mine.jsonl").write_text("{}")
    config.data.prepare.sources = config.data.prepare.sources[1:]
    message = (
        r"no example is left of mine: 1 x no question \(first is row 1: it has no keys; .*; check"
    )
    with pytest.raises(ValueError, match=message):
        prepare.prepare(config, tmp_path / "out")


@pytest.mark.parametrize("part", mixture.FOLDERS)
def test_the_papers_mixture_asks_for_sources_there_are(part):
    config = mixture.get_config(part)
    prepare._check(config)
    assert {prepare.name_of(section) for section in config.data.prepare.sources} <= {
        *(each.subset for each in config.data.train.parts),
        "vision_r1_cold",
    }


def test_texts_are_the_same_but_for_case_spaces_and_punctuation():
    assert normalized_text("<image>Find  $x$ , if A=2.5!") == normalized_text("find X if a = 2.5")
    assert normalized_text("x - 1") != normalized_text("x + 1")
    assert normalized_text("2.5") != normalized_text("25")


def test_a_letter_and_its_choice_are_the_same_answer():
    def content(answer, choices=("3", "4")):
        lines = "".join(f"\n({letter}) {text}" for letter, text in zip("AB", choices, strict=True))
        return content_of(Example("i", "s", (), f"How many?{lines}", answer, choices))

    seen = DuplicateIndex(20)
    seen.add("first", content("B"))
    assert seen.duplicate(content("4")) == "duplicate of first"
    assert seen.duplicate(content("A")) == "duplicate of first with another answer"
    assert seen.duplicate(content("A", ("4", "3"))) == "near duplicate of first"
    assert seen.duplicate(content("B", ("4", "3"))) == ""


def test_boxes_and_further_fields_go_through_the_shards(config, tmp_path, write_json):
    """Rows that differ in their box alone are two answers to one question."""
    row = {"question": "Where?", "answer": [1, 2.5, 3, 4], "image": "new.png", "unit": {"x": "cm"}}
    others = [row, row | {"answer": [9, 9, 9, 9], "question": "where"}]
    write_json(tmp_path / "boxes.jsonl", [row, *others])
    config.data.prepare.sources = (common.source("jsonl", path=str(tmp_path / "boxes.jsonl")),)
    manifest = prepare.prepare(config, tmp_path / "out")
    assert manifest["sources"]["boxes"]["left_out"] == {"duplicate of boxes": 1}
    rows = open_source("arrayrecord", path=str(tmp_path / "out"))
    assert [rows[i].answer for i in range(len(rows))] == [[1, 2.5, 3, 4], [9, 9, 9, 9]]
    assert rows[0].extra == {"unit": {"x": "cm"}}
