"""Short complete runs in subprocesses, and their metrics and exports."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# All stages, evaluations inside RL, more prompts than slots, a checkpoint every second step.
SHORT = {
    "stages": "('sft','rl','evaluate','export')",
    "log_every": 1,
    "checkpoint_every": 2,
    "data.test.num_examples": 12,
    "sft.num_steps": 4,
    "sft.batch_size": 8,
    "sft.microbatch_size": 0,
    "sft.warmup_steps": 1,
    "rl.num_steps": 6,
    "rl.eval_every": 2,
    "rl.num_rollouts": 4,
    "rl.prompts_per_step": 8,
    "rl.prompts_per_update": 4,
    "rl.decode_prompts": 4,
    "rl.microbatch_size": 0,
    "rl.warmup_steps": 1,
    "care.beta": 0.02,
    "evaluate.batch_size": 8,
}
_TIMES = re.compile("second|device_idle|host/")


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A way to break a run."""

    promise: str  # what must hold
    how: str  # how it was tried
    run: Callable[[pathlib.Path], str]  # given an empty folder; returns what did not hold, or ""


class Launched:
    """The processes of one run of `configs/tiny.py`, with some keys changed.

    A single process has `num_devices` virtual CPU devices; several processes have two each. `cache`
    is the folder of compiled programs, shared by all runs.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        keys: Mapping[str, Any],
        cache: pathlib.Path,
        num_processes: int = 1,
        num_devices: int = 1,
        module: str = "care_jax.main",
    ):
        command = [sys.executable, "-m", module, f"--workdir={workdir}"]
        command += ["--config=configs/tiny.py", *(f"--config.{k}={v}" for k, v in keys.items())]
        who: list[list[str]] = [[]]
        if num_processes > 1:
            num_devices = 2
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            shared = [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={num_processes}"]
            who = [[*shared, f"--process_id={index}"] for index in range(num_processes)]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        }
        self.began = time.monotonic()
        self._errors = [tempfile.TemporaryFile("w+") for _ in who]  # noqa: SIM115, closed by finish
        settings = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL}
        self.processes = [
            subprocess.Popen([*command, *flags], stderr=errors, **settings)
            for flags, errors in zip(who, self._errors, strict=True)
        ]

    @property
    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def kill(self, index: int) -> list[psutil.Process]:
        """SIGKILL to one process; returns its children, which must end by themselves."""
        children = psutil.Process(self.processes[index].pid).children(recursive=True)
        self.processes[index].send_signal(signal.SIGKILL)
        return children

    def finish(self, timeout: float = 600) -> tuple[list[int], str]:
        """Exit statuses and last lines of stderr; kills and reports processes after `timeout`."""
        messages = []
        for process, errors in zip(self.processes, self._errors, strict=True):
            late = ""
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late = f"\nno end within {timeout:.0f} s"
            with errors:
                errors.seek(0)
                messages += (errors.read() + late).strip().splitlines()[-1:]
        return [process.returncode for process in self.processes], "; ".join(messages)


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times and host usage; ValueError if a line is damaged."""
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{name: row[name] for name in row if not _TIMES.search(name)} for row in rows]


def exported_sums(workdir: pathlib.Path) -> dict[str, Any]:
    """SHA-256 of the files of the export."""
    (manifest,) = workdir.glob("export*/sha256.json")
    return json.loads(manifest.read_text())
