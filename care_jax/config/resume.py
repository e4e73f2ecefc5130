"""What a run that goes on in its workdir may change, and what must stay.

Every checkpoint keeps the settings that its weights depend on: the seed, `model`, the stage's own
section and data, and in RL the objective's section and what the verifier rewards. A run that goes
on, or exports, must have the same ones, but for those of `FREE`. docs/operations.md has the table.
"""

from __future__ import annotations

import fnmatch
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

TRAINING = ("sft", "rl")  # the stages that train
_OF_DATA = {
    "sft": ("sft", "teacher_error", "misread_share", "cue_share"),
    "rl": ("train", "buckets"),
}
_OF_PROMPTS = ("min_pixels", "max_pixels", "system_prompt", "instruction", "think_tag")
_OF_VERIFIER = ("reward", "weights", "success")

_STEPS = "*.num_steps"
# A path may change if its last part stays: a folder that has moved, not another one.
PATHS = ("model.path", "model.tokenizer", "data.*.path", "data.*.images")
# Keys of these sections that may change, and the sentence for each in docs/operations.md.
FREE = {
    _STEPS: "to any number that is not below the steps done",
    "*.eval_every": "evaluations change no weight",
    "*.max_skipped": "what becomes of updates that are not finite",
    "*.microbatch_size": "how a batch is divided; the same result up to rounding",
    "*.row_tokens": "likewise",
    "*.row_patches": "likewise",
    "rl.decode_prompts": "likewise",
    "rl.decode_rows": "likewise",
    "model.attention": "how the same values are computed",
    "model.logprob_chunk": "likewise",
    "model.remat": "likewise",
    "model.offload": "likewise",
}


def settings(config: ConfigDict, stage: str) -> dict[str, Any]:
    """The settings that the weights of a stage, "sft" or "rl", depend on, by dotted key."""
    whole = json.loads(config.to_json_best_effort())
    # The backbone's shape has a check of its own, see `Policy.fingerprint`.
    model = {key: value for key, value in whole["model"].items() if key != "backbone"}
    data = {key: whole["data"][key] for key in (*_OF_PROMPTS, *_OF_DATA[stage])}
    found = {"seed": whole["seed"], "model": model, "data": data, stage: whole[stage]}
    if stage == "sft":
        if data["cue_share"]:
            found["care"] = {"cue": whole["care"]["cue"]}
    else:
        objective = whole["rl"]["objective"]
        found[objective] = whole[objective]
        found["verifier"] = {key: whole["verifier"][key] for key in _OF_VERIFIER}
    if stage in config.stages:
        before = config.stages[: list(config.stages).index(stage)]
        found["stages"] = [name for name in before if name in TRAINING]
    return dict(_flat(found))


def check(
    saved: Mapping[str, Any], ours: Mapping[str, Any], *, stage: str, step: int, folder: Any
) -> None:
    """Compares the settings of a checkpoint with those of the run that opens it.

    A key that only one of them has is not compared: it is new, or belongs to another objective.

    Args:
        saved: of the checkpoint.
        ours: of the run.
        stage: "sft" or "rl".
        step: of the checkpoint.
        folder: of the checkpoints, for the message.

    Raises:
        ValueError: names every key that differs, its old and its new value.
    """
    differing = [
        f"{_named(key, stage)} was {saved[key]!r}, is {ours[key]!r}"
        for key in sorted(saved.keys() & ours.keys())
        if not _may_become(key, saved[key], ours[key], step)
    ]
    if differing:
        raise ValueError(
            f"the checkpoints in {folder} ({step} steps done) are of a run with other settings: "
            f"{'; '.join(differing)}; set them back, or choose another --workdir"
        )


def _may_become(key: str, old: Any, new: Any, step: int) -> bool:
    if old == new:
        return True
    if fnmatch.fnmatchcase(key, _STEPS):
        return new >= step
    if any(fnmatch.fnmatchcase(key, path) for path in PATHS):
        return bool(old and new) and pathlib.PurePath(old).name == pathlib.PurePath(new).name
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in FREE)


def _named(key: str, stage: str) -> str:
    return f"stages (those before {stage!r} that train)" if key == "stages" else key


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; the parts of a mixture are numbered."""
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        yield f"{prefix}.number", len(value)
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, each in items:
        yield from _flat(each, f"{prefix}.{key}" if prefix else str(key))
