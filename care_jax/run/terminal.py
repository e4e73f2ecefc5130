"""What a run prints before its first stage and after its last one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from care_jax.batch import Example
from care_jax.config.checks import is_evaluated
from care_jax.config.resume import ANSWERING, TRAINING
from care_jax.data.examples import SECTIONS
from care_jax.data.mixture import Mixture
from care_jax.data.sources import parts_of
from care_jax.report.records import read_records
from care_jax.run.run import Run, abstract_params

# What the jitted functions are for that contain the model, and so take long to compile.
PROGRAMS = {
    "sft_step": "the cold start's update",
    "score": "log-probabilities",
    "admit": "prefill",
    "advance": "decoding",
    "update": "the update",
}
_FEW = 10  # steps whose mean is shown as a stage's first and last


def num_programs(config: ConfigDict) -> int:
    """Number of compiled `PROGRAMS` if prompts and rows have one size."""
    is_repaired = "rl" in config.stages and config[config.rl.objective].get("reflect", False)
    decoders = is_evaluated(config) + ("rl" in config.stages) + is_repaired
    return 2 * sum(stage in config.stages for stage in TRAINING) + 2 * decoders


def banner(run: Run, sources: Mapping[str, Sequence[Example]], given: Collection[str] = ()) -> str:
    """Model, objective, devices, rows per source, stages and workdir, a line each.

    `given` are the stages of `sources` whose examples were given from Python.
    """
    config, policy = run.config, run.policy
    rows = {
        f"data.{SECTIONS[stage]}": f"{len(each):,} rows given from Python"
        if stage in given
        else _rows(config.data[SECTIONS[stage]], each)
        for stage, each in sources.items()
    }
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(run)))
    weights = policy.folder or "random weights"
    if config.model.lora_rank:
        weights = f"{weights}, LoRA of rank {config.model.lora_rank}"
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items() if size > 1)
    device = run.mesh.devices.flat[0]
    lines = {
        "model": f"{policy.config.family}, {_count(num_params)} parameters, {weights}",
        "devices": f"{run.mesh.size} x {device.device_kind}" + (f" ({axes})" if axes else ""),
        **rows,
        "stages": ", ".join(_stage(config, stage) for stage in config.stages),
        "workdir": f"{run.workdir.resolve()}",
    }
    if "rl" in config.stages:
        lines = {"objective": config.rl.objective, **lines}
    return "\n".join(f"{name:<10} {line}" for name, line in lines.items())


def ending(run: Run) -> str:
    """What was learned, where the report is, and how to open it; read from metrics.jsonl.

    Accuracies of this workdir's earlier runs are included.
    """
    report = run.workdir.resolve() / "report.html"
    copied = shlex.quote(str(report))
    lines = [*_learned(run.workdir / "metrics.jsonl", run.config)]
    if report.exists():
        lines += [
            f"report: {report}",
            f"  open it in a browser; from another machine: scp <host>:{copied} .",
        ]
    return "\n".join(lines)


def how_decoded(temperature: float) -> str:
    """How answers are decoded in an evaluation: "greedy", or "sampled"."""
    return "sampled" if temperature else "greedy"


def _learned(path: Any, config: ConfigDict) -> Iterator[str]:
    """Accuracy on held-out questions after each stage, and of rollouts at both ends of RL.

    Of the evaluations those are shown that compare with the last one.
    """
    held_out: dict[str, dict[str, Any]] = {}
    sampled: list[float] = []
    for _, record in read_records(path):
        stage = record.get("stage", "")
        if stage.startswith("evaluate_"):
            held_out[stage.removeprefix("evaluate_")] = record
        elif stage == "rl" and "acc" in record:
            sampled.append(record["acc"])
    for name, what in (("acc", "held-out questions"), ("mean/acc", "benchmarks, their mean")):
        measured = {after: record for after, record in held_out.items() if name in record}
        if measured:
            *_, last = measured.values()
            how = how_decoded(last.get("temperature", config.evaluate.temperature))
            accuracies = {
                after: record[name]
                for after, record in measured.items()
                if _asked(record, name) == _asked(last, name)
            }
            steps = " -> ".join(f"{acc:.1%} after {after}" for after, acc in accuracies.items())
            values = [*accuracies.values()]
            gain = f" ({100 * (values[-1] - values[0]):+.1f} points)" if len(values) > 1 else ""
            yield f"{how} accuracy, {what}: {steps}{gain}"
    if len(sampled) >= 2 * _FEW:
        first, last = (np.mean(part) for part in (sampled[:_FEW], sampled[-_FEW:]))
        yield (
            f"sampled accuracy, rollouts: {first:.1%} in the first {_FEW} steps of rl, "
            f"{last:.1%} in the last {_FEW}"
        )


def _asked(record: Mapping[str, Any], name: str) -> Any:
    """What two evaluations must have in common for a mean over benchmarks, or `acc`, to compare."""
    benchmarks = {key for key in record if "/" in name and key.endswith("/acc")}
    return benchmarks, [record.get(key) for key in ANSWERING]


def _rows(section: ConfigDict, examples: Sequence[Example]) -> str:
    """Rows of each part of a section, if they are apart, and where they come from."""
    names = [part.path or part.source for part in parts_of(section)]
    if not isinstance(examples, Mixture):
        return f"{len(examples):,} rows of {' + '.join(names)}"
    pairs = zip(examples.sources, names, strict=True)
    return " + ".join(f"{len(rows):,} rows of {name}" for rows, name in pairs)


def _stage(config: ConfigDict, stage: str) -> str:
    return f"{stage} ({config[stage].num_steps:,} steps)" if stage in TRAINING else stage


def _count(number: int) -> str:
    """A number of parameters: 614.2K, 3.75B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)
