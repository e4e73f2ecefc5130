"""Files of a release: read by header and slice, written in a stream, faults told by name."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.release import transfer

RNG = np.random.default_rng(0)
A = RNG.normal(size=(6, 4)).astype(np.float32)
B = RNG.normal(size=(5,)).astype(np.float32)
C = RNG.normal(size=(2, 3, 2)).astype(jnp.bfloat16)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder, weight_map):
    (folder / transfer.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / FIRST)
    save_file({"c": C}, tmp_path / SECOND)
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return tmp_path


def test_headers_tell_every_tensor_and_slices_read_a_part(folder):
    entries = transfer.read_headers(folder)
    assert {name: (e.path.name, e.shape, e.dtype) for name, e in entries.items()} == {
        "a": (FIRST, (6, 4), "F32"),
        "b": (FIRST, (5,), "F32"),
        "c": (SECOND, (2, 3, 2), "BF16"),
    }
    with transfer.open_tensor(entries["a"]) as source:
        np.testing.assert_array_equal(source[2:5, 1:3], A[2:5, 1:3])
    with transfer.open_tensor(entries["c"]) as source:
        np.testing.assert_array_equal(source[1:], C[1:])


def test_a_single_file_comes_before_an_index_as_in_transformers(folder):
    save_file({"b": B}, folder / transfer.SINGLE)
    assert transfer.read_headers(folder).keys() == {"b"}


def unlink(name):
    return lambda folder: (folder / name).unlink()


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def cut(folder):
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])


def twice(folder):
    save_file({"c": C, "b": B}, folder / SECOND)


def index(**files):
    return lambda folder: write_index(folder, files)


LFS = b"version https://git-lfs.github.com/spec/v1\n"
TRUNCATED = f"{SECOND} is missing or truncated"
OUTSIDE = "must map tensors to files in its folder, got"
REFUSED = {  # what is done to the folder, and a part of the message
    "missing": (unlink(SECOND), TRUNCATED),
    "truncated": (cut, TRUNCATED),
    "a pointer of git LFS": (write(SECOND, LFS), TRUNCATED),
    "twice": (twice, f"b is in {FIRST} and in {SECOND}"),
    "in another file": (index(a=FIRST, b=SECOND, c=SECOND), f"b is not in {SECOND}, where the ind"),
    "nowhere": (
        index(a=FIRST, b=FIRST, c=SECOND, d=FIRST),
        f"d is not in {FIRST}, where the index",
    ),
    "not in the index": (index(a=FIRST, c=SECOND), f"b is in {FIRST} and not in the index"),
    "an index without a map": (write(transfer.INDEX, b"{}"), "must be JSON with a weight_map"),
    "an index that is no JSON": (write(transfer.INDEX, b"{"), "must be JSON"),
    "no weights": (unlink(transfer.INDEX), "must hold model.safetensors or"),
    "another folder": (index(a="../b.safetensors"), OUTSIDE),
    "a line break": (index(a="a\nb"), OUTSIDE),
    "an empty name": (index(a=""), OUTSIDE),
    "the folder above": (index(a=".."), OUTSIDE),
}


@pytest.mark.parametrize(("fault", "message"), REFUSED.values(), ids=REFUSED)
def test_faults_of_the_files_are_named_in_one_line(folder, fault, message):
    fault(folder)
    with pytest.raises(ValueError) as error:
        transfer.read_headers(folder)
    told = str(error.value)
    assert message in told and str(folder) in told and "\n" not in told


def test_what_is_written_in_blocks_is_what_safetensors_reads(tmp_path):
    blocks = [C[:1], C[1:], np.zeros((0,), C.dtype), C.reshape(4, 3)]
    path = tmp_path / transfer.SINGLE
    transfer.write_file(path, {"c": C.shape, "flat": (4, 3)}, C.dtype, iter(blocks))
    read = load_file(path)
    np.testing.assert_array_equal(read["c"], C)
    np.testing.assert_array_equal(read["flat"], C.reshape(4, 3))
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_too_few_values_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs 24 bytes of tensors, got 12"):
        transfer.write_file(tmp_path / "x", {"c": C.shape}, C.dtype, [C[:1]])
