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


@pytest.mark.parametrize("file", ["../b.safetensors", "/etc/hosts", "a\nb", "", ".."])
def test_an_index_names_files_beside_it_alone(folder, file):
    write_index(folder, {"a": file})
    with pytest.raises(ValueError, match="must map tensors to files beside it, got") as refused:
        transfer.read_headers(folder)
    assert "\n" not in str(refused.value)


def cut(folder):
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])


def not_fetched(folder):
    (folder / SECOND).write_text("version https://git-lfs.github.com/spec/v1\n")


def twice(folder):
    save_file({"c": C, "b": B}, folder / SECOND)


def moved(folder):
    write_index(folder, {"a": FIRST, "b": SECOND, "c": SECOND, "d": FIRST})


def left_out(folder):
    write_index(folder, {"a": FIRST, "c": SECOND})


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (lambda folder: (folder / SECOND).unlink(), [f"{SECOND} is missing or cut short"]),
        (cut, [f"{SECOND} is missing or cut short"]),
        (not_fetched, [f"{SECOND} is missing or cut short"]),
        (twice, [f"b is in {FIRST} and in {SECOND}"]),
        (moved, [f"b is not in {SECOND}, where the index has it", f"d is not in {FIRST}"]),
        (left_out, [f"b is in {FIRST} and not in the index"]),
        (lambda folder: (folder / transfer.INDEX).write_text("{}"), ["with a weight_map"]),
        (lambda folder: (folder / transfer.INDEX).write_text("{"), ["must be JSON"]),
        (lambda folder: (folder / transfer.INDEX).unlink(), ["must hold model.safetensors or"]),
    ],
)
def test_faults_of_the_files_are_named(folder, fault, messages):
    fault(folder)
    with pytest.raises(ValueError) as error:
        transfer.read_headers(folder)
    assert all(message in str(error.value) for message in messages), error.value
    assert str(folder) in str(error.value)


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
