"""Hostile rows are left out and counted, or accepted, in little memory; the others are read."""

import io
import json
import os
import struct
import warnings
import zipfile
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from care_jax.batch import Unusable
from care_jax.data.readers import json_rows, jsonl, parquet, virl39k
from care_jax.data.rows import MAX_IMAGES, OUTSIDE, checked
from care_jax.prompts import images

GOOD = {"id": "good", "question": "How many?", "answer": "3"}


def read(tmp_path, *rows):
    """The usable rows of a file of lines, each between two good ones; the others by reason."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    good = json.dumps(GOOD).encode()
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([good, *lines, good]))
    examples, left_out = checked(jsonl.open_rows(str(tmp_path / "rows.jsonl")), "rows")
    assert [examples[0].id, examples[-1].id] == ["good", "good"]
    return examples[1:-1], dict(left_out)


LONG = "text too long"
LEFT_OUT = {
    "10 MB of question": ({"question": "?" * 10_000_000}, LONG),
    "12 MB that nobody sees": ({"question": "\u200b" * 2_000_000}, "no question"),
    "10 MB of placeholders": ({"question": "<image>" * 1_500_000}, "images and placeholders"),
    "10 MB of answer": ({"answer": "\\frac{" * 1_500_000}, LONG),
    "10 MB of choices": ({"answer": "A", "choices": ["{" * 400_000] * 26}, LONG),
    "a million choices": ({"choices": ["3"] * 1_000_000}, "more than 26 choices"),
    "a million objects": ({"choices": [{}] * 1_000_000}, "choices are not a list of texts and"),
    "a long id": ({"id": "7" * 60_000}, "id of more than 1024 characters"),
    "a million images": ({"images": ["a.png"] * 1_000_000}, f"more than {MAX_IMAGES} images"),
    "nested images": ({"images": [["a.png"] * 40] * 2}, f"more than {MAX_IMAGES} images"),
    "a deep path": ({"image": "a/" * 5_000_000}, "image path that no file can have"),
    "NUL in a path": ({"image": "a\0.png"}, "image path that no file can have"),
    "a surrogate": ({"question": "\ud800?"}, "a lone surrogate"),
    "a surrogate in a path": ({"image": "\udfff.png"}, "a lone surrogate"),
    "an absolute path": ({"image": "/etc/hostname"}, OUTSIDE),
    "a path above": ({"image": "a/../../b.png"}, OUTSIDE),
    "a URL": ({"image": "http://127.0.0.1/a.png"}, "image is a URL"),
    "a data URI": ({"image": "data:image/png;base64,aaaa"}, "image is a URL"),
    "a file URL": ({"image": "file:///etc/hostname"}, "image missing"),
    "a device": ({"image": "null"}, OUTSIDE),
    "a pipe": ({"image": "pipe.png"}, "image missing"),
    "a folder": ({"image": "."}, "image missing"),
    "an SVG": ({"image": "a.svg"}, "image is none of JPEG, PNG"),
    "another file": ({"image": "rows.jsonl"}, "image is none of JPEG, PNG"),
    "a link out of the folder": ({"image": "link.png"}, OUTSIDE),
    "a linked folder": ({"image": "folder/a.png"}, OUTSIDE),
    "a huge sparse file": ({"image": "sparse.webp"}, "image file of more than 256 MiB"),
    "17 MB of row": ({"more": "x" * 17_000_000}, "row of more than 16 MiB"),
    "17 MB of space": (b" " * 17_000_000, "row of more than 16 MiB"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_hostile_row_is_left_out_and_told_in_one_line(tmp_path, change, reason, caplog):
    folder = tmp_path / "release"
    folder.mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "null").symlink_to("/dev/zero")
    (folder / "a.svg").write_text("<svg/>")
    os.mkfifo(folder / "pipe.png")
    (folder / "sparse.webp").write_bytes(b"RIFF\xff\xff\xff\x7fWEBPVP8 ")
    os.truncate(folder / "sparse.webp", 2**40)
    row = change if isinstance(change, bytes) else GOOD | change
    examples, left_out = read(folder, row)
    assert not examples and [reason in each for each in left_out] == [True]
    for record in caplog.records:
        assert len(record.getMessage()) < 1000 and "\n" not in record.getMessage()


@pytest.mark.parametrize("depth", [65, 10_000, 1_000_000])
def test_nesting_is_limited(tmp_path, depth):
    row = b'{"question": "?", "answer": "1", "more": %s}' % (b"[" * depth + b"]" * depth)
    ((reason, count),) = read(tmp_path, row)[1].items()
    assert count == 1 and reason in ("not JSON", "nested more than 64 deep")


ACCEPTED = {
    "of a name that comes twice the last": (b'{"question":"?","answer":"1","answer":"2"}', "2"),
    "carriage returns": (b'{"question":"?",\r"answer":"2"}\r', "2"),
    "a byte order mark in every line": (b'\xef\xbb\xbf{"question":"?","answer":"2"}', "2"),
    "NUL in the text": (b'{"question":"?\\u0000","answer":"2"}', "2"),
    "a number beyond floats": (b'{"question":"?","answer":"2","more":1e400}', "2"),
}


@pytest.mark.parametrize(("row", "answer"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_can_be_read_is_accepted(tmp_path, row, answer):
    (example,), left_out = read(tmp_path, row)
    assert example.answer == answer and not left_out


def test_an_array_of_strings_with_many_escapes_is_indexed(tmp_path):
    row = json.dumps(GOOD | {"more": "\n" * 3_000_000})
    path = tmp_path / "rows.json"
    unclosed = '{"more": "' + "\\\\" * 3_000_000
    path.write_text(f"[{row}, {row}, {unclosed}]")
    with pytest.raises(ValueError, match="to be one complete JSON array"):
        json_rows.JsonRows(path)
    path.write_text(f"[{row}, {row}]")
    assert [each["id"] for each in json_rows.JsonRows(path)] == ["good", "good"]


def test_linked_images_of_a_cached_snapshot_are_read(tmp_path):
    snapshot, blobs = tmp_path / "datasets--a--b/snapshots/01", tmp_path / "datasets--a--b/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(blobs / "45", "PNG")
    (snapshot / "a.png").symlink_to("../../blobs/45")
    assert read(snapshot, GOOD | {"image": "a.png"})[1] == {}


# Images

SIDE = 100_000


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *chunks, data=b""):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + body + chunk(b"IEND", b"")


def tiff(width, height, **changes):
    tags = {256: width, 257: height, 258: 8, 259: 8, 262: 1, 273: 8, 277: 1, 278: height, 279: 9}
    tags |= {int(name[1:]): value for name, value in changes.items()}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())]
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + b"\0\0\0\0"


def webp(width, height):
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp(width, height):
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info


def many_scans():
    """A progressive JPEG whose last scan comes 200 times."""
    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 200 + data[-2:]


TEXT_BOMB = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 2**27))
PROFILE_BOMB = chunk(b"iCCP", b"a\0\0" + zlib.compress(b"\0" * 2**27))
BOMBS = {
    "PNG": png(SIDE, SIDE),
    "PNG of no width": png(0, SIDE),
    "PNG of 2^31": png(2**31 - 1, 2**31 - 1),
    "PNG with too much data": png(40, 30, data=b"\0" * 2**27),
    "PNG with a large text": png(32, 32, TEXT_BOMB),
    "PNG with a large profile": png(32, 32, PROFILE_BOMB),
    "TIFF": tiff(SIDE, SIDE),
    "TIFF of 2^32": tiff(2**32 - 1, 2**32 - 1),
    "TIFF with strips of 2^32 bytes": tiff(64, 64, _279=2**32 - 1),
    "TIFF with tiles of 2^31": tiff(64, 64, _322=2**31, _323=2**31, _324=8, _325=9),
    "TIFF of 2^31 channels": tiff(64, 64, _277=2**31),
    "WebP": webp(SIDE, 40_000),
    "WebP of 2^24": webp(2**24, 2**24),
    "GIF": b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + b",",
    "BMP": bmp(SIDE, SIDE),
    "BMP upside down": bmp(SIDE, -SIDE),
    "JPEG of many scans": many_scans(),
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_an_image_bomb_is_left_out(tmp_path, data):
    (tmp_path / "a.png").write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for image in (data, tmp_path / "a.png"):
            try:
                small = images.open_image(image)
            except Unusable:
                continue
            assert max(small.size) <= 64  # its bomb was not read


def test_many_scans_are_refused_and_a_usual_progressive_file_is_read():
    with pytest.raises(Unusable, match="JPEG of more than 100 scans"):
        images.open_image(many_scans())
    file = io.BytesIO()
    Image.effect_noise((64, 64), 80).convert("RGB").save(file, "JPEG", progressive=True)
    assert images.open_image(file.getvalue()).size == (64, 64)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_picture_is_read(format):
    file = io.BytesIO()
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")] * 500
    frames[0].save(file, format, save_all=True, append_images=frames[1:])
    red, green, blue = images.open_image(file.getvalue()).convert("RGB").getpixel((9, 9))
    assert red > 200 and max(green, blue) < 50


def test_an_archive_is_not_unpacked_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 100_000)
    with zipfile.ZipFile(tmp_path / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images/a.png", png(32, 32, data=b"\0" * 97 * 32))
        archive.writestr("images/b.png", b"\0" * 2**27)
    rows = [
        {"qid": name, "question": "?", "answer": "1", "image": f"images/{name}.png"}
        for name in "ab"
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    examples, left_out = checked(virl39k.open_rows(str(tmp_path)), "virl39k")
    assert [each.id for each in examples] == ["a"]
    assert left_out == {"image file of more than 0 MiB": 1}


# Parquet

COLUMNS = {"question": "question", "answer": "answer"}


def open_table(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return parquet.open_rows(str(path), columns=COLUMNS)


def reason_of(source, row):
    with pytest.raises(Unusable) as error:
        _ = source[row]
    return str(error.value)


@pytest.mark.parametrize("column", ["question", "more"])
def test_a_large_cell_costs_its_row_alone(tmp_path, monkeypatch, column):
    monkeypatch.setattr(parquet, "MAX_CELL_BYTES", 2**20)
    cells = {"question": ["?"] * 3, "answer": ["1"] * 3, "more": [""] * 3}
    cells[column][1] = "x" * 2**21
    source = open_table(tmp_path / "x.parquet", cells)
    assert "a cell of more than 1 MiB" in reason_of(source, 1)
    assert [source[0].answer, source[2].answer] == ["1", "1"]


def test_a_large_row_group_costs_its_rows_and_is_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 2**20)
    cells = {"question": ["x" * 2**18] * 8 + ["?"] * 8, "answer": ["1"] * 16}
    source = open_table(
        tmp_path / "x.parquet", cells, row_group_size=8, use_dictionary=False, compression="zstd"
    )
    opened = parquet._open
    with monkeypatch.context() as only:
        only.setattr(parquet, "_open", lambda path: _Footer(opened(path)))
        assert "in a row group of more than 0 GiB" in reason_of(source, 3)
    assert source[8].question == "?"


class _Footer:
    """A parquet file of which only the footer may be read."""

    def __init__(self, file):
        self.metadata = file.metadata


def test_a_dictionary_does_not_grow_beyond_the_limit(tmp_path, monkeypatch):
    """A file of 1 kB, whose one value stands for 400 MB of cells."""
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 2**24)
    monkeypatch.setattr(parquet, "_DECODED_BYTES", 2**22)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), ["x" * 2**20])
    cells = {"question": texts, "answer": ["1"] * 400}
    source = open_table(tmp_path / "x.parquet", cells, store_schema=False, compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 2**14
    assert "in a row group of more than" in reason_of(source, 0)


def test_a_footer_that_lies_about_its_rows_is_refused(tmp_path):
    source = open_table(tmp_path / "x.parquet", {"question": ["?"] * 100, "answer": ["1"] * 100})
    assert len(source) == 100
    data = (tmp_path / "x.parquet").read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:].replace(b"\xc8\x01", b"\xfe\x7f")  # 100 rows as zigzag varint, and 8191
    (tmp_path / "x.parquet").write_bytes(data[:start] + footer)
    with pytest.raises(ValueError, match="parquet") as error:
        source = parquet.open_rows(str(tmp_path / "x.parquet"), columns=COLUMNS)
        _ = source[len(source) - 1]
    assert "\n" not in str(error.value) and not isinstance(error.value, Unusable)
