"""Hostile releases: each is refused in one line before any of its files is read or run."""

import json
import os
import pickle
import struct

import numpy as np
import pytest
from safetensors.numpy import save

from models.release import folder as release_folder
from models.release import transfer

WHOLE = save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)})
LENGTH = int.from_bytes(WHOLE[:8], "little")
HEADER, DATA = json.loads(WHOLE[8 : 8 + LENGTH]), WHOLE[8 + LENGTH :]


def weights(text):
    """A file with another header in front of the same bytes."""
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text)) + text + DATA


def tensor(name="a", **changes):
    return weights(HEADER | {name: HEADER.get(name, {}) | changes})


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def refusal(read, folder):
    with pytest.raises(ValueError) as error:
        read(folder)
    line = str(error.value)
    assert line.isprintable() and len(line) < 10_000 and str(folder) in line
    return line


LIES = {
    "2^60 bytes": tensor(data_offsets=[0, 2**60], shape=[2**58]),
    "2^60 bytes in another place": tensor(data_offsets=[2**60, 2**60 + 24]),
    "2^64 elements": tensor(shape=[2**32, 2**32]),
    "more elements than bytes": tensor(shape=[2, 4]),
    "overlap": tensor("b", data_offsets=[16, 24]),
    "the bytes of another": tensor("b", data_offsets=[0, 8]),
    "a hole": tensor("b", data_offsets=[26, 34]),
    "backwards": tensor(data_offsets=[24, 0]),
    "below 0": tensor(data_offsets=[-24, 0]),
    "fractions": tensor(shape=[2.0, 3.0]),
    "beyond floats": weights(json.dumps(HEADER).replace("[2, 3]", "[1e400, 3]").encode()),
    "unknown dtype": tensor(dtype="F31"),
    "nested": weights(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "no object": weights(b"[]"),
    "a header longer than the file": struct.pack("<Q", len(WHOLE)) + WHOLE[8:],
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + WHOLE[8:],
    "seven bytes": WHOLE[:7],
    "empty": b"",
    "a pickle": pickle.dumps(Payload("run")),
    "control characters": weights(HEADER | {"\x1b[2J\n\u2028": {"dtype": "F31"}}),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
@pytest.mark.parametrize("is_indexed", [False, True])
def test_weights_that_lie_are_refused(tmp_path, monkeypatch, data, is_indexed):
    monkeypatch.chdir(tmp_path)
    name = transfer.SINGLE
    if is_indexed:
        name = "pytorch_model.bin"
        index = {"weight_map": {"a": name, "b": name}}
        (tmp_path / transfer.INDEX).write_text(json.dumps(index))
    (tmp_path / name).write_bytes(data)
    assert f"{name} is missing or truncated" in refusal(transfer.read_headers, tmp_path)
    assert not (tmp_path / "run").exists()


def test_pickled_weights_alone_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(str(tmp_path / "run"))))
    assert "must hold model.safetensors" in refusal(transfer.read_headers, tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_files", [1, 30_000])
def test_an_index_of_very_many_entries_is_refused_in_a_short_line(tmp_path, num_files):
    index = {f"a{i}": f"{i % num_files}.safetensors" for i in range(30_000)}
    (tmp_path / transfer.INDEX).write_text(json.dumps({"weight_map": index}))
    (tmp_path / "0.safetensors").write_bytes(WHOLE)
    assert " more; fetch" in refusal(transfer.read_headers, tmp_path)


def test_very_many_tensors_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "MAX_TENSORS", 1)
    (tmp_path / transfer.SINGLE).write_bytes(WHOLE)
    assert "must hold at most 1 tensors" in refusal(transfer.read_headers, tmp_path)


def large(path):
    path.touch()
    os.truncate(path, release_folder.MAX_TEXT_BYTES + 1)


OUTSIDE = "outside the release; replace it by a copy"
FILES = {
    "a link to a file": (lambda path: path.symlink_to("/etc/passwd"), OUTSIDE),
    "a relative link": (lambda path: path.symlink_to("../" * 40 + "etc/passwd"), OUTSIDE),
    "a link to an endless device": (lambda path: path.symlink_to("/dev/zero"), "must be a regular"),
    "a broken link": (lambda path: path.symlink_to("gone"), "got a broken link"),
    "a link to itself": (lambda path: path.symlink_to(path), "got a broken link"),
    "a pipe": (os.mkfifo, "must be a regular file, got a pipe"),
    "a folder": (lambda path: path.mkdir(), "must be a regular file, got a folder"),
    "a large file": (large, "must have at most"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), FILES.values(), ids=FILES)
@pytest.mark.parametrize(
    "name", ["config.json", "chat_template.jinja", "additional_chat_templates/x.jinja"]
)
def test_what_is_no_file_of_the_release_is_not_opened(tmp_path, name, make, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    assert message in refusal(release_folder.check, tmp_path)


def test_links_within_a_release_and_the_cache_of_the_hub_are_followed(tmp_path):
    repository = tmp_path / "hub" / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    blobs = repository / "blobs", tmp_path / "hub" / "blobs"
    for each in (snapshot, *blobs):
        each.mkdir(parents=True)
    for number, each in enumerate(blobs):
        (each / "4567").write_text("{}")
        (snapshot / f"{number}.json").symlink_to(each / "4567")
    (snapshot / "2.json").symlink_to("0.json")
    (tmp_path / "release").symlink_to(snapshot)
    for each in (snapshot, tmp_path / "release", tmp_path / "no such folder"):
        release_folder.check(each)
    (snapshot / "3.json").symlink_to(tmp_path / "hub" / "other")
    (tmp_path / "hub" / "other").touch()
    assert OUTSIDE in refusal(release_folder.check, snapshot)
