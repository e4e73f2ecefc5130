"""A file is replaced whole or not at all."""

import pathlib

import pytest

from care_jax.devices.whole_file import write_whole


def test_a_writer_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_whole(path, "first ≤ second")
    assert path.read_text(encoding="utf-8") == "first ≤ second"
    written = pathlib.Path.write_text

    def cut_off(self, text, **options):
        written(self, text[:3], **options)
        raise OSError("no space left")

    monkeypatch.setattr(pathlib.Path, "write_text", cut_off)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, "something else")
    assert path.read_text(encoding="utf-8") == "first ≤ second"
    monkeypatch.undo()
    write_whole(path, "something else")
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
