"""Checks that a resumed run has the settings that its checkpoints depend on.

Every checkpoint stores these settings: the seed, `model`, the stage's section and data, and in RL
the objective's section and the verifier's rewards. Those of a training stage before it count too:
the cold start makes the first policy of RL and the reference of its KL term. A run that resumes
from a checkpoint or exports it must have the same values, except where `config.keys` allows a
change.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from care_jax.config.keys import FIXED, MOVED, STEPS, change_of, leaves
from care_jax.data.examples import SECTIONS
from care_jax.method.objectives import OBJECTIVES

TRAINING = ("sft", "rl")  # the stages that train
# Keys of `evaluate` that answers depend on besides the questions.
ANSWERING = ("temperature", "top_p", "num_samples", "max_response_tokens")
# Keys of `data` for the responses that drawn sources give to the cold start.
DRAWN_RESPONSES = ("teacher_error", "misread_share", "mixed_errors", "lucky_share", "cue_share")
# Prefixes of the keys that the weights depend on only if they went through the stage.
_ONLY_IN = {
    "sft": ("sft.", "data.sft.", *(f"data.{name}" for name in DRAWN_RESPONSES)),
    "rl": ("rl.", "data.train.", "verifier.", *(f"{name}." for name in OBJECTIVES)),
}


def settings(config: ConfigDict, stage: str) -> dict[str, Any]:
    """The settings that the weights of a stage, "sft" or "rl", depend on, by dotted key."""
    stages = list(config.stages)
    before = stages[: stages.index(stage)] if stage in stages else []
    before = [name for name in before if name in TRAINING]
    passed = {stage, *before}
    unread = (f"data.{SECTIONS['evaluate']}.", "data.prepare.")
    for other in set(TRAINING) - passed:
        unread += _ONLY_IN[other]
    if {*stages} == {"evaluate"}:  # of a benchmark whose prompts are longer
        unread += ("data.buckets",)
    if "rl" in passed:
        unread += tuple(f"{name}." for name in OBJECTIVES if name != config.rl.objective)
    found = {}
    for key, value in leaves(json.loads(config.to_json_best_effort())):
        if change_of(key) not in (FIXED, MOVED, STEPS) or key.startswith(unread):
            continue
        found |= {f"{key}.number": len(value)} if _is_parts(value) else {key: value}
    if "sft" in passed and config.data.cue_share:
        found["care.cue"] = config.care.cue
    if stage in stages:
        found["stages"] = before
    return found


def evaluation(config: ConfigDict) -> dict[str, Any]:
    """The questions that `best_metric` is of, and how they are answered and judged, by dotted key.

    Paths count by their last part, as on resume. Rows from Python are not among the keys.
    """
    whole = json.loads(config.to_json_best_effort())
    asked: dict[str, Any] = {f"evaluate.{key}": whole["evaluate"][key] for key in ANSWERING}
    benchmark, is_of_benchmarks, _ = config.best_metric.partition("/")
    if is_of_benchmarks:
        pairs = config.evaluate.benchmarks
        pairs = sorted([name, _last(path)] for name, path in pairs if benchmark in (name, "mean"))
        asked["evaluate.benchmarks"] = pairs
    else:
        for key, value in leaves(whole):
            is_read = key.startswith((f"data.{SECTIONS['evaluate']}.", "verifier."))
            if is_read and change_of(key) in (FIXED, MOVED) and not _is_parts(value):
                asked[key] = _last(value) if change_of(key) == MOVED else value
    return asked


def check(
    saved: Mapping[str, Any], ours: Mapping[str, Any], *, stage: str, step: int, folder: Any
) -> None:
    """Compares the settings of a checkpoint, saved at a step, with those of the run that opens it.

    A key that only one of them has is ignored: it is new, or belongs to another objective.

    Raises:
        ValueError: names every key that differs, its old and its new value.
    """
    named = {"stages": f"stages (those before {stage!r} that train)"}
    differing = [
        f"{named.get(key, key)} was {saved[key]!r}, is {ours[key]!r}"
        for key in sorted(saved.keys() & ours.keys())
        if not _may_become(key, saved[key], ours[key], stage, step)
    ]
    if differing:
        raise ValueError(
            f"the checkpoints in {folder} ({step} steps done) are of a run with other settings: "
            f"{'; '.join(differing)}; set them back, or choose another --workdir"
        )


def _may_become(key: str, old: Any, new: Any, stage: str, step: int) -> bool:
    if old == new or key == f"{stage}.num_steps":
        return old == new or new >= step
    is_path = change_of(key) == MOVED and bool(old and new)
    return is_path and _last(old) == _last(new)


def _is_parts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _last(path: str) -> str:
    return pathlib.PurePath(path).name
