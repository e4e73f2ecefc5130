"""A model's release: a folder with config.json, or a hub id's snapshot."""

import errno

import huggingface_hub
import jax
import pytest

from care_jax.data.readers import hub
from care_jax.devices import distributed


def test_a_folder_with_a_config_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert hub.find(str(tmp_path), kind="model") == tmp_path


def test_a_hub_id_is_its_snapshot(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: asked.append((name, options)) or str(tmp_path),
    )
    assert hub.find("someone/some-release", kind="model") == tmp_path
    assert asked == [("someone/some-release", {"repo_type": "model", "allow_patterns": None})]


REFUSED = [
    (".", "model", r"model.path '\.' holds no config.json; set it to a folder"),
    ("", "model", "got '', which does not exist; correct model.path"),
    ("./release", "model", "does not exist; correct model.path"),
    ("~/release", "model", "does not exist; correct model.path"),
    ("/release", "dataset", "does not exist; correct the source's path"),
    ("someone/none", "model", r"'someone/none' .* \(OSError: no route\); download it first"),
]


@pytest.mark.parametrize(("path", "kind", "message"), REFUSED)
def test_a_release_that_cannot_be_found_is_one_line(path, kind, message, tmp_path, monkeypatch):
    def fail(name, **_):
        assert name == "someone/none"  # the others are not requested from the hub
        raise OSError("no route\nto the hub")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=message) as error:
        hub.find(path, kind=kind)
    assert "\n" not in str(error.value)


def test_a_disk_without_room_is_named(monkeypatch):
    def fail(name, **_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"\(OSError: .*No space left on device\); set HF_HOME to"):
        hub.find("someone/none", kind="model")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_the_first_process_downloads_before_the_others(tmp_path, monkeypatch, index, fails):
    """And they wait for it no longer than it takes, also where it fails."""
    called = []

    def download(name, **_):
        called.append("download")
        if fails:
            raise OSError
        return str(tmp_path)

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(distributed, "gather_json", lambda value: called.append("barrier"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if fails:
        with pytest.raises(ValueError, match="could not be downloaded"):
            hub.find("someone/some-release")
    else:
        assert hub.find("someone/some-release") == tmp_path
    assert called == (["download", "barrier"] if index == 0 else ["barrier", "download"])
    assert hub.find(str(tmp_path)) == tmp_path and len(called) == 2  # a folder needs no turns
