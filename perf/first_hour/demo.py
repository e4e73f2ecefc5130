"""configs/tiny.py on the devices, with 30 steps of RL, and its metrics beside those on a CPU.

Same seed, prompts and random numbers. Samples part where rounding changes a token, so that metrics
agree closely in the first steps and in distribution later.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUM_STEPS = 30
NUM_LAST = 10  # steps in the mean of the last
SHOWN = {
    "sft": ("loss", "grad_norm"),
    "evaluate_sft": ("acc",),
    "rl": (
        *("reward", "acc", "response_tokens", "loss", "grad_norm", "entropy", "kl_old"),
        *("rollout_seconds", "train_seconds"),
    ),
    "evaluate_rl": ("acc",),
}
SMALL = ("--config.sft.num_steps=2", "--config.sft.warmup_steps=0", "--config.rl.warmup_steps=0")
SMALL += ("--config.data.test.num_examples=8", "--config.rl.prompts_per_step=4")
SMALL += ("--config.rl.prompts_per_update=4", "--config.rl.decode_prompts=4")
SMALL += ("--config.rl.num_rollouts=4",)


def measure(*, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """The rows of `compared`."""
    flags = [f"--config.rl.num_steps={2 if is_small else NUM_STEPS}", "--config.log_every=1"]
    flags += SMALL if is_small else ()
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name, environment in (("cpu", {"JAX_PLATFORMS": "cpu"}), ("device", {})):
            runs[name] = start("configs/tiny.py", pathlib.Path(folder, name), flags, environment)
        try:
            # The devices' run decides when this step ends, and the CPU's has what is left.
            failed = {name: wait(runs[name], until - 10) for name in ("device", "cpu")}
        finally:
            for run in runs.values():
                run.kill()
        metrics = {name: read_metrics(pathlib.Path(folder, name)) for name in runs}
    yield from ({"run": name, "failed": reason} for name, reason in failed.items() if reason)
    yield from compared(metrics["device"], metrics["cpu"])


def start(
    config: str, workdir: pathlib.Path, flags: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen:
    """Starts `care_jax.main`, which prints to standard error."""
    command = [sys.executable, "-m", "care_jax.main", f"--config={config}", f"--workdir={workdir}"]
    environment = {**os.environ, **environment}
    return subprocess.Popen([*command, *flags], stdout=sys.stderr, cwd=ROOT, env=environment)


def rows_of(
    config: str, workdir: pathlib.Path, flags: Sequence[str], until: float
) -> Iterator[dict[str, Any]]:
    """Runs a configuration on the devices; the rows of `compared`, without a CPU's."""
    run = start(config, workdir, flags, {})
    try:
        failed = wait(run, until - 10)
    finally:
        run.kill()
    if failed:
        yield {"run": "device", "failed": failed}
    for row in compared(read_metrics(workdir), ()):
        yield {name: row[name] for name in ("stage", "metric", "device_first", "device_last")}


def wait(run: subprocess.Popen, until: float) -> str | None:
    """Waits until a time; returns why the run did not end well, or None."""
    try:
        status = run.wait(max(until - time.time(), 0.1))
    except subprocess.TimeoutExpired:
        return "did not end in time; its metrics so far are shown"
    return f"exit status {status}, see log.txt" if status else None


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl so far."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def compared(
    device: Sequence[dict[str, Any]], cpu: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A row per metric of `SHOWN`: of both runs, the first value and the mean of the last steps.

    Values that a run did not log, or not yet, are None.
    """
    for stage, names in SHOWN.items():
        for name in names:
            found = {"stage": stage, "metric": name}
            for run, lines in (("device", device), ("cpu", cpu)):
                of_stage = [line for line in lines if line["stage"] == stage and name in line]
                values = [line[name] for line in of_stage]
                last = values[-NUM_LAST:]
                found[f"{run}_first"] = values[0] if values else None
                found[f"{run}_last"] = sum(last) / len(last) if last else None
            if found["device_last"] is not None or found["cpu_last"] is not None:
                yield found
