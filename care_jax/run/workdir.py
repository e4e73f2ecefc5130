"""What a run's workdir holds of it already, and whether the run may go on from that."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from care_jax.config import resume
from care_jax.config.checks import has_benchmarks_only, is_evaluated
from care_jax.config.resume import TRAINING
from care_jax.devices import distributed
from care_jax.run.checkpoint import Checkpoints
from care_jax.run.progress import (
    check_same_steps,
    checkpoint_folder,
    read_progress,
    saved_steps,
)
from care_jax.run.run import Run
from care_jax.run.versions import config_before

# What may come from Python, and what it replaces in the configuration.
_GIVEN_FOR = {"rl": "data.train", "evaluate": "data.test", "reward": "verifier.reward"}


def open_checkpoints(run: Run, stage: str) -> Checkpoints:
    """Opens the checkpoints of a stage, "sft" or "rl"; the caller closes them.

    Raises:
        ValueError: they are of a run with other settings, see `resume`, or all are damaged.
    """
    checkpoints = Checkpoints(
        checkpoint_folder(run.workdir, stage),
        keep=run.config.keep_checkpoints,
        keep_best=run.config.keep_best,
        best_metric=run.config.best_metric,
        evaluation=resume.evaluation(run.config),
        fingerprint=run.fingerprint(),
        settings=resume.settings(run.config, stage),
    )
    if (step := checkpoints.latest_step) is not None:
        try:
            check_settings(run, stage, step)
        except ValueError:
            checkpoints.close()
            raise
    return checkpoints


def check_settings(run: Run, stage: str, step: int) -> None:
    """Compares the run with a checkpoint of a stage, "sft" or "rl"; reads one file of it only.

    Raises:
        ValueError: it is of another model, or of a run with other settings, see `resume`.
    """
    folder = checkpoint_folder(run.workdir, stage)
    saved = read_progress(folder, step, run.fingerprint()).get("settings", {})
    ours = resume.settings(run.config, stage)
    resume.check(saved, ours, stage=stage, step=step, folder=folder)


def check_given(
    config: ConfigDict, workdir: pathlib.Path, given: Collection[str], read: Collection[str]
) -> None:
    """Checks that RL's rows and reward come from where those of its checkpoints came from.

    The settings do not tell: rows and a function from Python have no place there. Another source in
    data.test may take the place of held-out rows.

    Args:
        given: what comes from Python: "rl" and "evaluate" for a stage's examples, and "reward".
        read: what the command needs, of these.

    Raises:
        ValueError: something is read that came from Python before, and does not now; or something
            comes from there now that did not before.
    """
    saved = config_before(workdir)
    if "given" not in saved or not saved_steps(workdir, "rl"):
        return
    before, now = {*saved["given"]}, json.loads(config.to_json_best_effort())
    replaced = {name for name, key in _GIVEN_FOR.items() if _at(saved, key) != _at(now, key)}
    if lost := (before & {*read}) - {*given} - replaced:
        others = "" if lost - {"evaluate"} else "set data.test, "
        raise ValueError(
            f"the run in {workdir} had its own from Python in place of {_keys_of(lost)}: call "
            f"care_jax.train_on with it, {others}or choose another workdir"
        )
    if new := ({*given} - before) & {"rl", "reward"}:
        raise ValueError(
            f"the RL stage in {workdir} began with {_keys_of(new)} of its configuration, got "
            "others from Python; leave them out, or choose another workdir"
        )


def read_by(config: ConfigDict, given: Collection[str] = ()) -> list[str]:
    """What the stages of a configuration read, of what may come from Python; see `check_given`."""
    is_held_out = is_evaluated(config) and not has_benchmarks_only(config, given)
    rows = ["rl"] * ("rl" in config.stages) + ["evaluate"] * is_held_out
    return rows + ["reward"] * bool(rows)


def _at(settings: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return settings.get(section, {}).get(name)


def _keys_of(names: Collection[str]) -> str:
    return " and ".join(key for name, key in _GIVEN_FOR.items() if name in names)


def check_workdir(run: Run, *, is_dry: bool = False) -> None:
    """Checks that the run can go on from the checkpoints in its workdir.

    If `is_dry`, nothing is changed there; else unfinished saves are deleted.

    Raises:
        ValueError: see `open_checkpoints`; or RL would ignore the cold start in the workdir, or
            needs it and it is gone; or no checkpoint can be written in a folder of that name; or
            processes list different checkpoints.
    """
    _check_name(run.workdir.absolute())
    folders = {stage: checkpoint_folder(run.workdir, stage) for stage in TRAINING}
    check_same_steps({folders[stage]: saved_steps(run.workdir, stage) for stage in TRAINING})
    stages = run.config.stages
    if "rl" in stages and "sft" not in stages and saved_steps(run.workdir, "sft"):
        raise ValueError(
            f"{checkpoint_folder(run.workdir, 'sft')} has checkpoints of a cold start, which RL "
            f"would ignore, as stages {tuple(stages)} lacks 'sft'; add it (finished steps are not "
            "repeated), or choose another --workdir to start from the weights of model.path"
        )
    for stage in TRAINING:
        if is_dry:
            if saved := saved_steps(run.workdir, stage):
                check_settings(run, stage, max(saved))
            continue
        has_any = any(path.name[0].isdecimal() for path in folders[stage].glob("*"))
        if any(distributed.gather_json(has_any)):
            open_checkpoints(run, stage).close()
    is_gone = _is_past_cold_start(run) and not saved_steps(run.workdir, "sft")
    if is_gone and not is_cold_start_unread(run):
        needs = "a stage before RL" if _is_between(run) else "RL's KL term"
        raise ValueError(
            f"{needs} needs the weights of the cold start, whose checkpoints are gone from "
            f"{checkpoint_folder(run.workdir, 'sft')}; put them back, or choose another --workdir"
        )


def _is_past_cold_start(run: Run) -> bool:
    """Whether the run has a cold start ahead of an RL stage with checkpoints."""
    return {"sft", "rl"} <= {*run.config.stages} and bool(saved_steps(run.workdir, "rl"))


def is_cold_start_unread(run: Run) -> bool:
    """Whether RL goes on from its own checkpoints, and nothing needs the cold start's weights."""
    return _is_past_cold_start(run) and not (_is_between(run) or run.has_reference_copy)


def trained_stages(run: Run) -> list[str]:
    """The stages of the run that train, without a cold start that is unread."""
    stages = [stage for stage in TRAINING if stage in run.config.stages]
    return [stage for stage in stages if stage != "sft" or not is_cold_start_unread(run)]


def _is_between(run: Run) -> bool:
    """Whether a stage between the cold start and RL works on its weights."""
    return run.config.stages.index("rl") != run.config.stages.index("sft") + 1


def _check_name(folder: pathlib.Path) -> None:
    """Rejects names of folders in which Orbax writes checkpoints that cannot be read.

    It finds files that it has written with a pattern that includes the folder's name, takes "gs:/"
    for an address and "\\" for the "/" of Windows, and its metadata is in UTF-8.
    """
    if found := [part for part in ("*", "?", "[", "\\", ":/") if part in f"{folder}/"]:
        raise ValueError(
            "expected a --workdir without *, ?, [, \\ and :/, where checkpoints could not be read, "
            f"got {found[0]} in {folder}; choose another --workdir"
        )
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        name = os.fsencode(folder).decode(errors="backslashreplace")
        raise ValueError(
            f"expected a --workdir whose name is UTF-8, got {name}; choose another --workdir"
        ) from error
