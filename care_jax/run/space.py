"""Whether the disk of the workdir has room for what a run saves."""

from __future__ import annotations

import math
import pathlib
import shutil

import jax
import jax.numpy as jnp

from care_jax.devices.flops import GIB
from care_jax.run.progress import saved_steps
from care_jax.run.run import Run, abstract_params, abstract_state, make_adamw
from care_jax.run.workdir import trained_stages

_EXPORT_BYTES = 2  # of a parameter, in bfloat16


def checkpoint_bytes(run: Run, stage: str) -> int:
    """Size of a checkpoint of a stage, "sft" or "rl"."""
    state = abstract_state(run, make_adamw(run, stage))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return size + (_in_flight_bytes(run) if stage == "rl" else 0)


def _in_flight_bytes(run: Run) -> int:
    """Size of the KV caches of the prompts that `rl.carry_over` leaves unfinished, at the most."""
    rl, text = run.config.rl, run.policy.config.text
    num_prompts = min(math.ceil(rl.carry_over * rl.prompts_per_step), rl.decode_prompts)
    num_rows = min(rl.decode_rows, rl.num_rollouts)
    num_tokens = max(map(tuple, run.config.data.buckets))[0] + num_rows * rl.max_response_tokens
    num_values = 2 * text.num_layers * text.num_kv_heads * text.head_dim  # of a token
    itemsize = jnp.dtype(run.config.model.compute_dtype).itemsize
    return num_prompts * num_tokens * num_values * itemsize


def check(run: Run) -> str:
    """A warning if the disk may become full; empty if there is room, or nothing is known of it.

    While a checkpoint is written, those that it replaces are still there.

    Raises:
        ValueError: not even one checkpoint has room.
    """
    config, workdir = run.config, run.workdir
    usage = shutil.disk_usage(_existing(workdir))
    if not usage.total:  # as some mounts report
        return ""
    needed, largest = 0, 0
    for stage in trained_stages(run):
        saved = saved_steps(workdir, stage)
        steps_left = config[stage].num_steps - max(saved, default=0)
        num_saves = math.ceil(max(steps_left, 0) / config.checkpoint_every)
        num_best = config.keep_best if config[stage].eval_every else 0
        num_kept = config.keep_checkpoints + num_best + 1
        if num_saves:
            size = checkpoint_bytes(run, stage)
            needed += size * max(min(num_saves, num_kept - len(saved)), 1)
            largest = max(largest, size)
    if "export" in config.stages:
        needed += _EXPORT_BYTES * sum(x.size for x in jax.tree.leaves(abstract_params(run)))
    free = f"the disk of {workdir} has {usage.free / GIB:.3g} GiB free"
    if usage.free < largest:
        raise ValueError(
            f"{free}, and one checkpoint needs {largest / GIB:.3g}; free space there or choose "
            "another --workdir"
        )
    if usage.free < needed:
        return (
            f"warning: {free}, and the run may save {needed / GIB:.3g}; free space there, or lower "
            "keep_checkpoints or keep_best"
        )
    return ""


def _existing(folder: pathlib.Path) -> pathlib.Path:
    """The folder, or the first above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
