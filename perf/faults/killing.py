"""kill -9 at random times of short complete runs, and checks of the restarts."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import shutil
import time

import psutil

from perf.faults import runs
from perf.faults.runs import SHORT, Launched

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
    found = runs.metrics(workdir)
    steps, expected = ([(x["stage"], x["step"]) for x in lines] for lines in (found, metrics))
    if steps != expected:
        return f"the lines are of other steps: {steps}"
    if case.restart_devices:
        return ""
    for ours, theirs in zip(found, metrics, strict=True):
        if ours != theirs:
            names = [name for name in theirs if ours.get(name) != theirs[name]]
            return f"{theirs['stage']} {theirs['step']} differs in {', '.join(names[:4])}"
    return "" if runs.exported_sums(workdir) == sums else "other weights were exported"
