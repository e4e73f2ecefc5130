"""Speed and memory of kernels and of an RL step on this host's TPUs or GPUs.

    python -m perf.accelerator
    python -m perf.accelerator --quick
    python -m perf.accelerator --only=qwen25vl_3b --json=results.jsonl

Measures, on all devices of one host:

    rates       bfloat16 products of 8192 x 8192 matrices; copies of 1 GiB
    kernels     attention over packed rows and in decode steps: difference from dense attention,
                forward and backward, and time against XLA
    backbones   a step of qwen25vl_3b and qwen25vl_7b with random weights, at worst case and at
                a mean of 600 tokens: prefill, decoding, scoring, update

and prints a Markdown table and a line of JSON. "of products" is the rate of model FLOPs as a share
of the measured matmul rate (without rematerialisation, and without padding except in prefill). "of
copies" is the bandwidth of weights and live KV cache as a share of the measured copy bandwidth.
"peak" is a device's peak memory so far, "predicted" that of `care_jax.aot` for the same programs,
compiled on the CPU meanwhile. Times exclude calls that compile; "compiled" counts programs. A
decode step that compiles in the mean case and not in the worst case is a recompilation.

Each part runs in a separate process, so a failure does not affect the others. Parts that would
start after --minutes are skipped and listed. Goals: decoding at 60% of copies, the update at 50% of
products, memory within 10% of the prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from care_jax.aot.topology import GPUS
from care_jax.devices import xla_flags
from care_jax.devices.flops import GIB, PEAK_FLOPS
from care_jax.run.run import open_run
from care_jax.run.versions import versions
from perf.accelerator import kernels, rates, step

BACKBONES = ("qwen25vl_3b", "qwen25vl_7b")
CASES = {"worst case": None, "mean 600": 600.0}
QUICK_CASES = {"mean 150": 150.0}
GRACE = 60  # seconds for a part to end before it is killed
COLUMNS = "part,lengths,seconds,tokens/s,of products,of copies,peak GiB,predicted,compiled,in"
# TPU topologies of one host, by its number of chips.
_SHAPES = {1: "1x1", 4: "2x2", 8: "2x4"}
_TPUS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}


def topology_of(device_kind: str, num_devices: int) -> str | None:
    """The devices as a topology of `care_jax.aot`; None if there is no such topology."""
    for kind, (name, *_) in GPUS.items():
        if device_kind == name:
            return f"{kind}:{num_devices}"
    if device_kind not in _TPUS or num_devices not in _SHAPES:
        return None
    shape = _SHAPES[num_devices] + ("x1" if _TPUS[device_kind] == "v5p" else "")
    return f"{_TPUS[device_kind]}:{shape}"


def rows_of(part: str, *, is_quick: bool, until: float) -> Iterator[dict[str, Any]]:
    """The rows of a part: "rates", "kernels|<backbone>", "step|<backbone>" on these devices, or
    "predict|<backbone>|<topology>|<bytes>", the bytes of each program according to `care_jax.aot`.
    """
    name, *rest = part.split("|")
    if name == "predict":
        from care_jax.aot.compile import fit

        backbone, topology, num_bytes = rest
        config = step.configuration(backbone, float(num_bytes), is_quick=is_quick)
        yield {program.name: program.total for program in fit(config, topology).programs}
        return
    xla_flags.set_defaults()
    devices = jax.local_devices()
    kind, limit = devices[0].device_kind, (devices[0].memory_stats() or {}).get("bytes_limit")
    if name == "rates":
        yield {"devices": len(devices), "device_kind": kind, "bytes": limit}
        if devices[0].platform != "cpu":
            rate = rates.matmul_rate(devices[0])
            yield {"matmul_rate": rate, "peak_flops": PEAK_FLOPS.get(kind)}
            yield {"copy_bandwidth": rates.copy_bandwidth(devices[0])}
        return
    num_bytes = len(devices) * (limit or 0)
    run = open_run(step.configuration(rest[0], num_bytes, is_quick=is_quick), pathlib.Path())
    if name == "kernels":
        yield from kernels.measure(run)
    else:
        yield from step.measure(run, QUICK_CASES if is_quick else CASES, until)


def start(part: str, args: argparse.Namespace, until: float, **environment: str):
    """Starts this program in a new process, for one part."""
    command = [sys.executable, "-m", "perf.accelerator", f"--part={part}", f"--until={until}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    flags = ["--quick"] if args.quick else []
    return subprocess.Popen([*command, *flags], env={**os.environ, **environment}, **pipes)


def finish(process: subprocess.Popen, until: float) -> list[dict[str, Any]]:
    """The rows that a part printed; if it ended early, the last row says why."""
    try:
        out, err = process.communicate(timeout=max(until + GRACE - time.time(), 1))
        reason = next((line for line in reversed(err.splitlines()) if line.strip()), "no message")
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        reason = "out of time"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if process.returncode:
        rows.append({"failed": reason[:300]})
    return rows


def table(result: dict[str, Any]) -> list[str]:
    """The lines of a report in Markdown."""
    device = result["device"]
    lines = [
        "",
        f"{device['devices']} x {device['device_kind']}, "
        f"{(device.get('bytes') or 0) / GIB:.1f} GiB each; "
        f"jax {result['versions'].get('jax')}, commit {result['versions'].get('commit', '?')}",
        "",
    ]
    rate, copies = device.get("matmul_rate"), device.get("copy_bandwidth")
    if rate and copies:
        peak = device.get("peak_flops")
        share = f" ({rate / peak:.0%} of the published peak)" if peak else ""
        lines += [f"Products {rate / 1e12:.0f} TFLOP/s{share}, copies {copies / 1e9:.0f} GB/s.", ""]
    for backbone, part in result["backbones"].items():
        title, steps = backbone, [COLUMNS.split(",")]
        for row in part["rows"]:
            if row.get("part") == "start":
                rank = row["lora_rank"]
                trained = f"adapters of rank {rank}" if rank else "all parameters"
                title += f", {row['parameters'] / 1e9:.2f} G parameters, {trained} trained"
        lines += [title, ""]
        if "failed" in part["predicted"]:
            lines += [f"No prediction: {part['predicted']['failed']}", ""]
        lines += [*_kernel_lines(part["kernels"]), ""]
        lines += [*_markdown(steps + _step_rows(part, device)), ""]
    return lines


def _kernel_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [["attention", "forward", "backward", "ms", "ms of XLA"]]
    for row in rows:
        if "kernel" not in row:
            cells.append([row["failed"], "", "", "", ""])
            continue
        apart = ("" if row[key] is None else f"{row[key]:.1e}" for key in ("forward", "backward"))
        times = (f"{1e3 * row[key]:.2f}" for key in ("seconds", "XLA's seconds"))
        cells.append([row["kernel"], *apart, *times])
    return _markdown(cells)


def _step_rows(part: dict[str, Any], device: dict[str, Any]) -> list[list[str]]:
    reached, cells = 0.0, []
    for row in part["rows"]:
        if row.get("part") == "start":
            continue
        if "failed" in row:
            cells.append([row.get("part", ""), row.get("case", ""), row["failed"], *[""] * 7])
            continue
        seconds = row["seconds"]
        # The peak is cumulative, and prefill and decode are in one queue.
        names = ["rl reshard", f"rl {row['part']}"]
        if row["part"] in ("prefill", "decode"):
            names += ["rl decode prefill", "rl decode"]
        reached = max([reached, *(part["predicted"].get(name, 0.0) for name in names)])
        shares = (
            f"{amount / seconds / rate:.0%}" if rate and seconds and amount else ""
            for amount, rate in (
                (row["flops"] / device["devices"], device.get("matmul_rate")),
                (row["hbm_bytes"], device.get("copy_bandwidth")),
            )
        )
        peaks = (f"{x / GIB:.1f}" if x else "" for x in (row.get("peak_bytes"), reached))
        speed = f"{row['tokens'] / seconds:.0f}" if seconds else ""
        compiled = str(row["compiled"]), f"{row['compiled_s']:.0f} s"
        row = [row["part"], row["case"], f"{seconds:.2f}", speed, *shares, *peaks, *compiled]
        cells.append(row)
    return cells


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"|{'---|' * len(rows[0])}", *body]


def main() -> int:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m perf.accelerator", description=about)
    parser.add_argument("--quick", action="store_true", help="the 3B, short answers: 3 minutes")
    parser.add_argument("--only", choices=BACKBONES, help="one backbone")
    parser.add_argument("--minutes", type=float, help="10; 3 if --quick")
    parser.add_argument("--json", help="file to which the line of JSON is added")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        for row in rows_of(args.part, is_quick=args.quick, until=args.until):
            print(json.dumps(row), flush=True)
        return 0

    until = time.time() + 60 * (args.minutes or (3 if args.quick else 10))
    # In a child process, so that this one never allocates device memory.
    device: dict[str, Any] = {}
    for row in finish(start("rates", args, until), until):
        device |= row
    kind = device.get("device_kind", "")
    if not device.get("copy_bandwidth"):
        reason = device.get("failed") or f"JAX finds devices of kind {kind!r} alone"
        print(
            f"no accelerator: {reason}; run this on a TPU VM or GPU node, with "
            "pip install 'care_jax[tpu]' or 'care_jax[cuda]'",
            file=sys.stderr,
        )
        return 2
    topology, backbones = topology_of(kind, device["devices"]), {}
    num_bytes = device["devices"] * device["bytes"]
    for backbone in [args.only] if args.only else BACKBONES[: 1 if args.quick else None]:
        predicting = None
        if topology is not None:
            part = f"predict|{backbone}|{topology}|{num_bytes}"
            predicting = start(part, args, until, JAX_PLATFORMS="cpu")
        measured = {}
        for name in ("kernels", "step"):
            print(f"{backbone}: {name}", file=sys.stderr, flush=True)
            measured[name] = finish(start(f"{name}|{backbone}", args, until), until)
        predicted = finish(predicting, until)[0] if predicting else {}
        found = {"kernels": measured["kernels"], "rows": measured["step"], "predicted": predicted}
        backbones[backbone] = found
    result = {"device": device, "versions": versions(), "backbones": backbones}
    print("\n".join(table(result)))
    print(json.dumps(result))
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(result) + "\n")
    parts = [row for part in backbones.values() for row in (*part["kernels"], *part["rows"])]
    return int(any("failed" in row for row in parts))


if __name__ == "__main__":
    sys.exit(main())
