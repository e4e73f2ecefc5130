"""Measures this host's GPUs or TPUs, in the order of what is worth most.

    python -m perf.first_hour --minutes=25
    python -m perf.first_hour --minutes=8 --steps=decode_3b,update_3b
    JAX_PLATFORMS=cpu python -m perf.first_hour --small

    rates            bfloat16 matmuls of 8192 x 8192, copies of 1 GiB
    kernels          every attention kernel and the product of experts, bfloat16 and float32:
                     largest difference from dense attention, and time beside XLA's
    run_3b           a whole run from random weights: cold start, two steps of RL, export
    demo             configs/tiny.py, 30 steps of RL: its metrics beside those of a CPU
    decode_3b        prefill and decode steps with random weights, with and without the kernel, and
                     a trace of them, summed by kernel
    update_3b        scoring and update, their trace, and peak memory beside what `care_jax.aot`
                     predicts
    update_7b        the same; on one GPU it trains LoRA
    trl              `perf.step`: a GRPO step of 107M parameters against TRL's
    smollm           a cold start and RL of SmolLM2-135M on word problems

Each step is a process with a time limit. A step that fails, hangs or finds a library missing is a
line of the results, and the next step begins. Results go to `--out`/<device>-<date> as they are
measured: results.jsonl (a line per row), results.md (tables, rewritten after every step) and
log.txt (what the steps printed). A later call of that day adds to them; the tables have the last
measurement of each step. Compiled programs are kept, as those of a run are, so that a step that
was killed while it compiled gets further when it is called again.

With --small shapes are tiny and a CPU will do, to try this program. The exit status is 1 if a step
failed, 2 if there is no accelerator.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from care_jax.devices.compilation import keep_programs
from perf.first_hour import tables
from perf.first_hour.parts import one_line

LEAST = 20.0  # seconds: a step is not started with fewer left


@dataclasses.dataclass(frozen=True)
class Step:
    """A measurement: a module of this package with `measure`, and how long it may take."""

    module: str
    minutes: float
    arguments: tuple[str, ...] = ()  # of `measure`, before those that all steps have


STEPS = {
    "rates": Step("rates", 2),
    "kernels": Step("kernels", 5),
    "run_3b": Step("running", 9, ("qwen25vl_3b",)),
    "demo": Step("demo", 4),
    "decode_3b": Step("decoding", 5, ("qwen25vl_3b",)),
    "update_3b": Step("updating", 5, ("qwen25vl_3b",)),
    "update_7b": Step("updating", 6, ("qwen25vl_7b",)),
    "trl": Step("trl", 7),
    "smollm": Step("smollm", 7),
}


class Results:
    """The rows of a folder: results.jsonl, results.md and log.txt.

    A row is a dict with "step". The first of a step has "began"; one with "failed" says why the
    step, or a part of it, gave no result.
    """

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.log, self._tables = (
            folder / name for name in ("results.jsonl", "log.txt", "results.md")
        )

    def add(self, step: str, row: dict[str, Any]) -> None:
        """Appends a row in one write, so that a killed process leaves whole lines."""
        with self.rows.open("a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")

    def latest(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of the last time that each step began, without the row that says so."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self.rows.read_text().splitlines():
            row = json.loads(line)
            if "began" in row:
                found[row["step"]] = []
            else:
                found[row["step"]].append(row)
        return found

    def write_tables(self) -> str:
        text = tables.report(self.latest())
        self._tables.write_text(text)
        return text


def run_steps(
    steps: Sequence[str],
    results: Results,
    until: float,
    command: Callable[[str, float], list[str]],
    minutes: Callable[[str], float],
) -> None:
    """Runs each step in a process of its own until the time `until`.

    `command(step, until)` is a step's command, which adds its rows to `results`, and
    `minutes(step)` its time limit.
    """
    for name in steps:
        results.add(name, {"began": datetime.datetime.now().isoformat(timespec="seconds")})
        left = until - time.time()
        if left < LEAST:
            results.add(name, {"failed": "not started: out of time"})
            continue
        limit = min(left, 60 * minutes(name))
        print(f"{name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        began = time.time()
        failed = _run(command(name, began + limit), results.log, limit)
        row = {"failed": failed} if failed else {"took": round(time.time() - began, 1)}
        results.add(name, row)
        results.write_tables()
        for row in results.latest()[name]:
            print(json.dumps(row), flush=True)


def _run(command: list[str], log: pathlib.Path, limit: float) -> str | None:
    """Runs a process and those that it starts; returns why it failed, or None."""
    with log.open("ab") as out:
        start = out.tell()
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            status, reason = process.wait(limit), None
        except subprocess.TimeoutExpired:
            status, reason = None, f"killed after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            process.wait()
    if not status:
        return reason
    with log.open("rb") as printed:
        printed.seek(start)
        lines = printed.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "printed nothing")
    return f"exit status {status}: {last[:300]}"


def measure(name: str, results: Results, *, is_small: bool, until: float) -> None:
    """Measures a step in this process."""
    keep_programs()
    step = STEPS[name]
    module = importlib.import_module(f"perf.first_hour.{step.module}")
    rows: Iterator[dict[str, Any]] = module.measure(*step.arguments, is_small=is_small, until=until)
    for row in rows:
        results.add(name, row)


def find_device() -> dict[str, Any]:
    """Kind, number and bytes of memory of this host's devices; they are released before return.

    Raises:
        RuntimeError: JAX finds none, or does not answer.
    """
    code = (
        "import json, jax; from care_jax.devices import xla_flags; xla_flags.set_defaults(); "
        "from care_jax.run.versions import versions; d = jax.local_devices(); "
        "memory = (d[0].memory_stats() or {}).get('bytes_limit'); "
        "print(json.dumps({'kind': d[0].device_kind, 'platform': d[0].platform, 'devices': len(d), "
        "'bytes': memory, 'versions': versions()}))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError("JAX did not list the devices in 120 s") from error
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace").strip().split("\n")[-1])
    return json.loads(done.stdout.decode().strip().split("\n")[-1])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    about = str(__doc__).split("\n")[0]
    parser = argparse.ArgumentParser("python -m perf.first_hour", description=about)
    parser.add_argument("--minutes", type=float, default=25, help="for all steps (25)")
    parser.add_argument("--steps", help=f"some of {','.join(STEPS)}, in the order to run")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try this program")
    # Of the process of one step.
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.names = args.steps.split(",") if args.steps else list(STEPS)
    if unknown := [name for name in args.names if name not in STEPS]:
        parser.error(f"--steps has no step {unknown[0]!r}, only {', '.join(STEPS)}")
    return args


def main() -> int:
    args = parse()
    if args.step:
        try:
            measure(args.step, Results(args.out), is_small=args.small, until=args.until)
        except Exception as error:
            traceback.print_exc()
            print(one_line(error), file=sys.stderr)
            return 1
        return 0

    until = time.time() + 60 * args.minutes
    try:
        device = find_device()
        if device["platform"] == "cpu" and not args.small:
            raise RuntimeError("JAX finds a CPU alone")
    except RuntimeError as error:
        print(
            f"no accelerator: {error}; run this on a GPU node or TPU VM, with "
            "pip install 'care_jax[cuda]' or 'care_jax[tpu]'; --small tries it on a CPU",
            file=sys.stderr,
        )
        return 2
    kind = re.sub(r"[^a-z0-9]+", "-", device["kind"].lower()).strip("-")
    folder = args.out / f"{kind}{'-small' * args.small}-{datetime.date.today()}"
    results = Results(folder)
    results.add("device", {"began": datetime.datetime.now().isoformat(timespec="seconds")})
    results.add("device", device)
    own = [sys.executable, "-m", "perf.first_hour", f"--out={folder}", *["--small"] * args.small]

    def command(step: str, until: float) -> list[str]:
        return [*own, f"--step={step}", f"--until={until}"]

    def minutes(step: str) -> float:
        return STEPS[step].minutes * (4 if args.small else 1)  # a CPU may be busy

    run_steps(args.names, results, until, command, minutes)
    print(results.write_tables())
    print(f"results are in {folder}", file=sys.stderr)
    rows = [row for name in args.names for row in results.latest()[name]]
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
