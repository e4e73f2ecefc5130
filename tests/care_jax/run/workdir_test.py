"""From which workdirs a run may go on, and what of it must come from Python again."""

import dataclasses
import io
import shutil

import pytest

from care_jax.devices import distributed
from care_jax.devices.sharding import make_mesh
from care_jax.run import versions, workdir
from care_jax.run.run import Run
from care_jax.run.workdir import check_given, check_workdir, read_by
from configs import tiny


@pytest.fixture
def run(policy, tmp_path):
    return Run(tiny.get_config(), policy, make_mesh(1, 4, 2), tmp_path)


PYTHON = ("rl", "evaluate", "reward")


@pytest.fixture
def begun(run):
    """The run's RL has a checkpoint, with what came from Python."""

    def begun(given):
        versions.write_config(run.config, run.workdir, given)
        step = run.workdir / "checkpoints" / "rl" / "2"
        step.mkdir(parents=True, exist_ok=True)
        (step / "commit_success.txt").touch()
        return run.config, run.workdir

    return begun


@pytest.mark.parametrize(
    ("before", "given", "read", "changes", "missing"),
    [
        (PYTHON, PYTHON, PYTHON, {}, ""),
        (PYTHON, (), ("rl", "reward"), {}, "data.train and verifier.reward"),
        (PYTHON, ("rl",), ("rl", "reward"), {}, "verifier.reward"),
        (PYTHON, (), ("evaluate", "reward"), {}, "data.test and verifier.reward"),
        (PYTHON, (), ("evaluate",), {"data.test.path": "a.jsonl"}, ""),
        (PYTHON, (), ("evaluate", "reward"), {"verifier.reward": "m:f"}, "data.test"),
        (("rl",), (), ("evaluate", "reward"), {}, ""),
        (PYTHON, (), (), {}, ""),
        ((), (), PYTHON, {}, ""),
    ],
)
def test_what_came_from_python_is_needed_again(begun, before, given, read, changes, missing):
    config, workdir = begun(before)
    config.update_from_flattened_dict(changes)
    if not missing:
        check_given(config, workdir, given, read)
        return
    others = "set data.test, " if missing == "data.test" else ""  # the other keys are fixed
    said = (
        f"own from Python in place of {missing}: call care_jax.train_on with it, {others}or choose"
    )
    with pytest.raises(ValueError, match=said):
        check_given(config, workdir, given, read)


@pytest.mark.parametrize("given", [("rl",), ("rl", "reward")])
def test_a_stage_that_has_begun_is_given_nothing_new(begun, given):
    config, workdir = begun(())
    names = " and ".join({"rl": "data.train", "reward": "verifier.reward"}[name] for name in given)
    with pytest.raises(ValueError, match=f"began with {names} of its configuration, got others"):
        check_given(config, workdir, given, PYTHON)
    check_given(config, workdir, ("evaluate",), PYTHON)
    shutil.rmtree(workdir / "checkpoints")
    check_given(config, workdir, given, PYTHON)


@pytest.mark.parametrize("before", [b"[]", b"{", b'{"stages": ["rl"]}'])
def test_a_run_of_an_earlier_version_may_go_on(begun, before):
    config, workdir = begun(())
    (workdir / "config.json").write_bytes(before)
    check_given(config, workdir, ("rl", "reward"), PYTHON)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (("rl", "evaluate"), ["rl", "evaluate", "reward"]),
        (("sft", "rl"), ["rl", "reward"]),
        (("evaluate",), ["evaluate", "reward"]),
        (("export",), []),
    ],
)
def test_stages_read_their_own_rows(run, stages, expected):
    run.config.stages = stages
    assert read_by(run.config) == expected


def test_held_out_rows_from_python_are_judged_beside_benchmarks(run):
    changes = {"stages": ("evaluate",), "data.test.source": ""}
    run.config.update_from_flattened_dict(changes)
    run.config.evaluate.benchmarks = (("mathvision", "x.parquet"),)
    assert read_by(run.config) == []
    assert read_by(run.config, ("evaluate",)) == ["evaluate", "reward"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lr[1e-5]", r"without \*, \?, \[, \\ and :/, where .* could not be read, got \[ in /"),
        ("a\\b", r"got \\ in /"),
        ("gs:/b", r"got :/ in /"),
        ("a/run*/b", r"got \* in /"),
        ("why?", r"got \? in /"),
        ("caf\udce9", r"whose name is UTF-8, got /.*/caf\\xe9; choose another --workdir"),
        ("é/" + 200 * "x" + " %20#'\"$&:a", ""),
    ],
    ids=["class", "backslash", "address", "star", "question mark", "latin-1", "others"],
)
def test_a_workdir_that_checkpoints_cannot_be_read_from_is_refused(run, tmp_path, name, said):
    run = dataclasses.replace(run, workdir=tmp_path / name)
    for is_dry in (True, False):
        if said:
            with pytest.raises(ValueError, match=f"^expected a --workdir .*{said}"):
                check_workdir(run, is_dry=is_dry)
        else:
            check_workdir(run, is_dry=is_dry)


@pytest.mark.parametrize("is_dry", [True, False])
def test_processes_that_list_different_checkpoints_are_refused(begun, run, monkeypatch, is_dry):
    begun(())
    monkeypatch.setattr(distributed, "gather_json", lambda ours: [ours, [[], []]])
    message = r"in \S+/checkpoints/rl on all processes, got the steps \[2\], \[\] by process; run"
    with pytest.raises(ValueError, match=message):
        check_workdir(run, is_dry=is_dry)


def test_all_processes_open_what_one_of_them_finds(run, monkeypatch):
    """An unfinished save, which the others may not list yet."""
    opened = []
    monkeypatch.setattr(distributed, "gather_json", lambda ours: [ours, ours or True])
    monkeypatch.setattr(
        workdir, "open_checkpoints", lambda run, stage: opened.append(stage) or io.StringIO()
    )
    check_workdir(run)
    assert opened == ["sft", "rl"]
