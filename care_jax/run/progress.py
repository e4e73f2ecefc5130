"""Which steps of a stage are saved, and the JSON beside a step's state.

It says of which model the state is, and has its metadata and the run's settings.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict

from care_jax.devices import distributed


def checkpoint_folder(workdir: pathlib.Path, stage: str) -> pathlib.Path:
    """The folder of the checkpoints of a stage, "sft" or "rl"; it need not exist."""
    return workdir / "checkpoints" / stage


def saved_steps(workdir: pathlib.Path, stage: str) -> list[int]:
    """The steps of a stage whose checkpoints are whole and not set aside, in order.

    Orbax writes commit_success.txt last. On a bucket an unfinished save has a whole one's name.
    """
    files = checkpoint_folder(workdir, stage).glob("*/commit_success.txt")
    names = [file.parent.name for file in files]
    return sorted(int(name) for name in names if name.isdecimal())


def check_same_steps(steps: Mapping[pathlib.Path, Sequence[int]]) -> None:
    """Compares the saved steps by folder, as this process lists them, with the other processes'.

    Raises:
        ValueError: they differ, as with a stale listing; the processes would restore other steps.
    """
    every = distributed.gather_json([list(found) for found in steps.values()])
    for folder, *found in zip(steps, *every, strict=True):
        if any(each != found[0] for each in found):
            raise ValueError(
                f"expected the same checkpoints in {folder} on all processes, got the steps "
                f"{', '.join(map(str, found))} by process; run the same command again once every "
                "host's listing of the folder is fresh, or mount it without a metadata cache, see "
                "docs/operations.md"
            )


def read_progress(
    folder: pathlib.Path, step: int, fingerprint: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON saved beside a step's state; reads the file only.

    Raises:
        ValueError: the step was saved under another fingerprint, or its file cannot be read.
    """
    try:
        text = (folder / str(step) / "progress" / "metadata").read_text(encoding="utf-8")
        progress = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {step} in {folder} is damaged: {error}; remove {folder / str(step)}"
        ) from error
    saved, ours = map(by_dotted_key, (progress["fingerprint"], fingerprint))
    differing = [
        f"{key} (checkpoint {saved.get(key, 'unset')}, config {ours.get(key, 'unset')})"
        for key in sorted(saved.keys() | ours.keys())
        if saved.get(key, "unset") != ours.get(key, "unset")
    ]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    if differing:
        raise ValueError(
            f"the checkpoint in {folder} is of another model: {', '.join(differing[:3])}{more}; "
            "use the config it was saved with or another --workdir"
        )
    return progress


def by_dotted_key(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """With values as JSON restores them, whether the decoder's are under "text" or not."""
    flat = flatten_dict(json.loads(json.dumps(fingerprint)), sep=".")
    flat.pop("text.model_type", None)
    return {key.removeprefix("text."): value for key, value in flat.items()}
