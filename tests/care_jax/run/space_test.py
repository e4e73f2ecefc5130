"""Room on the disk for what a run saves."""

import dataclasses
import shutil

import jax
import pytest
from scripted import make_step

from care_jax.aot import shapes
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.run import space
from care_jax.run.run import abstract_params

CHANGES = {"keep_checkpoints": 2, "checkpoint_every": 10, "rl.num_steps": 100, "rl.warmup_steps": 0}
RL = CHANGES | {"stages": ("rl",)}
EXPORT = CHANGES | {"stages": ("rl", "export")}
BEST = RL | {"rl.eval_every": 10, "keep_best": 3}


def check(monkeypatch, run, num_checkpoints, total=1):
    free = int(num_checkpoints * space.checkpoint_bytes(run, "rl"))
    usage = shutil._ntuple_diskusage(total, 0, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return space.check(run)


@pytest.mark.parametrize(
    ("changes", "saved", "enough"),
    [
        (RL, (), 3),  # two are kept while the third is written
        (RL, (10, 20), 1),
        (RL, (10,), 2),
        (RL | {"rl.num_steps": 20}, (10,), 1),
        (RL | {"rl.num_steps": 20}, (10, 20), 0),
        (BEST, (), 6),
        (BEST | {"rl.eval_every": 0}, (), 3),
    ],
)
def test_checkpoints_that_will_be_there_at_once_need_room(
    make_run, monkeypatch, changes, saved, enough
):
    run = make_run(changes)
    for step in saved:
        make_step(run.workdir, "rl", step)
    assert check(monkeypatch, run, enough) == ""
    if enough > 1:
        warning = check(monkeypatch, run, enough - 0.1)
        assert warning.startswith(f"warning: the disk of {run.workdir} has ")
        assert "lower keep_checkpoints" in warning


def test_rollouts_in_flight_need_room_too(make_run):
    changes = RL | {"rl.carry_over": 0.25, "rl.prompts_per_step": 8, "rl.prompts_per_update": 8}
    changes |= {"rl.decode_rows": 2, "rl.decode_prompts": 4}
    run, without = make_run(changes), make_run(changes | {"rl.carry_over": 0.0})
    caches = shapes.slots(run, rollout_sizes(run)[0], max(run.config.data.buckets)[0]).cache
    size = space.checkpoint_bytes(run, "rl") - space.checkpoint_bytes(without, "rl")
    of_rows = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)) // 2  # of 2 of 4
    assert of_rows < size < 2 * of_rows
    assert space.checkpoint_bytes(run, "sft") == space.checkpoint_bytes(without, "sft")


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_cold_start_that_nothing_reads_needs_no_room(make_run, monkeypatch, beta):
    """With a KL term it is read, as the reference."""
    run = make_run(RL | {"stages": ("sft", "rl"), "care.beta": beta})
    for step in (10, 20):
        make_step(run.workdir, "rl", step)
    assert (check(monkeypatch, run, 1) == "") == (not beta)


def test_an_export_needs_room_too(make_run, monkeypatch):
    run = make_run(EXPORT)
    one = space.checkpoint_bytes(run, "rl")
    exported = 2 * sum(x.size for x in jax.tree.leaves(abstract_params(run)))
    assert check(monkeypatch, run, 3 + 0.9 * exported / one) != ""
    assert check(monkeypatch, run, 3 + 1.1 * exported / one) == ""


def test_a_run_without_room_for_one_checkpoint_does_not_start(make_run, monkeypatch):
    run = make_run(RL)
    with pytest.raises(ValueError, match=r"and one checkpoint needs .* choose another --workdir"):
        check(monkeypatch, run, 0.9)
    assert check(monkeypatch, run, 0, total=0) == ""  # a mount that reports no sizes


def test_the_disk_is_that_of_the_first_folder_above_that_exists(make_run, monkeypatch, tmp_path):
    run, asked = dataclasses.replace(make_run(RL), workdir=tmp_path / "a" / "b"), []
    usage = shutil.disk_usage

    def noted(path):
        asked.append(path)
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", noted)
    space.check(run)
    assert asked == [tmp_path]
