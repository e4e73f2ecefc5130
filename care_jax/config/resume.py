"""Checks that a resumed run has the settings that its checkpoints depend on.

Every checkpoint stores these settings: the seed, `model`, the stage's section and data, and in RL
the objective's section and the verifier's rewards. A run that resumes from it or exports it must
have the same values, except where `config.keys` allows a change.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from care_jax.config.keys import FIXED, MOVED, STEPS, change_of, leaves
from care_jax.data.stages import SECTIONS
from care_jax.method.objectives import OBJECTIVES

TRAINING = ("sft", "rl")  # the stages that train
# Prefixes of the keys that no other stage's weights depend on.
_ONLY_IN = {
    "sft": (
        *("sft.", "data.sft.", "data.teacher_error", "data.misread_share", "data.mixed_errors"),
        *("data.lucky_share", "data.cue_share"),
    ),
    "rl": ("rl.", "data.train.", "data.buckets", "verifier.", *(f"{name}." for name in OBJECTIVES)),
}


def settings(config: ConfigDict, stage: str) -> dict[str, Any]:
    """The settings that the weights of a stage, "sft" or "rl", depend on, by dotted key."""
    (other,) = set(TRAINING) - {stage}
    unread = (*_ONLY_IN[other], f"data.{SECTIONS['evaluate']}.", "data.prepare.")
    if stage == "rl":
        unread += tuple(f"{name}." for name in OBJECTIVES if name != config.rl.objective)
    found = {}
    for key, value in leaves(json.loads(config.to_json_best_effort())):
        if change_of(key) not in (FIXED, MOVED, STEPS) or key.startswith(unread):
            continue
        is_parts = isinstance(value, list) and value and isinstance(value[0], dict)
        found |= {f"{key}.number": len(value)} if is_parts else {key: value}
    if stage == "sft" and config.data.cue_share:
        found["care.cue"] = config.care.cue
    if stage in config.stages:
        before = config.stages[: list(config.stages).index(stage)]
        found["stages"] = [name for name in before if name in TRAINING]
    return found


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
        if not _may_become(key, saved[key], ours[key], step)
    ]
    if differing:
        raise ValueError(
            f"the checkpoints in {folder} ({step} steps done) are of a run with other settings: "
            f"{'; '.join(differing)}; set them back, or choose another --workdir"
        )


def _may_become(key: str, old: Any, new: Any, step: int) -> bool:
    change = change_of(key)
    if old == new or change == STEPS:
        return old == new or new >= step
    is_path = change == MOVED and bool(old and new)
    return is_path and pathlib.PurePath(old).name == pathlib.PurePath(new).name
