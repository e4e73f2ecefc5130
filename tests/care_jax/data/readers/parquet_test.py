"""Parquet: rows at random places, columns by name, broken files and cells by name and row."""

import datetime

import pyarrow as pa
import pytest

from care_jax.batch import Unusable
from care_jax.data.readers import fields, parquet
from care_jax.data.sources import open_source
from care_jax.prompts.images import open_image

TYPES = {
    "q": pa.string(),
    "a": pa.list_(pa.string()),
    "img": pa.string(),
    "opts": pa.list_(pa.string()),
}
COLUMNS = {"question": "q", "answer": "a", "images": "img", "choices": "opts"}


@pytest.fixture
def release(tmp_path, write_parquet, picture):
    """Seven rows in two files of row groups of two."""
    rows = [{"q": f"q{i}?", "a": [str(i)], "img": "p.png", "opts": None} for i in range(7)]
    write_parquet(tmp_path / "data" / "train-0.parquet", rows[:5], TYPES)
    write_parquet(tmp_path / "data" / "train-1.parquet", rows[5:], TYPES)
    write_parquet(tmp_path / "data" / "test-0.parquet", rows[:1], TYPES)
    write_parquet(tmp_path / "data" / "test_text_only-0.parquet", rows[:3], TYPES)
    write_parquet(tmp_path / "vision (10)" / "test-0.parquet", rows[:4], TYPES)
    (tmp_path / "p.png").write_bytes(picture())
    return tmp_path


def test_rows_of_all_files_are_found_in_any_order(release):
    source = open_source("parquet", path=str(release), split="train", columns=COLUMNS)
    assert [source[i].answer for i in (6, 0, 4, 5, 3)] == ["6", "0", "4", "5", "3"]
    assert source[2].question == "<image>q2?" and source[2].id == "2"
    assert open_image(source[2].images[0]).size == (96, 64)
    lengths = {
        split: len(open_source("parquet", path=str(release), split=split, columns=COLUMNS))
        for split in ("train", "test", "test_text_only", "vision (10)", "all")
    }
    assert lengths == {"train": 7, "test": 5, "test_text_only": 3, "vision (10)": 4, "all": 15}
    with pytest.raises(IndexError):
        _ = source[7]


SPLITS = {
    "train, val": ("data/train-0.parquet", "data/val-0.parquet"),
    "test, testmini": ("testmini.parquet", "test-1.parquet"),
    "test, train": ("main/test/0.parquet", "main/geo_train.parquet"),
    "": ("train_1.parquet", "train-2.parquet", "39Krelease.parquet", "latest/train/0.parquet"),
}


@pytest.mark.parametrize("splits", SPLITS)
def test_files_of_several_splits_are_not_merged_unasked(tmp_path, write_parquet, splits):
    for name in SPLITS[splits]:
        row = {"q": "?", "a": ["1"], "img": None, "opts": None}
        write_parquet(tmp_path / name, [row], TYPES)
    if splits:
        with pytest.raises(ValueError, match=f"files of one split in .*, got {splits}; set the"):
            open_source("parquet", path=str(tmp_path), columns=COLUMNS)
    rows = open_source("parquet", path=str(tmp_path), columns=COLUMNS, split=splits and "all")
    assert len(rows) == len(SPLITS[splits])


def test_files_of_several_revisions_are_refused(tmp_path, write_parquet):
    for revision in ("aa", "bb"):
        row = {"q": "?", "a": ["1"], "img": None, "opts": None}
        path = tmp_path / "datasets--a--b" / "snapshots" / revision / "train-0.parquet"
        write_parquet(path, [row], TYPES)
    message = "of one revision in .*, got .*/snapshots/aa, .*/bb; name the folder"
    with pytest.raises(ValueError, match=message):
        open_source("parquet", path=str(tmp_path), columns=COLUMNS, split="train")
    path = str(tmp_path / "datasets--a--b" / "snapshots" / "aa")
    assert len(open_source("parquet", path=path, columns=COLUMNS)) == 1


OTHER_FORMATS = {
    "data-0.arrow": (b"\xff" * 8, "an Arrow stream; write it with datasets"),
    "a.jsonl": (b'{"question": "?"}', "a file of JSON; set the source to 'jsonl'"),
    "a.tar": (b"a.png".ljust(257, b"\0") + b"ustar", "a tar archive; unpack it"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_file_of_another_format_is_told(tmp_path, name):
    content, message = OTHER_FORMATS[name]
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ValueError, match=f"{name}.*, {message}"):
            open_source("parquet", path=str(path), columns=COLUMNS)


WHOLE = (slice(0), b"")
REFUSED = {
    "column": ({"answer": "x"}, WHOLE, "expected columns x in .*, got q, a, img, opts; change the"),
    "no answer": (
        {"answer": ""},
        WHOLE,
        r"columns\.answer must name a column of .*train-0.parquet \(it has q, a, img, opts\), got",
    ),
    "no such field": (
        {"answer": "a.b"},
        WHOLE,
        r"expected columns a\.b in .*, got q, a, img, opts;",
    ),
    "no question": ({"question": ""}, WHOLE, r"columns\.question must name a column of .*, got ''"),
    "cut": ({}, (slice(-9, None), b""), r"train-1\.parquet is not a complete parquet file"),
    "row group": ({}, (slice(4, 204), bytes(200)), r"row group 0 of .*train-1\.parquet cannot be"),
}


@pytest.mark.parametrize(("columns", "damage", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_columns_and_broken_files_are_refused(release, columns, damage, message):
    path = release / "data" / "train-1.parquet"
    data, (where, content) = bytearray(path.read_bytes()), damage
    data[where] = content
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        source = open_source("parquet", path=str(release), columns=COLUMNS | columns, split="train")
        assert source[4].answer == "4"
        _ = source[5]


NOT_UTF8 = pa.array([b"ok", b"\xff\xfe?"]).buffers()
UNUSABLE = {
    "text": (pa.Array.from_buffers(pa.string(), 2, NOT_UTF8), "not UTF-8"),
    "nanosecond": (pa.array([0, 1], pa.timestamp("ns")), "a date or time that Python cannot hold"),
    "day": (pa.array([0, 2**30], pa.date32()), "a date or time that Python cannot hold"),
}


@pytest.mark.parametrize(("cells", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_cell_that_cannot_be_read_costs_its_row_alone(tmp_path, cells, reason):
    table = pa.table({"question": ["?", "?"], "answer": ["1", "2"], "more": cells})
    pa.parquet.write_table(table, tmp_path / "x.parquet")
    columns = dict.fromkeys(fields.FIELDS, "") | {"question": "question", "answer": "answer"}
    source = parquet.open_rows(str(tmp_path / "x.parquet"), columns=columns)
    assert source[0].answer == "1"
    with pytest.raises(Unusable, match=reason):
        _ = source[1]


def test_release_is_fetched_by_its_hub_id(release, monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(path, **options):
        asked.append((path, options["repo_type"]))
        return str(release)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert len(open_source("parquet", path="some/release", columns=COLUMNS, split="all")) == 15
    assert asked == [("some/release", "dataset")]


def test_a_release_is_named_after_its_id_and_not_after_its_commit(release, monkeypatch):
    import huggingface_hub

    commit = release.rename(release.with_name("0123456789abcdef"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(commit))
    rows = open_source("parquet", path="some/release-2.5", columns=COLUMNS, split="train")
    assert rows[0].source == "release-2.5"


def test_float32_numbers_are_as_they_were_written(tmp_path, write_parquet):
    types = {"q": pa.string(), "a": pa.float32(), "opts": pa.list_(pa.float32())}
    row = {"q": "?", "a": 0.1, "opts": [3.14, 0.1]}
    write_parquet(tmp_path / "x.parquet", [row], types)
    columns = COLUMNS | {"images": ""}
    example = open_source("parquet", path=str(tmp_path), columns=columns)[0]
    assert (example.answer, example.choices) == ("0.1", ("3.14", "0.1"))


def test_a_list_of_several_texts_is_no_text(tmp_path, write_parquet):
    """It may be a list of alternatives, so only a reward function can say what it means."""
    row = {"q": "Where?", "a": ["Paris", "paris"], "img": None, "opts": None}
    write_parquet(tmp_path / "x.parquet", [row], TYPES)
    source = open_source("parquet", path=str(tmp_path), columns=COLUMNS)
    assert source[0].answer == ["Paris", "paris"]


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}, {"bytes": b"", "path": ""}])
def test_a_row_without_an_image_is_a_question_in_text(tmp_path, write_parquet, cell):
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    row = {"q": "What is 2 + 2?", "a": ["4"], "img": cell, "opts": None}
    write_parquet(tmp_path / "x.parquet", [row], TYPES | {"img": struct})
    example = open_source("parquet", path=str(tmp_path), columns=COLUMNS)[0]
    assert (example.question, example.images) == ("What is 2 + 2?", ())


def test_large_row_groups_that_are_read_again_are_told_of_once(release, monkeypatch, caplog):
    monkeypatch.setattr(parquet, "_SLOW_GROUP_BYTES", 0)
    source = open_source("parquet", path=str(release), split="train", columns=COLUMNS)
    for index in range(7):
        _ = source[index]
    assert not caplog.messages
    for index in (0, 6, 2, 0):
        _ = source[index]
    (message,) = caplog.messages
    assert "is slow to train on" in message and "care_jax.commands.prepare" in message


def test_other_columns_are_kept_except_bytes(tmp_path, write_parquet, picture):
    types = TYPES | {
        "a": pa.list_(pa.float64()),
        "size": pa.struct([("w", pa.int64()), ("tags", pa.list_(pa.string()))]),
        "day": pa.date32(),
        "mask": pa.binary(),
        "views": pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    }
    row = {"q": "Where?", "a": [1.5, 2.0], "img": "p.png", "opts": None, "mask": b"m", "views": []}
    row |= {"size": {"w": 3, "tags": ["x"]}, "day": datetime.date(2025, 1, 2)}
    write_parquet(tmp_path / "train.parquet", [row], types)
    (tmp_path / "p.png").write_bytes(picture())
    example = open_source("parquet", path=str(tmp_path), columns=COLUMNS)[0]
    assert example.answer == [1.5, 2.0]
    assert example.extra == {"size": {"w": 3, "tags": ["x"]}, "day": "2025-01-02"}


BYTES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_columns_of_images_are_named_or_declined(tmp_path, write_parquet, picture):
    types = {"q": pa.string(), "a": pa.string(), "views": pa.list_(BYTES), "image": pa.string()}
    row = {"q": "?", "a": "1", "views": [{"bytes": picture(), "path": None}], "image": "gone.png"}
    path = str(write_parquet(tmp_path / "x.parquet", [row], types))
    columns = {"question": "q", "answer": "a"}
    with pytest.raises(ValueError, match=r"columns.images must name .*, where views has bytes, go"):
        open_source("parquet", path=path, columns=columns)
    images = [
        len(open_source("parquet", path=path, columns=columns | {"images": name})[0].images)
        for name in ("views", "none")
    ]
    assert images == [1, 0]
    del row["views"], types["views"]
    path = str(write_parquet(tmp_path / "x.parquet", [row], types))
    with pytest.raises(Unusable, match="an image in a field that is not read"):
        _ = open_source("parquet", path=path, columns=columns)[0]


def test_a_release_of_verl_is_read(tmp_path, write_parquet, picture):
    """Messages, whose image is in another column, and the answer in a struct."""
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    types = {
        "prompt": pa.list_(message),
        "images": pa.list_(BYTES),
        "reward_model": pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
        "units": pa.string(),
        "context": pa.string(),
        "response": pa.string(),
    }
    row = {"reward_model": {"style": "rule", "ground_truth": "3 cm"}, "units": "matter"}
    row |= {"prompt": [{"role": "user", "content": "<image>How long?"}]}
    row |= {"images": [{"bytes": picture(), "path": None}], "context": "No. ", "response": "3 cm"}
    path = str(write_parquet(tmp_path / "train.parquet", [row], types))
    columns = {"question": "prompt", "answer": "reward_model.ground_truth", "images": "images"}
    example = open_source("parquet", path=path, columns=columns | {"response": "response"})[0]
    assert (example.question, example.answer) == ("<image>How long?", "3 cm")
    assert (example.context, example.units) == ("No. ", "matter")
    assert example.extra == {"reward_model": row["reward_model"]}
    columns |= {"answer": "reward_model.truth", "context": "none"}
    with pytest.raises(
        ValueError, match=r"expected columns reward_model\.truth in .*, got prompt,"
    ):
        open_source("parquet", path=path, columns=columns)


def test_messages_may_have_parts_and_choices_letters(tmp_path, write_parquet, picture):
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    letters = pa.struct([(letter, pa.string()) for letter in "ABC"])
    types = {"prompt": pa.list_(message), "img": BYTES, "a": pa.string(), "opts": letters}
    content = [{"type": "text", "text": "How "}, {"type": "image"}, {"type": "text", "text": "?"}]
    row = {"prompt": [{"role": "user", "content": content}], "a": "B"}
    row |= {"img": {"bytes": picture()}, "opts": {"A": "30", "B": "45"}}
    path = str(write_parquet(tmp_path / "train.parquet", [row], types))
    example = open_source("parquet", path=path, columns=COLUMNS | {"question": "prompt"})[0]
    assert example.question == "How <image>?\n(A) 30\n(B) 45" and example.choices == ("30", "45")


def test_an_index_of_a_choice_is_refused(tmp_path, write_parquet):
    types = {"q": pa.string(), "a": pa.int64(), "opts": pa.list_(pa.string())}
    row = {"q": "How many legs?", "a": 1, "opts": ["2", "3", "1"]}
    path = str(write_parquet(tmp_path / "train.parquet", [row], types))
    source = open_source("parquet", path=path, columns=COLUMNS | {"images": ""})
    with pytest.raises(Unusable, match="an integer answer to choices"):
        _ = source[0]
