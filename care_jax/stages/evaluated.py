"""The stage `evaluate`, whose result a run that is started again need not compute again.

`workdir/evaluated_<name>.json` keeps the result with what it depends on: weights, settings,
held-out rows, and the versions of code and libraries. If all are the same, and the line stands in
metrics.jsonl, it stays where it is.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax

from care_jax.devices import distributed
from care_jax.devices.whole_file import write_whole
from care_jax.report.metrics import print_line
from care_jax.run.run import Run
from care_jax.stages.evaluate import Evaluator
from models.backbone import Params


def evaluate_once(run: Run, evaluator: Evaluator, params: Params, *, name: str) -> dict[str, float]:
    """The metrics of the stage, which are in metrics.jsonl then.

    Args:
        run: the run.
        evaluator: of the run.
        params: in the training layout.
        name: of the stage that trained the weights, see `evaluate.evaluate`.
    """
    path, stage = run.workdir / f"evaluated_{name}.json", f"evaluate_{name}"
    stamp = evaluator.stamp(params)
    has_line = run.metrics.has_line(stage, 0)
    if stamp is not None and has_line and (metrics := _recalled(path, stamp)) is not None:
        print_line(
            f"the evaluation after {name} is done already, with these weights and settings; remove "
            f"{path} to repeat it"
        )
        return metrics
    metrics = evaluator(params, name=name)
    run.metrics.write(stage, 0, metrics)
    if stamp is not None and jax.process_index() == 0:
        write_whole(path, json.dumps({"of": stamp, "metrics": metrics}, indent=2) + "\n")
    return metrics


def _recalled(path: pathlib.Path, stamp: dict[str, Any]) -> dict[str, float] | None:
    """The metrics that the file keeps, the same on all processes; None if of something else."""
    metrics = None
    if jax.process_index() == 0 and path.exists():
        try:
            kept = json.loads(path.read_text())
            metrics = kept["metrics"] if kept["of"] == stamp else None
        except (ValueError, KeyError, TypeError):  # damaged
            metrics = None
    return distributed.gather_json(metrics)[0]
