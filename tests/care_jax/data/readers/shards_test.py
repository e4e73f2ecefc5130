"""Shards: what is written is read, at any place; what is broken is named."""

import re

import pytest
from PIL import Image

from care_jax.batch import Example
from care_jax.data.readers import shards
from care_jax.data.sources import open_source


def example(number, picture, **changes):
    fields = {
        "id": f"é{number}",
        "source": "made",
        "images": (picture(number), picture(number + 100, format="JPEG")),
        "question": "<image> or <image>?\n(A) x\n(B) y",
        "answer": "A",
        "choices": ("x", "y"),
        "rationale": "Look: √2.",
        "response": "<think>Look</think><answer>A</answer>",
        "tolerance": 0.05,
        "max_pixels": 5000,
        "repair": "placeholder put in front",
    }
    return Example(**fields | changes)


@pytest.fixture
def folder(tmp_path, picture):
    """Two sources, the first in three shards."""
    sources = {}
    for name, count in (("one", 5), ("two", 1)):
        writer = shards.ShardWriter(tmp_path, name, shard_bytes=2 * len(picture(0)))
        for number in range(count):
            writer.write(example(number, picture, source=name))
        writer.close()
        sources[name] = {"shards": writer.shards}
    shards.write_manifest(tmp_path, {"sources": sources})
    return tmp_path


def test_records_keep_every_field(picture):
    whole = example(1, picture)
    assert shards.from_record(shards.to_record(whole)) == whole
    box = example(2, picture, answer=[1.5, {"é": None}], extra={"size": [4, 3], "é": {"a": True}})
    assert shards.from_record(shards.to_record(box)) == box
    behind = example(3, picture, context="<think>No. Wait.", response=" Yes</think>")
    assert shards.from_record(shards.to_record(behind)) == behind
    bare = Example("i", "s", (), "?", "1")
    assert not re.search(b"extra|context", shards.to_record(bare))
    assert shards.from_record(shards.to_record(bare)) == bare
    drawn = shards.from_record(
        shards.to_record(Example("i", "s", (Image.new("RGB", (8, 4), "red"),), "<image>", "1"))
    )
    assert drawn.images[0].startswith(b"\x89PNG")


def test_examples_are_found_at_any_place(folder, picture):
    rows = open_source("arrayrecord", path=str(folder))
    assert len(shards.read_manifest(folder)["sources"]["one"]["shards"]) == 3
    assert [rows[i].id for i in (5, 3, 0, 4)] == ["é0", "é3", "é0", "é4"]
    assert rows[2] == example(2, picture, source="one")
    only = open_source("arrayrecord", path=str(folder), subset="two")
    assert len(only) == 1 and only[0].source == "two"
    with pytest.raises(ValueError, match="holds one, two, not 'three'"):
        open_source("arrayrecord", path=str(folder), subset="three")


def test_shard_of_another_size_or_missing_is_named(folder):
    path = folder / "one-00001.arrayrecord"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"one-00001\.arrayrecord of \d+ bytes, got \d+; copy"):
        open_source("arrayrecord", path=str(folder))
    path.unlink()
    with pytest.raises(ValueError, match=r"one-00001\.arrayrecord of \d+ bytes, which is missing"):
        open_source("arrayrecord", path=str(folder))


def test_shard_in_the_place_of_another_is_named(folder):
    last, other = folder / "one-00002.arrayrecord", folder / "one-00001.arrayrecord"
    assert last.stat().st_size == other.stat().st_size
    other.write_bytes(last.read_bytes())
    with pytest.raises(ValueError, match=r"one-00001\.arrayrecord is corrupt .*another SHA-256"):
        _ = open_source("arrayrecord", path=str(folder))[2]


def test_flipped_bit_anywhere_names_the_shard(folder):
    """Also in padding, and in a record that is not the one that is read."""
    path = folder / "one-00001.arrayrecord"
    data = path.read_bytes()
    for place in range(0, len(data), len(data) // 60):
        broken = bytearray(data)
        broken[place] ^= 0x10
        path.write_bytes(broken)
        rows = open_source("arrayrecord", path=str(folder))
        assert rows[0].id == "é0"
        with pytest.raises(ValueError, match=r"one-00001\.arrayrecord is corrupt at record 0 of 2"):
            _ = rows[2]
    path.write_bytes(data)
    assert open_source("arrayrecord", path=str(folder))[2].id == "é2"


def test_number_of_records_must_be_the_manifests(folder):
    manifest = shards.read_manifest(folder)
    manifest["sources"]["one"]["shards"][1]["num_records"] = 1
    shards.write_manifest(folder, manifest)
    with pytest.raises(ValueError, match=r"one-00001\.arrayrecord is corrupt .*it has 2 records"):
        _ = open_source("arrayrecord", path=str(folder))[2]


def test_folder_without_its_manifest_is_not_taken_for_a_whole_one(folder):
    path = folder / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(ValueError, match="has format 9, expected 1"):
        open_source("arrayrecord", path=str(folder))
    path.write_text(text[:-20])
    with pytest.raises(ValueError, match="must be a manifest in JSON"):
        open_source("arrayrecord", path=str(folder))
    path.unlink()
    with pytest.raises(ValueError, match=r"expected a prepared folder with manifest\.json"):
        open_source("arrayrecord", path=str(folder))
