"""Which runs an experiment asks for, what they share, and that none is done twice."""

import json
import os
import threading
import time

import pytest

from care_jax.config import config_file
from experiments.sweep import trials
from experiments.sweep.experiment import load_experiment


@pytest.fixture
def sweep(write_experiment, runs, tmp_path):
    """Plans and runs; returns (trials, failures)."""

    def run(seeds=2, *, overrides=(), num_processes=2, path=None, base="tiny"):
        experiment = load_experiment(path or write_experiment())
        planned = trials.plan(
            experiment, tmp_path / "runs", base=base, seeds=range(seeds), overrides=overrides
        )
        failures = trials.run_all(planned, num_processes=num_processes, on_done=lambda trial: None)
        return planned, failures

    return run


def names(commands, folder):
    return sorted(str(workdir.relative_to(folder / "runs")) for workdir, _, _ in commands)


def test_arms_share_the_cold_start_of_their_seed_and_equal_arms_one_run(sweep, runs, tmp_path):
    planned, failures = sweep()
    assert not failures
    assert len(planned) == 6
    (hash_,) = {trial.cold_start.workdir.parent.name for trial in planned}
    assert names(runs, tmp_path) == [
        f"cold_start/{hash_}/seed_0",
        f"cold_start/{hash_}/seed_1",
        "some_key/one/seed_0",
        "some_key/one/seed_1",
        "some_key/two/seed_0",
        "some_key/two/seed_1",
    ]
    for trial in planned:
        (last,) = (trial.workdir / "checkpoints" / "sft").iterdir()
        assert (last / "weights").read_text() == f"of seed {trial.seed}"
        assert last.name == "400" and (last / "weights").stat().st_nlink == 3  # of two arms
        assert trial.record["commits"] == ["abc1234"]


def test_a_cold_start_is_evaluated_once_and_not_again_by_its_arms(sweep, runs):
    sweep(1)
    stages = {workdir.parts[-3]: flags["--config.stages"] for workdir, flags, _ in runs}
    assert stages == {
        "cold_start": "('sft', 'evaluate')",
        "some_key": "('sft', 'rl', 'evaluate')",
    }


def test_a_base_without_a_cold_start_runs_its_stages_as_they_are(sweep, runs, tmp_path):
    path = tmp_path / "no_sft.py"
    text = '"""One."""\nfrom configs import tiny\nARMS = {"one": {}}\nREFERENCE = "one"\n'
    text += 'def get_config(arm):\n    config = tiny.get_config()\n    config.stages = ("rl",)\n'
    path.write_text(text + "    return config\n")
    planned, _ = sweep(1, path=path)
    assert planned[0].cold_start is None
    assert [sorted(flags) for _, flags, _ in runs] == [["--config", "--config.seed", "--workdir"]]


def test_what_is_done_is_not_done_again(sweep, runs):
    sweep(1)
    began = len(runs)
    sweep(1)
    assert len(runs) == began
    sweep(2)  # another seed: its cold start and two arms
    assert len(runs) == began + 3


def test_another_experiment_finds_the_runs_it_shares(sweep, runs, tmp_path):
    sweep(1)
    began = len(runs)
    other = tmp_path / "other.py"
    other.write_text((tmp_path / "some_key.py").read_text().replace('"same"', '"mine"'))
    planned, _ = sweep(1, path=other)
    assert len(runs) == began
    assert {trial.workdir.parts[-3] for trial in planned} == {"some_key"}


def test_a_run_that_was_stopped_is_begun_again_and_keeps_its_cold_start(sweep, runs):
    planned, _ = sweep(1)
    trial = planned[0]
    record = trial.record
    del record["seconds"]
    (trial.workdir / "trial.json").write_text(json.dumps(record))
    (trial.workdir / "checkpoints" / "sft" / "400" / "weights").write_text("its own")
    began = len(runs)
    sweep(1)
    assert [workdir for workdir, _, _ in runs[began:]] == [trial.workdir]
    assert (trial.workdir / "checkpoints" / "sft" / "400" / "weights").read_text() == "its own"
    assert trial.is_done


def test_a_copy_of_a_cold_start_that_was_cut_off_is_made_again(sweep, runs, monkeypatch):
    """Also where the file system has no links, such as a mounted bucket."""

    def fail(*_):
        raise OSError("no links here")

    monkeypatch.setattr(trials.os, "link", fail)
    with monkeypatch.context() as patch:
        patch.setattr(trials.shutil, "copy2", lambda file, name: fail())
        planned, failures = sweep(1)
    assert len(failures) == 2 and "did not get its cold start: " in str(failures[0])
    assert [workdir.parts[-3] for workdir, _, _ in runs] == ["cold_start"]
    partial = planned[0].workdir / "checkpoints" / "sft" / "400"
    (partial / "of another").write_text("")
    planned, failures = sweep(1)
    assert not failures and all(trial.is_done for trial in planned)
    assert [path.name for path in partial.iterdir()] == ["weights"]
    assert planned[0].record["begins_from"] == str(planned[0].cold_start.workdir)


def test_what_a_run_without_rl_refuses_does_not_reach_a_cold_start(sweep, runs):
    flags = {"--config.keep_best": "1", "--config.profile_steps": "(2,)", "--config.log_every": "5"}
    sweep(1, overrides=[f"{key}={value}" for key, value in flags.items()])
    of_start, *of_arms = [given for _, given, _ in runs]
    assert of_start["--config.keep_best"] == "0" and of_start["--config.log_every"] == "5"
    assert "--config.profile_steps" not in of_start
    assert all(given | flags == given for given in of_arms)


def test_overrides_reach_every_run_and_only_those_of_the_cold_start_change_it(sweep, tmp_path):
    plain, _ = sweep(1)
    for overrides, shares in (
        (("--config.rl.num_steps=7",), True),
        (("--config.sft.num_steps=7",), False),
    ):
        (tmp_path / "some_key.py").rename(tmp_path / "other.py")
        planned, _ = sweep(1, path=tmp_path / "other.py", overrides=overrides)
        assert set(overrides) <= set(planned[0].flags)
        same = planned[0].cold_start.workdir == plain[0].cold_start.workdir
        assert same == shares
        assert planned[0].workdir != plain[0].workdir
        (tmp_path / "other.py").rename(tmp_path / "some_key.py")
        for trial in planned:
            (trial.workdir / "trial.json").unlink(missing_ok=True)


def test_a_folder_of_another_configuration_is_refused(sweep):
    sweep(1)
    with pytest.raises(
        ValueError, match=r"some_key/one/seed_0 holds .*; name another --workdir, or remove it"
    ):
        sweep(1, overrides=("--config.rl.num_steps=7",))


def test_an_override_of_no_key_is_refused_before_a_trial_begins(sweep, runs, tmp_path):
    with pytest.raises(config_file.Refused, match=r"no such key: --config\.rl\.lr\. Did you mean"):
        sweep(overrides=("--config.rl.lr=1",))
    assert not runs and not (tmp_path / "runs").exists()


def test_a_failure_is_told_and_the_others_go_on(sweep, runs):
    planned, failures = sweep(overrides=("--config.best_metric=two/seed_1",))
    assert [str(failure) for failure in failures] == [
        f"{planned[4].workdir} ended with status 1: error: too small (whole log: "
        f"{planned[4].workdir}/log.txt)"
    ]
    assert [trial.is_done for trial in planned] == [True, True, True, True, False, False]


def test_a_failed_cold_start_is_told_once_and_its_arms_do_not_begin(sweep, runs):
    planned, failures = sweep(overrides=("--config.best_metric=cold_start",), num_processes=1)
    assert len(failures) == len(runs) == 2
    assert not any(trial.is_done for trial in planned)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are shared out on Linux")
def test_runs_at_a_time_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    given = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: given.append(list(cores)))
    for slot, cores in ((0, [0, 2, 4]), (1, [1, 3])):
        with trials._share_of_cores(slot, 2):
            assert given[-1] == cores
        assert given[-1] == [0, 1, 2, 3, 4]


def test_each_run_at_a_time_has_gpus_of_its_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(trials, "_local_devices", lambda: ("gpu", 3))
    shares = trials._shares_of_devices(2)
    assert shares == [{"CUDA_VISIBLE_DEVICES": "0,2"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert trials._shares_of_devices(1) == [{}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert trials._shares_of_devices(2)[0] == {"CUDA_VISIBLE_DEVICES": "4,6"}
    with pytest.raises(ValueError, match="--processes=4 needs as many GPUs, got 3"):
        trials._shares_of_devices(4)
    monkeypatch.setattr(trials, "_local_devices", lambda: ("tpu", 8))
    with pytest.raises(ValueError, match="leave --processes out"):
        trials._shares_of_devices(2)


def test_devices_are_those_that_jax_finds(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    assert trials._local_devices() == ("cpu", 3)
    monkeypatch.setenv("JAX_PLATFORMS", "nowhere")
    with pytest.raises(ValueError, match=r"JAX found no devices: .*nowhere"):
        trials._local_devices()


def test_no_more_runs_than_processes_at_a_time(sweep, monkeypatch):
    lock, running, most = threading.Lock(), [0], [0]
    run_trial = trials.run_trial

    def counted(*args):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        run_trial(*args)
        with lock:
            running[0] -= 1

    monkeypatch.setattr(trials, "run_trial", counted)
    sweep(4, num_processes=2)
    assert most[0] <= 2


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, SystemExit])
def test_a_stopped_sweep_begins_no_other_trials(sweep, monkeypatch, stopped):
    """A SIGTERM is passed on to the running one; a terminal has sent Ctrl-C to it as well."""
    begun, told, ends = [], [], threading.Event()

    class Process:
        def terminate(self):
            told.append(self)
            ends.set()

    def run_trial(trial, devices, running):
        begun.append(trial)
        running.add(Process())
        ends.wait(60)

    def wait(_):
        while not begun:
            time.sleep(0.01)
        if stopped is KeyboardInterrupt:
            ends.set()
        raise stopped

    monkeypatch.setattr(trials, "run_trial", run_trial)
    monkeypatch.setattr(trials.concurrent.futures, "wait", wait)
    with pytest.raises(stopped):
        sweep(4, num_processes=1)
    assert len(begun) == 1 and len(told) == (stopped is SystemExit)


def test_an_outcome_has_the_configuration_that_ran_and_the_evaluations_during_rl(sweep, runs):
    """Of config.json: the settings of the trial do not have the overrides applied."""
    planned, _ = sweep(1, overrides=("--config.care.K=7",))
    workdir = planned[0].workdir
    (workdir / "config.json").write_text(json.dumps({"care": {"K": 7}}))
    with (workdir / "metrics.jsonl").open("a") as file:
        for step in (0, 2):
            file.write(json.dumps({"stage": "rl_eval", "step": step, "acc": step / 10}) + "\n")
    outcome = trials.read_outcome(planned[0])
    assert outcome.config["care"]["K"] == 7
    assert planned[0].settings["config"]["care"]["K"] == 4
    assert outcome.evaluations == [{"step": 0, "acc": 0.0}, {"step": 2, "acc": 0.2}]
    assert [step["decoded_tokens"] for step in outcome.steps] == [1000, 2000, 3000, 4000]
    assert outcome.workdir == workdir
