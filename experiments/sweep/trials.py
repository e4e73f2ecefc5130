"""Trials: one arm with one seed, each run in a separate process.

A trial's workdir holds `trial.json`: its configuration, the commits it ran at, the cold start whose
checkpoint it has and, once it is done, the seconds that its last launch took. A finished trial is
never run again, not even by another experiment: arms with equal settings are the same trial. Arms
of a seed with equal cold-start settings share one cold start, which runs first.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from care_jax.config import config_file
from care_jax.devices.whole_file import write_whole
from experiments.sweep.experiment import Experiment
from experiments.sweep.outcome import Outcome

# Configuration sections that the cold start and its evaluation depend on.
_OF_COLD_START = ("model", "mesh", "sharding_rules", "data", "sft", "evaluate", "verifier")
_NOT_OF_COLD_START = ("keep_best", "profile_steps")  # refused by a run without RL
_CHECKPOINTS = pathlib.Path("checkpoints", "sft")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run."""

    arm: str  # empty for a cold start
    seed: int
    settings: Any  # everything that determines the result, as JSON; identifies the trial
    workdir: pathlib.Path
    flags: tuple[str, ...]  # of `python -m care_jax.main`, without --workdir
    cold_start: Trial | None = None  # the trial it starts from, if any

    @property
    def record(self) -> dict[str, Any]:
        """trial.json; {} if the trial has not started."""
        path = self.workdir / "trial.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @property
    def is_done(self) -> bool:
        return "seconds" in self.record


class TrialFailed(Exception):
    """A run ended with an error; its message says where the log is."""


def plan(
    experiment: Experiment,
    folder: pathlib.Path,
    *,
    base: str,
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
) -> list[Trial]:
    """Every trial of an experiment, by seed and then by arm.

    Args:
        folder: of all experiments; a trial is in `folder/experiment/arm/seed_i`, or in the folder
            of an equal trial.
        base: configuration that the arms modify, a file of `configs/`, such as "tiny".
        overrides: flags `--config.key=value` for all trials.

    Raises:
        ValueError: the workdir of a trial holds one with other settings.
        config_file.Refused: a configuration has no such key as one of the overrides.
    """
    known = {
        _key(json.loads(path.read_text(encoding="utf-8"))["settings"]): path.parent
        for path in sorted(folder.glob("*/*/seed_*/trial.json"))
    }

    def folder_for(settings: Any, workdir: pathlib.Path) -> pathlib.Path:
        key = _key(settings)
        if key not in known and workdir in known.values():
            raise ValueError(
                f"{workdir} holds a run of another configuration, see its trial.json; name another "
                "--workdir, or remove it"
            )
        return known.setdefault(key, workdir)

    trials = []
    for seed, arm in itertools.product(seeds, experiment.arms):
        config = experiment.get_config(f"{arm}@{base}")
        for flag in overrides:
            config_file.check_key(config, flag.removeprefix("--config.").partition("=")[0])
        plain = json.loads(config.to_json_best_effort())
        settings = {"config": plain | {"seed": seed}, "overrides": sorted(overrides)}
        flags = f"--config={experiment.path}:{arm}@{base}", f"--config.seed={seed}", *overrides
        cold_start = _cold_start_of(config, flags, overrides, seed)
        if cold_start is not None:
            workdir = folder_for(cold_start.settings, folder / cold_start.workdir)
            cold_start = dataclasses.replace(cold_start, workdir=workdir)
            rest = config.stages[config.stages.index("rl") :]
            flags += (_stages_flag(("sft", *rest)),)
        workdir = folder_for(settings, folder / experiment.name / arm / f"seed_{seed}")
        trials.append(Trial(arm, seed, settings, workdir, flags, cold_start))
    return trials


def _cold_start_of(
    config: ConfigDict, flags: Sequence[str], overrides: Sequence[str], seed: int
) -> Trial | None:
    """The cold start of an arm and the evaluation after it, if RL follows; else None.

    Its workdir is relative to the folder of all experiments.
    """
    stages = tuple(config.stages)
    if stages[:1] != ("sft",) or "rl" not in stages:
        return None
    its_keys = tuple(f"--config.{key}" for key in (*_OF_COLD_START, "care.cue"))
    plain = json.loads(config.to_json_best_effort())
    settings = {key: plain[key] for key in _OF_COLD_START} | {
        "cue": config.care.cue,
        "overrides": [flag for flag in sorted(overrides) if flag.startswith(its_keys)],
    }
    name = hashlib.sha256(_key(settings).encode()).hexdigest()[:8]
    workdir = pathlib.Path("cold_start", name, f"seed_{seed}")
    not_its_keys = tuple(f"--config.{key}" for key in _NOT_OF_COLD_START)
    its_flags = [flag for flag in flags if not flag.startswith(not_its_keys)]
    its_flags += "--config.keep_best=0", _stages_flag(stages[: stages.index("rl")])
    return Trial("", seed, settings | {"seed": seed}, workdir, tuple(its_flags))


def _key(settings: Any) -> str:
    return json.dumps(settings, sort_keys=True)


def _stages_flag(stages: Sequence[str]) -> str:
    return f"--config.stages={tuple(stages)!r}"


def run_all(
    trials: Iterable[Trial], *, num_processes: int, on_done: Callable[[Trial], None]
) -> list[TrialFailed]:
    """Runs all unfinished trials, cold starts first; `on_done` is called when one succeeds.

    Each of `num_processes` concurrent runs gets a share of the cores and GPUs. Returns the
    failures; trials that do not depend on a failed one still run.

    Raises:
        ValueError: there are too few GPUs for runs at a time, or the devices are TPUs.
    """
    todo = {trial.workdir: trial for trial in trials if not trial.is_done}
    starts = [trial.cold_start for trial in todo.values() if trial.cold_start is not None]
    todo = {start.workdir: start for start in starts if not start.is_done} | todo
    devices = _shares_of_devices(num_processes) if todo else [{}]
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(num_processes):
        slots.put(slot)
    running: set[subprocess.Popen] = set()
    # A pool starts tasks in submission order, so no trial waits for a cold start queued after it.
    with concurrent.futures.ThreadPoolExecutor(num_processes) as pool:
        begun: dict[pathlib.Path, concurrent.futures.Future] = {}

        def work(trial: Trial) -> None:
            if trial.cold_start is not None and trial.cold_start.workdir in begun:
                begun[trial.cold_start.workdir].result()
            slot = slots.get()
            try:
                with _share_of_cores(slot, num_processes):
                    run_trial(trial, devices[slot], running)
            finally:
                slots.put(slot)
            on_done(trial)

        try:
            for workdir, trial in todo.items():
                begun[workdir] = pool.submit(work, trial)
            concurrent.futures.wait(begun.values())
        except BaseException as stopped:
            pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(stopped, KeyboardInterrupt):  # a terminal sends Ctrl-C to all
                for process in [*running]:
                    process.terminate()
            raise  # once the running trials have saved
    failures = dict.fromkeys(filter(None, (future.exception() for future in begun.values())))
    if other := [failure for failure in failures if not isinstance(failure, TrialFailed)]:
        raise other[0]
    return [failure for failure in failures if isinstance(failure, TrialFailed)]


def run_trial(trial: Trial, devices: Mapping[str, str], running: set[subprocess.Popen]) -> None:
    """Runs or resumes a trial, its output appended to `log.txt`; raises `TrialFailed`.

    `devices` are variables of its environment. Its process is in `running` meanwhile.
    """
    trial.workdir.mkdir(parents=True, exist_ok=True)
    commits = dict.fromkeys([*trial.record.get("commits", ()), commit()])
    record = trial.record | {"settings": trial.settings, "commits": list(commits)}
    _write_record(trial, record)
    if trial.cold_start is not None and "begins_from" not in record:
        try:
            _hand_on(trial.cold_start.workdir / _CHECKPOINTS, trial.workdir / _CHECKPOINTS)
        except OSError as error:
            raise TrialFailed(f"{trial.workdir} did not get its cold start: {error}") from error
        record["begins_from"] = str(trial.cold_start.workdir)
        _write_record(trial, record)
    command = [sys.executable, "-m", "care_jax.main", *trial.flags, f"--workdir={trial.workdir}"]
    began, log = time.monotonic(), trial.workdir / "log.txt"
    with log.open("a", encoding="utf-8") as out:
        environment = {**os.environ, **devices}
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(trial.workdir.parents[2] / "xla"))
        streams = {"stdout": out, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        status = _run(command, running, env=environment, **streams)
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise TrialFailed(
            f"{trial.workdir} ended with status {status}: "
            f"{lines[-1] if lines else 'no output'} (whole log: {log})"
        )
    _write_record(trial, record | {"seconds": round(time.monotonic() - began)})


def _hand_on(checkpoints: pathlib.Path, to: pathlib.Path) -> None:
    """Makes `to` a folder with the last of these checkpoints.

    Its files are links where the file system has them: a checkpoint's files are never changed.
    """

    def link(file: str, name: str) -> None:
        try:
            os.link(file, name)
        except OSError:  # such as a bucket's
            shutil.copy2(file, name)

    shutil.rmtree(to, ignore_errors=True)  # a partial copy
    last = max(
        (path for path in checkpoints.iterdir() if path.name.isdigit()),
        key=lambda path: int(path.name),
    )
    shutil.copytree(last, to / last.name, copy_function=link)


def _run(command: Sequence[str], running: set[subprocess.Popen], **settings: Any) -> int:
    """The exit status of a command, whose process is in `running` meanwhile."""
    with subprocess.Popen(command, **settings) as process:
        running.add(process)
        try:
            return process.wait()
        finally:
            running.remove(process)


def read_outcome(trial: Trial) -> Outcome:
    """Reads the configuration and metrics of a finished trial."""
    stages = _stages(trial)
    start = _stages(trial.cold_start) if trial.cold_start else stages
    final = [rows[-1] for name, rows in stages.items() if name.startswith("evaluate_")]
    firsts = [start[name][-1] for name in start if name in ("evaluate_start", "evaluate_sft")]
    return Outcome(
        arm=trial.arm,
        seed=trial.seed,
        # Not from the settings, which lack the overrides.
        config=json.loads((trial.workdir / "config.json").read_text(encoding="utf-8")),
        start=firsts[-1] if firsts else {},
        final=final[-1] if final else {},
        steps=stages.get("rl", []),
        evaluations=stages.get("rl_eval", []),
        workdir=trial.workdir,
    )


def _stages(trial: Trial) -> dict[str, list[dict[str, float]]]:
    stages: dict[str, list[dict[str, float]]] = {}
    for line in (trial.workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        stages.setdefault(record.pop("stage"), []).append(record)
    return stages


def commit() -> str:
    """The commit of the working tree, with "+" if it is dirty; "" outside git."""
    command = ["git", "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def _write_record(trial: Trial, record: dict[str, Any]) -> None:
    write_whole(trial.workdir / "trial.json", json.dumps(record, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def _share_of_cores(slot: int, num_slots: int):
    """Pins this thread, and the processes it starts, to every num_slots-th core."""
    if num_slots == 1 or not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_cores = os.sched_getaffinity(0)
    if share := sorted(all_cores)[slot::num_slots]:
        os.sched_setaffinity(0, share)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def _shares_of_devices(num_slots: int) -> list[dict[str, str]]:
    """The environment of each slot that gives it GPUs of its own."""
    platform, count = ("cpu", 1) if num_slots == 1 else _local_devices()
    if platform == "tpu":
        raise ValueError("one run at a time holds the TPUs of a host; leave --processes out")
    if platform != "gpu":
        return [{}] * num_slots
    if count < num_slots:
        raise ValueError(f"--processes={num_slots} needs as many GPUs, got {count}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = visible.split(",")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[slot::num_slots])} for slot in range(num_slots)]


def _local_devices() -> tuple[str, int]:
    """Platform and number of this host's devices, which another process opens and releases."""
    code = "import jax; found = jax.local_devices(); print(found[0].platform, len(found))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"JAX found no devices: {result.stderr.strip().splitlines()[-1]}")
    platform, count = result.stdout.split()[-2:]
    return platform, int(count)
