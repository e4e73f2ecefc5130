"""Sums of a folder's files: what they find, shared among processes, and their own damage."""

import json
import os
import types

import pytest

from care_jax.run import integrity


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    for index in range(5):
        (tmp_path / "deep" / f"file{index}").write_bytes(bytes([index]) * 100)
    (tmp_path / "later").write_text("1")
    integrity.write_manifest(tmp_path, leave_out=("later",))
    return tmp_path


def test_a_whole_folder_has_no_damage_whatever_is_added_or_left_out(folder):
    (folder / "later").write_text("2")
    (folder / "new").write_text("3")
    assert integrity.find_damage(folder) == ""
    (folder / integrity.MANIFEST).unlink()
    assert integrity.find_damage(folder) == "" and not integrity.has_manifest(folder)


def test_every_fault_is_told_with_its_file(folder):
    (folder / "deep" / "file1").write_bytes(b"x" * 100)
    (folder / "deep" / "file3").write_bytes(b"x")
    os.remove(folder / "deep" / "file4")
    assert integrity.find_damage(folder) == (
        "deep/file1 has another SHA-256 than when it was written, deep/file3 has 1 bytes instead "
        "of 100 and 1 more files"
    )
    sizes_alone = integrity.find_damage(folder, most_bytes=99)
    assert "file1" not in sizes_alone and "file3" in sizes_alone


def test_processes_share_the_files(folder):
    for index in range(5):
        path = folder / "deep" / f"file{index}"
        data = path.read_bytes()
        path.write_bytes(b"x" * 100)
        found = [integrity.find_damage(folder, part=part, num_parts=3) for part in range(3)]
        assert sum(map(bool, found)) == 1 and path.name in "".join(found)
        path.write_bytes(data)


@pytest.mark.parametrize(
    "other", ["another export", "another shard", "another config", "no manifest"]
)
def test_another_copy_of_a_release_on_another_process_is_refused(folder, monkeypatch, other):
    (folder / "model.safetensors").write_bytes(b"1")
    integrity.write_manifest(folder)
    told = []
    gather = types.SimpleNamespace(gather_json=lambda ours: told.append(ours) or [*told])
    monkeypatch.setattr(integrity, "distributed", gather)
    integrity.refuse_other_copies(folder)
    integrity.refuse_other_copies(folder)  # two processes with the same
    if other == "another shard":
        (folder / "model.safetensors").write_bytes(b"2")
    elif other == "another config":
        (folder / "config.json").write_text("{}")
    else:
        os.remove(folder / integrity.MANIFEST)
    if other == "another export":
        (folder / "model.safetensors").write_bytes(b"2")
        integrity.write_manifest(folder)
    with pytest.raises(ValueError, match="on all processes, got others on 2 than on 0; give all"):
        integrity.refuse_other_copies(folder)


def test_a_file_written_again_gets_a_new_sum(folder):
    (folder / "deep" / "file2").write_text("new")
    integrity.update_manifest(folder, "deep/file2")
    assert integrity.find_damage(folder) == ""
    assert len(json.loads((folder / integrity.MANIFEST).read_text())["files"]) == 5


def test_a_damaged_manifest_is_damage(folder):
    path = folder / integrity.MANIFEST
    text = path.read_text()
    path.write_text(text.replace('"bytes": 100', '"bytes": 101', 1))
    assert integrity.find_damage(folder) == "sha256.json is unreadable (its own sum differs)"
    for broken in (text[:-10], "[]", "3", "{}"):
        path.write_text(broken)
        assert integrity.find_damage(folder).startswith("sha256.json is unreadable (")


def test_a_folder_in_the_place_of_another_is_damage(folder, tmp_path):
    integrity.write_manifest(folder, leave_out=("later",), of="step 1")
    integrity.update_manifest(folder, "deep/file2")
    assert integrity.find_damage(folder, of="step 1") == ""
    assert integrity.find_damage(folder, of="step 2") == "its files are those of step 1"
    path = folder / integrity.MANIFEST
    path.write_text(path.read_text().replace("step 1", "step 2"))
    assert "unreadable (its own sum differs)" in integrity.find_damage(folder, of="step 2")
