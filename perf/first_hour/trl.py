"""`perf.step` on the devices: a GRPO step of 107M parameters, against TRL where it is installed."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from perf.first_hour.demo import ROOT, wait


def measure(*, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """The rows of `perf.step` without the first steps."""
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    with tempfile.TemporaryDirectory() as folder:
        rows = pathlib.Path(folder, "rows.jsonl")
        command = [sys.executable, "-m", "perf.step", f"--json={rows}"]
        command += ["--repeats=1"] * is_small + ["--small"] * is_small + ["--ours"] * bool(missing)
        process = subprocess.Popen(command, stdout=sys.stderr, cwd=ROOT)
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
