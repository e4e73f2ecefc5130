"""`perf.step` on one device: a GRPO step of 107M parameters, against TRL where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from perf.first_hour.demo import ROOT, wait

_ONE_TPU = {
    "TPU_VISIBLE_CHIPS": "0",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
}


def measure(*, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """The rows of `perf.step` without the first steps."""
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    with tempfile.TemporaryDirectory() as folder:
        rows = pathlib.Path(folder, "rows.jsonl")
        command = [sys.executable, "-m", "perf.step", f"--json={rows}"]
        command += ["--repeats=1"] * is_small + ["--small"] * is_small + ["--ours"] * bool(missing)
        # TRL would divide its batches among all that it sees.
        one_gpu = {
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        }
        environment = {**os.environ, **_ONE_TPU, **one_gpu}
        process = subprocess.Popen(command, stdout=sys.stderr, cwd=ROOT, env=environment)
        try:
            failed = wait(process, until - 10)
        finally:
            process.kill()
        lines = rows.read_text().splitlines() if rows.exists() else []
    yield from (row for row in map(json.loads, lines) if not row["is_first"])
    if failed:
        yield {"failed": failed}
    elif missing:
        install = "pip install -e '.[perf]'"
        yield {"failed": f"TRL's side: {missing[0]} is not installed; run: {install}"}
