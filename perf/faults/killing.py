"""Kills at random times and at chosen moments of short complete runs, and checks of the restarts.

The attempts stop one run again and again, at each moment of `MOMENTS`, and then let it end.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import psutil

from perf.faults import runs
from perf.faults.runs import SHORT, Attempt, Launched

LEAVE = 15  # seconds for the children of a killed process to end
PEERS = 60  # seconds for the other process of the run, which may be in a collective


@dataclasses.dataclass(frozen=True)
class Case:
    """How a run is killed and restarted.

    Another mesh rounds sums differently, so that then only the steps logged and the exit status are
    compared, not the values.
    """

    promise: str  # what must hold
    num_processes: int = 1  # of the run; one of them is killed
    restart_devices: int = 0  # 0: as before


CASES = (
    Case("the restart ends with the metrics and the weights of an unbroken run, bit for bit"),
    Case("the same on two processes, one of which is killed; the other ends too", 2),
    Case("a restart on two devices ends, with every line once", restart_devices=2),
)


def run(case: Case, number: int, folder: pathlib.Path, seed: int) -> tuple[int, list[str]]:
    """Kills runs of a case; returns how many were killed before their end, and the failures."""
    rng, cache = random.Random(seed), folder / "cache"
    whole = folder / "whole"
    for name in ("compiling", "whole"):  # the second has all programs in the cache
        unbroken = Launched(folder / name, SHORT, cache, case.num_processes)
        statuses, messages = unbroken.finish()
        assert set(statuses) == {0}, f"the unbroken run ended with {statuses}: {messages}"
        seconds = time.monotonic() - unbroken.began
    metrics, sums = runs.metrics(whole), runs.exported_sums(whole)
    num_killed, faults = 0, []
    for trial in range(number):
        workdir, moment = folder / f"killed_{trial}", rng.uniform(0, seconds)
        broken = Launched(workdir, SHORT, cache, case.num_processes)
        time.sleep(moment)
        victim = rng.randrange(case.num_processes)
        is_ended = broken.processes[victim].poll() is not None
        children = [] if is_ended else broken.kill(victim)
        num_killed += not is_ended
        statuses, _ = broken.finish(timeout=PEERS)
        problem = _left(children)
        if not is_ended and case.num_processes > 1 and 0 in statuses:
            problem = problem or f"a process whose peer was killed ended with {statuses}"
        problem = problem or _restart(case, workdir, cache, metrics, sums)
        stage = "ended" if is_ended else f"after {moment:.1f} of {seconds:.1f} s"
        print(f"  {stage}: {problem or 'holds'}", flush=True)
        if problem:
            faults.append(f"killed {stage}: {problem}; see {workdir}")
        else:
            shutil.rmtree(workdir, ignore_errors=True)
    return num_killed, faults


def _left(children: list[psutil.Process]) -> str:
    """Reports children that survive a killed process; "" if there are none."""
    _, alive = psutil.wait_procs(children, timeout=LEAVE)
    return f"{len(alive)} workers lived on for {LEAVE} s" if alive else ""


def _restart(case: Case, workdir: pathlib.Path, cache: pathlib.Path, metrics, sums) -> str:
    """Restarts a killed run; returns its difference from the uninterrupted run, or ""."""
    num_devices = case.restart_devices or 1
    statuses, messages = Launched(workdir, SHORT, cache, case.num_processes, num_devices).finish()
    if set(statuses) != {0}:
        return f"the restart ended with {statuses}: {messages}"
    if not case.restart_devices:
        return runs.difference(workdir, metrics, sums)
    return runs.other_steps(runs.metrics(workdir), metrics)


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment of a run: a file exists, or metrics.jsonl has a line."""

    name: str
    files: str = ""  # pattern below the workdir
    line: str = ""  # a part of it

    def is_reached(self, workdir: pathlib.Path) -> bool:
        """Whether the run in the workdir has come so far."""
        if self.files:
            return any(workdir.glob(self.files))
        path = workdir / "metrics.jsonl"
        return path.exists() and self.line in path.read_text()


MOMENTS = (
    Moment("the cold start", line='"stage": "sft", "step": 0'),
    Moment("the evaluation before RL", files="samples_rl/step_0.jsonl"),
    Moment("an RL step", line='"stage": "rl", "step": 0'),
    Moment("an evaluation inside RL", files="samples_rl/step_2.jsonl"),
    Moment("a save", files="checkpoints/rl/3.*tmp*"),
    Moment("the evaluation after RL", files="samples_rl.jsonl"),
    Moment("the export", files="export/*"),
)


@dataclasses.dataclass(frozen=True)
class Stop:
    """Signals to a run, and how it must end unless it has come to its end before.

    Further signals follow after a second: within half a second they are the first, passed on.
    """

    name: str
    signals: tuple[int, ...]
    status: int
    says: str  # the beginning of its last line


STOPS = {
    "SIGKILL": Stop("SIGKILL", (signal.SIGKILL,), -9, ""),
    "SIGTERM": Stop("SIGTERM", (signal.SIGTERM,), 75, "stopped by SIGTERM "),
    "SIGHUP": Stop("SIGHUP", (signal.SIGHUP,), 75, "stopped by SIGTERM "),
    "SIGINT": Stop("SIGINT", (signal.SIGINT,), 130, "stopped by Ctrl-C; "),
    "SIGINT twice": Stop("SIGINT twice", (signal.SIGINT,) * 2, 130, "stop"),
}


def stopped(
    stop: Stop, name: str, folder: pathlib.Path, num_processes: int = 1, victims: int = 1
) -> str:
    """Stops one run at all moments; returns what did not hold, see `Attempt`.

    `name` is that of `runs.unbroken`; the signals go to the last `victims` of the processes.
    """
    whole, workdir, problems = runs.unbroken(name, num_processes), folder / "run", []
    for moment in MOMENTS:
        if moment.is_reached(workdir):  # before the last stop took effect
            continue
        launched = whole.start(workdir)
        is_stopped = launched.wait_until(lambda m=moment: m.is_reached(workdir))
        children = []
        for number in stop.signals if is_stopped else ():
            for process in launched.processes[-victims:]:
                if process.poll() is None:
                    children += psutil.Process(process.pid).children(recursive=True)
                    process.send_signal(number)
            time.sleep(1)
        problem = _ended(stop, launched) or _left(children)
        state = problem or ("stopped" if is_stopped else "not met")
        print(f"  {stop.name}, {moment.name}: {state}", flush=True)
        problems += [f"{moment.name}: {problem}"] if problem else []
    return "; ".join(problems) or whole.end(workdir)


def _ended(stop: Stop, launched: Launched) -> str:
    """What is wrong with how a stopped run ended; a run of several processes may end with 1."""
    statuses, messages = launched.finish(300)
    if any("Traceback" in text for text in launched.stderr):
        return f"a traceback: {messages}"
    if set(statuses) == {0}:  # the signal came after the last step that can be stopped
        return ""
    is_alone = len(statuses) == 1
    status = 128 - statuses[-1] if statuses[-1] < 0 else statuses[-1]  # as shells report it
    if status != stop.status or (is_alone and not messages.startswith(stop.says)):
        return f"ended with {statuses}: {messages}"
    return ""


def _compiling(folder: pathlib.Path) -> str:
    """SIGTERM while the first step is compiled, without a cache."""
    whole, workdir = runs.unbroken("small"), folder / "run"
    launched = Launched(workdir, whole.keys, folder / "cache", is_quick=True)
    launched.wait_until(lambda: any((folder / "cache").glob("jit_*")))
    time.sleep(3)
    launched.processes[0].send_signal(signal.SIGTERM)
    return _ended(STOPS["SIGTERM"], launched) or whole.end(workdir)


def _prepare(number: int, status: int, says: str, folder: pathlib.Path) -> str:
    """`prepare`, stopped once a shard is written; then it gives the bytes of an unbroken one."""
    source = "common.source('synthetic', num_examples=1500, seed=1)"
    lines = [
        "from configs import common, tiny",
        "def get_config():",
        "    config = tiny.get_config()",
        "    config.data.prepare.shard_megabytes = 1",
        f"    config.data.prepare.sources = ({source},)",
        "    return config",
    ]
    (folder / "config.py").write_text("\n".join(lines))

    def start(out: str) -> subprocess.Popen:
        given = f"--config={folder / 'config.py'}", f"--out={folder / out}"
        command = [sys.executable, "-m", "care_jax.commands.prepare", *given]
        settings = {"cwd": runs.ROOT, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with runs.signals_heard():
            return subprocess.Popen(command, **settings, **pipes)

    for out in ("whole", "stopped"):
        process = start(out)
        while out == "stopped" and process.poll() is None:
            if any((folder / "stopped.partial").glob("*.arrayrecord")):
                process.send_signal(number)
                break
            time.sleep(0.02)
        _, error = process.communicate()
        if out == "whole" and process.returncode:
            return f"it ended with {process.returncode}: {error}"
    if (process.returncode, error) != (status, says):
        return f"stopped, it ended with {process.returncode}: {error}"
    if (folder / "stopped").exists():
        return "it left a folder that looks whole"
    _, error = start("stopped").communicate()
    files = [
        {path.name: path.read_bytes() for path in (folder / out).iterdir()}
        for out in ("whole", "stopped")
    ]
    return "" if files[0] == files[1] else f"other bytes were written {error}"


_PROMISE = "a run that was stopped and restarted ends as an unbroken one, bit for bit"
ATTEMPTS = (
    *(
        Attempt(
            _PROMISE,
            f"{name} in each of {len(MOMENTS)} moments of one run",
            functools.partial(stopped, stop, "small"),
        )
        for name, stop in STOPS.items()
    ),
    Attempt(
        _PROMISE,
        f"LoRA, DAPO, keep_best: SIGKILL in each of {len(MOMENTS)} moments",
        functools.partial(stopped, STOPS["SIGKILL"], "adapters"),
    ),
    Attempt(
        _PROMISE,
        "two processes, SIGTERM to one of them",
        functools.partial(stopped, STOPS["SIGTERM"], "small", num_processes=2),
    ),
    Attempt(
        _PROMISE,
        "two processes, SIGINT to both",
        functools.partial(stopped, STOPS["SIGINT"], "small", num_processes=2, victims=2),
    ),
    Attempt(
        "prepare leaves a whole folder or none, and gives the same bytes when it is run again",
        "SIGKILL once a shard is written",
        functools.partial(_prepare, signal.SIGKILL, -9, ""),
    ),
    Attempt(
        "prepare leaves a whole folder or none, and gives the same bytes when it is run again",
        "SIGINT once a shard is written",
        functools.partial(_prepare, signal.SIGINT, 130, "stopped by Ctrl-C\n"),
    ),
    Attempt(_PROMISE, "SIGTERM while the first step is compiled", _compiling),
)
