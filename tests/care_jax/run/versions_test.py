"""The commit of a clone is git's, that of an image is what it was built with; starts of a run."""

import json

import jax
import pytest

from care_jax.devices.sharding import make_mesh
from care_jax.run import versions
from configs import tiny


def test_an_image_names_the_commit_it_was_built_with(monkeypatch, tmp_path):
    monkeypatch.setenv("CARE_JAX_COMMIT", "abc12345+")
    assert versions.versions()["commit"] != "abc12345+"  # this is a clone
    monkeypatch.setattr(versions, "_ROOT", tmp_path)
    assert versions.versions()["commit"] == "abc12345+"
    monkeypatch.delenv("CARE_JAX_COMMIT")
    assert "commit" not in versions.versions()


def test_a_start_has_the_command_the_devices_and_what_the_command_line_changed(
    tmp_path, monkeypatch
):
    config = tiny.get_config()
    config.rl.learning_rate = 0.25
    mesh = make_mesh(**config.mesh, devices=jax.devices()[:2])
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "/x/care-jax", "train", "--a=b c"])
    versions.write_start(config, tmp_path, mesh, {"rl.learning_rate": 0.25, "data.buckets[0]": 1})
    versions.write_start(config, tmp_path, mesh, (), given=("rl",))
    first, again = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert first["changed"] == {"rl.learning_rate": 0.25, "data.buckets": [[48, 64]]}
    assert (first["command"], first["devices"]) == ("care-jax train '--a=b c'", "2 × cpu")
    assert (first["given"], again["given"]) == ([], ["rl"])
    assert again["stages"] == ["sft", "evaluate", "rl", "evaluate"]
    assert again["changed"] == {} and first["time"].endswith("+00:00")


@pytest.mark.parametrize("there", ["", "{}", "{", "[]"])
def test_an_evaluation_keeps_the_configuration_of_the_training(tmp_path, there):
    """Else the next export would take the step that the evaluation was of."""
    path, config = tmp_path / "config.json", tiny.get_config()
    if there:
        path.write_text(there)
    steps = []
    for stages, step in (
        (("evaluate",), "1"),
        (("export",), "2"),
        (("sft", "rl"), "last"),
        (("evaluate",), "4"),
        (("rl",), "best"),
    ):
        config.stages, config.export.step = stages, step
        versions.write_config(config, tmp_path)
        steps.append(json.loads(path.read_text())["export"]["step"])
    assert steps == ["1", "2", "last", "last", "best"]


def test_infinite_settings_are_strings_since_json_has_no_such_numbers(tmp_path):
    config = tiny.get_config()
    config.state_check.max_loss_factor = float("inf")
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    versions.write_config(config, tmp_path)
    versions.write_start(config, tmp_path, mesh, {"state_check.max_loss_factor": 0})

    def refuse(name):
        raise AssertionError(name)

    texts = [(tmp_path / name).read_text() for name in ("config.json", "starts.jsonl")]
    settings, start = (json.loads(text, parse_constant=refuse) for text in texts)
    assert settings["state_check"]["max_loss_factor"] == "Infinity"
    assert start["changed"] == {"state_check.max_loss_factor": "Infinity"}


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/bin/python3", "-m", "care_jax.main", "--a=1"], "python3 -m care_jax.main --a=1"),
        (["/env/bin/python", "/env/bin/care-jax", "train"], "care-jax train"),
        (["python"], "python"),
    ],
)
def test_a_command_is_shown_as_it_was_written(argv, shown):
    assert versions.command(argv) == shown
