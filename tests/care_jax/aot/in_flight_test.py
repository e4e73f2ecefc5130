"""Prompts and rows in flight: which fit by the memory of compiled ones, which are the fastest."""

import jax
import pytest

from care_jax.aot import shapes
from care_jax.aot.in_flight import Concurrency, Memory, fastest
from care_jax.config.checks import fill_in
from care_jax.devices.flops import Chip
from care_jax.devices.sharding import make_mesh
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.run.run import Run
from configs import tiny

MEAN = 12


def run_of(policy, folder, num_prompts, num_rows):
    config = tiny.get_config()
    config.data.buckets, config.data.max_pixels = ((128, 64),), 1024
    config.care.reflect = False
    config.rl.decode_prompts, config.rl.decode_rows = num_prompts, num_rows
    mesh = make_mesh(1, 2, 1, devices=jax.devices()[:2])
    return Run(fill_in(config, mesh), policy, mesh, folder)


@pytest.fixture
def run(policy, tmp_path):
    return run_of(policy, tmp_path, 16, 2)


def slots(run):
    """Bytes on one device of the slots of the first decode, caches included."""
    return shapes.num_bytes(shapes.slots(run, rollout_sizes(run)[0], 128))


def chip(flops, bandwidth=1.0):
    return Chip(flops=flops, hbm=1, hbm_bandwidth=bandwidth, ici_bandwidth=1, dcn_bandwidth=1)


def test_slots_are_counted_and_the_rest_grows_with_prompts_or_rows(run, policy, tmp_path):
    """A prefill needs 1 MB beside its slots and a decode step 2 MB."""
    memory = Memory(0, 10**9, ((slots(run) + 10**6, slots(run) + 2 * 10**6),))
    assert memory.needed(run, 16, 2) == pytest.approx(10**9 + slots(run) + 2 * 10**6, rel=1e-6)
    wide = run_of(policy, tmp_path, 32, 8)
    expected = 10**9 + slots(wide) + 2 * 8 * 10**6
    assert memory.needed(run, 32, 8) == pytest.approx(expected, rel=1e-6)
    narrow = run_of(policy, tmp_path, 32, 1)
    memory = Memory(0, 0, ((slots(run) + 10**6, slots(run)),))
    assert memory.needed(run, 32, 1) == pytest.approx(slots(narrow) + 2 * 10**6, rel=1e-6)


def test_the_most_prompts_that_fit_are_a_multiple_of_the_shards(run):
    memory = Memory(slots(run) * 3 // 2, 0, ((slots(run), slots(run)),))
    assert memory.most_prompts(run, 2) == 24
    assert memory.most_prompts(run, 8) < 24
    assert Memory(0, 0, memory.programs).most_prompts(run, 2) == 0
    assert Memory(10**15, 0, memory.programs).most_prompts(run, 2) == 64  # all of a step


def test_many_rows_are_fastest_if_steps_read_weights_and_few_if_they_compute(run):
    """All fit. More rows need fewer steps, fewer rows leave less of a step idle."""
    memory = Memory(10**15, 0, ((slots(run), slots(run)),))
    reads = fastest(run, chip(1e15, 1.0), memory, MEAN)
    assert (reads.num_prompts, reads.num_rows) == (64, 4) and reads.share < 1
    computes = fastest(run, chip(1.0, 1e15), memory, MEAN)
    assert computes.num_rows == 1 and computes.share < 1
    run.config.rl.carry_over = 1.0  # no tail of a step, in which most of the 64 slots are idle
    carrying = fastest(run, chip(1.0, 1e15), memory, MEAN)
    assert carrying.num_rows == 1 and carrying.share < 0.95 * computes.share


def test_numbers_that_do_not_fit_are_never_the_fastest(policy, tmp_path):
    run = run_of(policy, tmp_path, 16, 4)
    programs = ((slots(run), slots(run)),)
    assert fastest(run, chip(1.0), Memory(0, 0, programs), MEAN) is None
    reads = chip(1e15, 1.0)
    assert fastest(run, reads, Memory(slots(run), 0, programs), MEAN) == Concurrency(16, 4, 1.0)
    small = Memory(slots(run) * 3 // 4, 0, programs)
    found = fastest(run, reads, small, MEAN)
    assert small.needed(run, found.num_prompts, found.num_rows) <= small.chip and found.share > 1
