"""Prompts that a step leaves to the next one (rl.carry_over): the first ones, and checkpoints.

A step ends once rl.prompts_per_step prompts are whole, that is, have all their rollouts, so that it
does not wait for the longest. The others go on in the next step, under newer weights; all rollouts
of a prompt are trained on together. Each token keeps the log-probability with which it was
sampled, under the weights and KV cache of that step, so its importance ratio is to the policy that
sampled it.

The first step draws C prompts more than it needs, and every step leaves as many to the next. They
are the first C of the stream of examples; batch t follows at C + t · rl.prompts_per_step.

Letters: C prompts in flight between steps, n of this process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from care_jax.batch import Rollouts
from care_jax.data.pipeline import Batches
from care_jax.decoding.queue import DecodeQueue
from care_jax.decoding.rollout_buffer import InFlight, Request, shapes_of
from care_jax.decoding.schedule import Scheduler
from care_jax.devices import distributed, sharding
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.report.console import print_line
from care_jax.rl.rollout import CarriedOver, asked
from care_jax.rl.rollout_programs import RolloutPrograms, rollout_sizes
from care_jax.run.checkpoint import InFlightSave
from care_jax.run.progress import checkpoint_folder, read_progress, saved_steps
from care_jax.run.run import Run
from care_jax.run.stage import Stage
from models.attention.cached import keys_axis

# Of the rollouts that are saved; drawn_logp and routes where there are some.
_FIELDS = "tokens", "is_valid", "logp", "drawn_logp", "age", "embedding", "routes"


def check_resumed(run: Run) -> None:
    """Checks that unfinished rollouts in the workdir can go on, before anything is loaded.

    Raises:
        ValueError: see `restored`, but for the layout of keys, which depends on the kernel.
    """
    steps, rl = saved_steps(run.workdir, "rl"), run.config.rl
    if not steps or steps[-1] >= rl.num_steps or not num_carried(run):
        return
    folder, (tries, _) = checkpoint_folder(run.workdir, "rl"), rollout_sizes(run)
    progress = read_progress(folder, steps[-1], run.fingerprint())
    if in_flight := progress.get("in_flight"):
        ours = {"rows": tries.num_rows, "shards": tries.num_shards}
        _check_sizes({name: in_flight["sizes"][name] for name in ours}, ours)


def _check_sizes(saved: Mapping[str, int], ours: Mapping[str, int]) -> None:
    if saved != ours:
        raise ValueError(
            f"the checkpoint has unfinished rollouts of decoding with {saved}, and this run has "
            f"{ours}; resume with the same rl.decode_rows and mesh; if only keys_axis differs, on "
            "a TPU, set model.attention to 'kernel' (-2) or 'xla' (-1)"
        )


def num_carried(run: Run) -> int:
    """C, a multiple of the batch shards."""
    rl, shards = run.config.rl, sharding.num_shards(run.decode_batch_sharding)
    return math.ceil(rl.carry_over * rl.prompts_per_step / shards) * shards


def begin(
    run: Run, programs: RolloutPrograms, batches: Batches, stage: Stage
) -> CarriedOver | None:
    """What the stage's first step goes on with, from its checkpoint if it has one.

    If the training data has other prompts at their positions now, these are decoded instead.
    """
    if not num_carried(run):
        return None
    if stage.in_flight is None:
        return drawn_first(run, batches)

    def read(shapes: Any) -> dict[str, Any]:
        return stage.checkpoints.restore_in_flight(shapes, stage.start)

    found = restored(run, programs.queue, batches, stage.in_flight, read)
    if found is None:
        positions = sorted(row[1] for row in stage.in_flight["prompts"])
        print_line(
            f"the training data has other rows in place of the {len(positions)} prompts with "
            "unfinished rollouts, which begin anew"
        )
        return drawn_first(run, batches, positions)
    return found


def drawn_first(run: Run, batches: Batches, positions: Sequence[int] | None = None) -> CarriedOver:
    """The prompts that a step draws beyond its batch: the first C of the stream, or those given."""
    index, period = first_indices(run), run.config.rl.prompts_per_update
    own = sharding.local_rows(period, run.decode_batch_sharding)
    is_own = np.isin(index % period, own)
    position = np.arange(len(index)) if positions is None else np.array(positions)
    position = position[is_own]
    return CarriedOver(asked(index[is_own], *batches.at(position), position))


def _digest(prompt: TokenizedPrompt) -> int:
    """A checksum of the prompt's tokens and image patches."""
    return zlib.crc32(prompt.patches.tobytes(), zlib.crc32(prompt.tokens.tobytes()))


def first_indices(run: Run) -> Int[np.ndarray, " C"]:
    """Indices in the first step of the prompts beyond its batch, equally many on every shard."""
    sizes, _ = rollout_sizes(run)
    number, shard = np.divmod(np.arange(num_carried(run)), sizes.num_shards)
    per_shard = sizes.period // sizes.num_shards
    index = number // per_shard * sizes.period + shard * per_shard + number % per_shard
    return run.config.rl.prompts_per_step + index


def save(programs: RolloutPrograms, carried: CarriedOver | None) -> InFlightSave | None:
    """What all processes have in flight; None if nothing is."""
    if carried is None or carried.in_flight is None:
        return None
    groups, flight = carried.groups, carried.in_flight
    assert groups.position is not None  # of the prompts of a run
    digests = np.array([_digest(request.prompt) for request in flight.requests], int)
    named = flight.uids, groups.position, groups.index, flight.key_data, digests
    rows = [list(row) for row in zip(*(array.tolist() for array in named), strict=True)]
    prompts = distributed.gather_json(rows)
    most = max(len(part) for part in prompts)
    first = most * jax.process_index()
    padded = {
        name: np.pad(array, [(0, most - len(array))] + [(0, 0)] * (array.ndim - 1))
        for name in _FIELDS
        if (array := getattr(flight.rollouts, name)) is not None
    }
    gathered = distributed.gather_rows(padded, np.arange(first, first + most))
    is_real = np.concatenate([np.arange(most) < len(part) for part in prompts])
    arrays = {name: array[is_real] for name, array in gathered.items()}
    description = {
        "prompts": [row for part in prompts for row in part],
        "scheduler": flight.scheduler.saved(),
        "sizes": _sizes(programs.queue),
    }
    if flight.slots is not None:
        description["slots"] = list(flight.slots.prefix.is_valid.shape)
        arrays["slots"] = jax.tree.leaves(flight.slots)
    return InFlightSave(arrays, description)


def restored(
    run: Run,
    queue: DecodeQueue,
    batches: Batches,
    description: Mapping[str, Any],
    read: Callable[[Any], dict[str, Any]],
) -> CarriedOver | None:
    """What a checkpoint has in flight, for this process; None if its prompts are others now.

    Args:
        description: as `save` gave it.
        read: reads arrays of given shapes and shardings from the checkpoint.

    Raises:
        ValueError: decoding has other sizes than when it was saved.
    """
    _check_sizes(description["sizes"], _sizes(queue))
    scheduler = Scheduler(queue.sizes, run.config.rl.max_age)
    scheduler.restore(description["scheduler"])
    columns = map(np.array, zip(*description["prompts"], strict=True))
    uids, position, index, key_data, *digests = columns  # older checkpoints have no digests
    sizes = queue.sizes
    is_own = np.isin(
        uids % sizes.period, sharding.local_rows(sizes.period, run.decode_batch_sharding)
    )
    groups = asked(index[is_own], *batches.at(position[is_own]), position[is_own])
    found = list(map(_digest, groups.prompts))
    is_other = any(found != each[is_own].tolist() for each in digests)
    if any(distributed.gather_json(is_other)):
        return None
    kept = shapes_of(len(uids), sizes, queue.programs.options)
    kept["is_valid"] = jax.ShapeDtypeStruct(kept["tokens"].shape, bool)
    shapes: dict[str, Any] = sharding.abstract(
        kept, dict.fromkeys(kept, sharding.replicated(run.mesh))
    )
    slots = None
    if "slots" in description:
        slots = queue.slots_like(*description["slots"])
        shapes["slots"] = jax.tree.leaves(slots)
    arrays = read(shapes)
    if slots is not None:
        slots = jax.tree.unflatten(jax.tree.structure(slots), arrays.pop("slots"))
        slots = queue.put_aside(slots)
    own = {name: np.asarray(array.addressable_data(0))[is_own] for name, array in arrays.items()}
    rollouts = Rollouts(
        **own,
        is_forced=np.zeros_like(own["is_valid"]),
        is_complete=np.zeros(own["is_valid"].shape[:2], bool),
    )
    requests = [Request(*pair) for pair in zip(groups.index.tolist(), groups.prompts, strict=True)]
    places = np.arange(len(requests))
    key_data = key_data[is_own].astype(np.uint32)
    flight = InFlight(requests, places, uids[is_own], key_data, rollouts, scheduler, slots)
    return CarriedOver(groups, flight)


def _sizes(queue: DecodeQueue) -> dict[str, int]:
    """What must not differ between the save and the restore of slots."""
    options = queue.programs.options
    return {
        "rows": queue.sizes.num_rows,
        "shards": queue.sizes.num_shards,
        "keys_axis": keys_axis(options.attention.steps),
    }
