"""A model's release: a folder with config.json, or a hub id's snapshot."""

import huggingface_hub
import jax
import pytest

from care_jax.data.readers import hub
from care_jax.devices import distributed


def test_a_folder_with_a_config_is_taken_as_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"model.path .* holds no config.json; set it to a folder"):
        hub.find(str(tmp_path), kind="model")
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


@pytest.mark.parametrize("path", ["", "./release", "/no/such/release", "~/no-such-release"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # not called
    with pytest.raises(ValueError, match=r"does not exist; correct model.path"):
        hub.find(path, kind="model")


def test_a_hub_id_that_cannot_be_fetched_is_one_line(monkeypatch):
    def fail(name, **_):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"'someone/none' is no local folder and could not") as e:
        hub.find("someone/none", kind="model")
    assert "\n" not in str(e.value) and "OSError" in str(e.value)


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
        with pytest.raises(ValueError, match="could not be fetched"):
            hub.find("someone/some-release")
    else:
        assert hub.find("someone/some-release") == tmp_path
    assert called == (["download", "barrier"] if index == 0 else ["barrier", "download"])
    assert hub.find(str(tmp_path)) == tmp_path and len(called) == 2  # a folder needs no turns
