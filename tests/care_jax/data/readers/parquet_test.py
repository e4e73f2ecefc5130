"""Parquet: rows at random places, columns by name, broken files and cells by name and row."""

import datetime

import pyarrow as pa
import pytest

from care_jax.batch import Unusable
from care_jax.data.readers import parquet
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
        for split in ("train", "test", "test_text_only", "vision (10)", "")
    }
    assert lengths == {"train": 7, "test": 5, "test_text_only": 3, "vision (10)": 4, "": 15}
    with pytest.raises(IndexError):
        _ = source[7]


def test_column_that_is_not_there_is_named_with_those_that_are(release):
    with pytest.raises(
        ValueError, match=r"has columns q, a, img, opts, not label; change the source's columns"
    ):
        open_source("parquet", path=str(release), columns=COLUMNS | {"answer": "label"})
    with pytest.raises(ValueError, match=r"columns\.answer must name a column, got ''"):
        open_source("parquet", path=str(release), columns=COLUMNS | {"answer": ""})
    with pytest.raises(ValueError, match=r"columns\.question must name a column, got ''"):
        open_source("parquet", path=str(release), columns=dict.fromkeys(COLUMNS, ""))


def test_broken_file_and_row_group_are_named(release):
    path = release / "data" / "train-1.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    with pytest.raises(ValueError, match=r"train-1\.parquet is not a whole parquet file"):
        open_source("parquet", path=str(release), split="train", columns=COLUMNS)
    path.write_bytes(b"PAR1" + bytes(200) + data[204:])
    source = open_source("parquet", path=str(release), split="train", columns=COLUMNS)
    assert source[4].answer == "4"
    with pytest.raises(ValueError, match=r"row group 0 of .*train-1\.parquet cannot be read"):
        _ = source[5]


def test_text_that_is_not_utf8_costs_its_row_alone(tmp_path):
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok?", b"\xff\xfe?"]).buffers())
    table = pa.table({"question": bad, "answer": ["1", "2"]})
    pa.parquet.write_table(table, tmp_path / "x.parquet")
    columns = {"question": "question", "answer": "answer"}
    source = open_source(
        "parquet",
        path=str(tmp_path / "x.parquet"),
        columns=dict.fromkeys(parquet.COLUMNS, "") | columns,
    )
    assert source[0].answer == "1"
    with pytest.raises(Unusable, match="not UTF-8"):
        _ = source[1]


@pytest.mark.parametrize(
    ("type_", "value"), [(pa.timestamp("ns"), 1), (pa.timestamp("s"), 2**50), (pa.date32(), 2**30)]
)
def test_a_date_that_python_has_not_costs_its_row_alone(tmp_path, write_parquet, type_, value):
    rows = [{"question": "?", "answer": "1", "when": each} for each in (0, value)]
    types = {"question": pa.string(), "answer": pa.string(), "when": type_}
    path = str(write_parquet(tmp_path / "a.parquet", rows, types))
    columns = dict.fromkeys(parquet.COLUMNS, "") | {"question": "question", "answer": "answer"}
    source = parquet.open_rows(path, split="", columns=columns)
    assert source[0].answer == "1"
    with pytest.raises(Unusable, match="a cell that Python has no value for"):
        _ = source[1]


def test_release_that_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(path, **_):
        raise ConnectionError(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"'some/release' is no local folder and could not be"):
        open_source("parquet", path="some/release", columns=COLUMNS)
    with pytest.raises(
        ValueError, match=r"expected a folder, a file or a hub id .* does not exist"
    ):
        open_source("parquet", path=str(tmp_path / "gone"), columns=COLUMNS)


def test_release_is_fetched_by_its_hub_id(release, monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(path, **options):
        asked.append((path, options["repo_type"]))
        return str(release)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert len(open_source("parquet", path="some/release", columns=COLUMNS)) == 15
    assert asked == [("some/release", "dataset")]


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
