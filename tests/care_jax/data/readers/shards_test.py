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
    with pytest.raises(ValueError, match=r"expected a record of \d+ bytes, got \d+"):
        shards.from_record(shards.to_record(whole)[:-1])
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
    with pytest.raises(ValueError, match=r"subset must be one of one, two in .*, got 'three'"):
        open_source("arrayrecord", path=str(folder), subset="three")


def test_flipped_bit_anywhere_names_the_shard(folder):
    """Also in padding, and in a record that is not the one that is read, as of another shard."""
    path = folder / "one-00001.arrayrecord"
    data = path.read_bytes()
    for index in range(0, len(data), len(data) // 60):
        broken = bytearray(data)
        broken[index] ^= 0x10
        path.write_bytes(broken)
        rows = open_source("arrayrecord", path=str(folder))
        assert rows[0].id == "é0"
        with pytest.raises(ValueError, match=rf"{SHARD} is corrupt at record 0 of 2 \(its SHA-256"):
            _ = rows[2]
    path.write_bytes(data)
    assert open_source("arrayrecord", path=str(folder))[2].id == "é2"


SHARD, MANIFEST = "one-00001.arrayrecord", "manifest.json"


def without_sum(text):
    """As manifests were written before they had a sum."""
    return text.replace(b'"format": 2', b'"format": 1')


REFUSED = {
    "cut": (SHARD, lambda data: data[:9], rf"{SHARD} of \d+ bytes, got 9; copy it again, or"),
    "missing": (SHARD, lambda _: None, rf"{SHARD} of \d+ bytes, got no file; copy it again, or"),
    "fewer records": (
        MANIFEST,
        lambda text: without_sum(text).replace(b'"num_records": 2', b'"num_records": 1'),
        r"one-00000.arrayrecord is corrupt at record 0 of 1 \(it has 2 records\)",
    ),
    "no records": (
        MANIFEST,
        lambda text: re.sub(rb'(?s)"shards": \[.*?\]', b'"shards": []', without_sum(text)),
        "has no example of any source; prepare it again",
    ),
    "another manifest": (
        MANIFEST,
        lambda text: text.replace(b'"num_records": 2', b'"num_records": 3'),
        r"must be a whole manifest in JSON, got .*its own SHA-256 differs.*; copy it again, or",
    ),
    "format": (MANIFEST, lambda text: text.replace(b"2", b"9", 1), "has format 9, expected 2"),
    "no JSON": (MANIFEST, lambda text: text[:-20], "must be a whole manifest in JSON, got"),
    "no manifest": (MANIFEST, lambda _: None, f"expected a prepared folder with {MANIFEST}, got"),
}


def test_a_manifest_without_a_sum_is_read(folder):
    (folder / MANIFEST).write_bytes(without_sum((folder / MANIFEST).read_bytes()))
    assert open_source("arrayrecord", path=str(folder))[2].id == "é2"


@pytest.mark.parametrize(("file", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_incomplete_folder_is_refused(folder, file, change, message):
    content = change((folder / file).read_bytes())
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        _ = open_source("arrayrecord", path=str(folder))[0]
