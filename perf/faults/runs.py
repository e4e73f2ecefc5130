"""Short complete runs in subprocesses, and their metrics and exports."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from collections.abc import Callable, Iterator, Mapping
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
# The same in seconds, once its programs are compiled.
SMALL = SHORT | {
    "sft.num_steps": 2,
    "checkpoint_every": 1,
    "rl.num_steps": 4,
    "rl.prompts_per_step": 4,
    "rl.max_response_tokens": 16,
    "care.max_context": 8,
    "data.test.num_examples": 9,
    "evaluate.max_response_tokens": 16,
}
# Other settings that a restart depends on; DAPO draws until a step is full of mixed groups.
ADAPTERS = {key: value for key, value in SMALL.items() if not key.startswith("care.")} | {
    "model.lora_rank": 4,
    "rl.objective": "dapo",
    "dapo.max_tries": 3,
    "rl.eval_every": 1,
    "keep_checkpoints": 1,
    "keep_best": 1,
}
_QUICK = " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
_TIMES = re.compile("second|device_idle|host/")


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A way to break a run."""

    promise: str  # what must hold
    how: str  # how it was tried
    run: Callable[[pathlib.Path], str]  # given an empty folder; returns what did not hold, or ""


@contextlib.contextmanager
def signals_heard() -> Iterator[None]:
    """Processes started meanwhile hear signals that this one was started to ignore (nohup, &)."""
    ignored = [each for each in (signal.SIGHUP, signal.SIGINT) if _is_ignored(each)]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


class Launched:
    """The processes of one run of `configs/tiny.py`, with some keys changed.

    A single process has `num_devices` virtual CPU devices; several processes have two each. `cache`
    is the folder of compiled programs, shared by all runs. `is_quick` compiles without LLVM's
    optimizations, in a quarter of the time.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        keys: Mapping[str, Any],
        cache: pathlib.Path,
        num_processes: int = 1,
        num_devices: int = 1,
        *,
        is_quick: bool = False,
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
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}{_QUICK * is_quick}",
        }
        self.began = time.monotonic()
        self._errors = [tempfile.TemporaryFile("w+") for _ in who]  # noqa: SIM115, closed by finish
        settings = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL}
        with signals_heard():
            self.processes = [
                subprocess.Popen([*command, *flags], stderr=errors, **settings)
                for flags, errors in zip(who, self._errors, strict=True)
            ]

    def wait_until(self, is_reached: Callable[[], bool], timeout: float = 1200) -> bool:
        """Whether a moment came before the run ended; looks 50 times a second."""
        deadline = time.monotonic() + timeout
        while self.is_running and time.monotonic() < deadline:
            if is_reached():
                return True
            time.sleep(0.02)
        return False

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
        self.stderr = []  # all that each process has written to it
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
                self.stderr.append(errors.read() + late)
                messages += self.stderr[-1].strip().splitlines()[-1:]
        return [process.returncode for process in self.processes], "; ".join(messages)


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times and host usage; ValueError if a line is damaged."""
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{name: row[name] for name in row if not _TIMES.search(name)} for row in rows]


def exported_sums(workdir: pathlib.Path) -> dict[str, Any]:
    """SHA-256 of the files of the export."""
    (manifest,) = workdir.glob("export*/sha256.json")
    return json.loads(manifest.read_text())


@dataclasses.dataclass(frozen=True)
class Unbroken:
    """A run that nothing disturbed, and how to start it again."""

    workdir: pathlib.Path
    cache: pathlib.Path
    keys: Mapping[str, Any]
    num_processes: int

    def start(self, workdir: pathlib.Path, changes: Mapping[str, Any] | None = None) -> Launched:
        """Starts the same run in another workdir, or with some keys changed."""
        keys = {**self.keys, **(changes or {})}
        return Launched(workdir, keys, self.cache, self.num_processes, is_quick=True)

    def end(self, workdir: pathlib.Path) -> str:
        """Runs to the end in a workdir that something happened to; returns what differs, or ""."""
        launched = self.start(workdir)
        statuses, messages = launched.finish(1800)
        if set(statuses) != {0}:
            return f"the restart ended with {statuses}: {messages}"
        return difference(workdir, metrics(self.workdir), exported_sums(self.workdir))


@functools.cache
def unbroken(name: str, num_processes: int = 1) -> Unbroken:
    """The run of "small" or "adapters", made once for all attempts.

    Its programs are kept in JAX_COMPILATION_CACHE_DIR, if that is set.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="care_unbroken_"))
    cache = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or folder / "cache")
    keys = {"small": SMALL, "adapters": ADAPTERS}[name]
    made = Unbroken(folder / "run", cache, keys, num_processes)
    statuses, messages = made.start(made.workdir).finish(3600)
    assert set(statuses) == {0}, f"the unbroken run ended with {statuses}: {messages}"
    return made


def other_steps(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """Reports the steps of a run's lines if other ones were expected; "" if these were."""
    steps, others = ([(x["stage"], x["step"]) for x in lines] for lines in (found, expected))
    return "" if steps == others else f"the lines are of other steps: {steps}"


def difference(workdir: pathlib.Path, expected: list[dict[str, Any]], sums: Any) -> str:
    """How the lines and the export of a run differ from those of an unbroken one; "" if nowise."""
    found = metrics(workdir)
    if problem := other_steps(found, expected):
        return problem
    for ours, theirs in zip(found, expected, strict=True):
        if ours != theirs:
            names = [name for name in theirs if ours.get(name) != theirs[name]]
            return f"{theirs['stage']} {theirs['step']} differs in {', '.join(names[:4])}"
    return "" if exported_sums(workdir) == sums else "other weights were exported"
