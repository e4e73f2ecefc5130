"""Soak test: in many small RL steps, memory, file handles, threads and programs must not grow.

The first half of the steps fills what is bounded: caches, the report, the programs of rare shapes
of rows. Of the second half a line is fitted to the memory in use (`traced`), and extrapolated to a
day of such steps.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from perf.faults.runs import SHORT, Launched

SETTLED = 200  # the least steps of the first half
MOST_GROWTH = {"host/memory_gib": 1.05, "host/open_files": 1.1, "host/threads": 1.1}
MOST_PER_DAY = 100.0  # MB that the memory in use may grow
_USED = "host/used_gib"


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
        "rl.row_lengths": 2,
        "care.max_context": 12,
        "checkpoint_every": 50,  # the default; TensorStore leaks some kB at every save
        # Full before the second half, as are the caches of questions.
        "report.max_megabytes": 1.0,
        "data.train.num_examples": 256,
    }
    workdir, cache = folder / "soak", folder / "cache"
    with mock.patch.dict(os.environ, PYTHONMALLOC="malloc"):
        launched = Launched(workdir, SHORT | changes, cache, module="perf.faults.traced")
    settled = max(num_steps // 2, SETTLED)
    while launched.is_running and _num_lines(workdir / "metrics.jsonl") < settled:
        time.sleep(1)
    known = _programs(cache)
    statuses, messages = launched.finish(timeout=24 * 3600)
    assert statuses == [0], f"the run ended with {statuses}: {messages}"
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    rows, grown = [], []
    for name, limit in MOST_GROWTH.items():
        # The median of 50 steps, because memory varies with checkpoints.
        early, late = (
            sorted(line[name] for line in part)[len(part) // 2]
            for part in (steps[settled - 50 : settled], steps[-50:])
        )
        row = f"{name.removeprefix('host/')} {early:.3g} at step {settled}, {late:.3g} at the end"
        rows.append(row)
        if late > limit * early:
            grown.append(row)
    new = len(_programs(cache) - known)
    rows.append(f"{len(known)} programs compiled in the first half, {new} in the second")
    if new:
        grown.append(rows[-1])
    slope, error, per_day = _growth(steps[settled:])
    rows.append(
        f"memory in use {steps[-1][_USED]:.3g} GiB, {slope:+.2f} ± {error:.2f} MB per 1000 steps, "
        f"{slope * per_day:+.0f} ± {error * per_day:.0f} MB in a day of {per_day:.0f},000 steps"
    )
    if (slope - 2 * error) * per_day > MOST_PER_DAY:
        grown.append(rows[-1])
    return rows, grown


def _growth(steps: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Slope of the memory in use, its standard error (MB per 1000 steps), 1000s of steps a day."""
    used = np.array([line[_USED] * 2**30 / 1e6 for line in steps])
    is_counted = np.append(True, used[1:] != used[:-1])  # the others repeat the last count
    thousands = np.flatnonzero(is_counted) / 1000
    (slope, _), covariance = np.polyfit(thousands, used[is_counted], 1, cov=True)
    seconds = np.mean([line["rollout_seconds"] + line["train_seconds"] for line in steps])
    return slope, float(covariance[0, 0] ** 0.5), 86.4 / seconds


def _num_lines(path: pathlib.Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _programs(cache: pathlib.Path) -> set[str]:
    """Names of the compiled programs in the cache."""
    return {path.name for path in cache.glob("*-cache")}
