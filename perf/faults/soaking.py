"""Soak test: in many small RL steps, memory, file handles, threads and programs must not grow."""

from __future__ import annotations

import json
import pathlib
import time

from perf.faults.runs import SHORT, Launched

SETTLED = 200  # step from which on nothing may grow
MOST_GROWTH = {"host/memory_gib": 1.05, "host/open_files": 1.1, "host/threads": 1.1}


def run(num_steps: int, folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Runs `num_steps` RL steps with checkpoints, logging and report.

    Returns a line for each quantity, and the lines of those that grew.
    """
    changes = {
        "stages": "('rl',)",
        "rl.num_steps": num_steps,
        "rl.eval_every": 0,
        "rl.prompts_per_step": 4,
        "rl.prompts_per_update": 4,
        "rl.max_response_tokens": 24,
        "care.max_context": 12,
        "checkpoint_every": 10,
    }
    workdir, cache = folder / "soak", folder / "cache"
    launched = Launched(workdir, SHORT | changes, cache)
    # Rare row shapes come late, so only the second half must compile nothing new.
    while launched.is_running and _num_lines(workdir / "metrics.jsonl") < num_steps // 2:
        time.sleep(1)
    known = _programs(cache)
    statuses, messages = launched.finish(timeout=6 * 3600)
    assert statuses == [0], f"the run ended with {statuses}: {messages}"
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    rows, grown = [], []
    for name, limit in MOST_GROWTH.items():
        # The median of 50 steps, because memory varies with checkpoints.
        early, late = (
            sorted(line[name] for line in part)[len(part) // 2]
            for part in (steps[SETTLED - 50 : SETTLED], steps[-50:])
        )
        row = f"{name.removeprefix('host/')} {early:.3g} at step {SETTLED}, {late:.3g} at the end"
        rows.append(row)
        if late > limit * early:
            grown.append(row)
    new = len(_programs(cache) - known)
    rows.append(f"{len(known)} programs compiled in the first half, {new} in the second")
    if new:
        grown.append(rows[-1])
    return rows, grown


def _num_lines(path: pathlib.Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _programs(cache: pathlib.Path) -> set[str]:
    """Names of the compiled programs in the cache."""
    return {path.name for path in cache.glob("*-cache")}
