"""Which prompts the first step draws beyond its batch."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from care_jax.batch import Groups
from care_jax.data.pipeline import Batches
from care_jax.devices.sharding import make_mesh
from care_jax.rl import carry_over, rollout
from care_jax.rl.rollout import asked
from care_jax.rl.rollout_programs import rollout_sizes

CHANGES = {"rl.prompts_per_step": 16, "rl.prompts_per_update": 8, "rl.decode_prompts": 8}


@pytest.fixture
def carrying(make_run):
    """Runs on four batch shards, with this share of 16 prompts carried over."""

    def make(share):
        run = make_run(CHANGES | {"rl.carry_over": share}, f"{share}")
        return dataclasses.replace(run, mesh=make_mesh(1, 4, 1, devices=jax.devices()[:4]))

    return make


def batches_of(run, questions):
    builder, offset = run.policy.prompts, carry_over.num_carried(run)
    return Batches(questions(range(30)), builder, batch_size=16, seed=3, offset=offset)


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.1, 4), (0.25, 4), (0.3, 8), (1.0, 16)])
def test_prompts_beyond_the_batch_are_as_many_on_each_shard(carrying, questions, share, number):
    run = carrying(share)
    assert carry_over.num_carried(run) == number
    if number:
        first = carry_over.drawn_first(run, batches_of(run, questions)).groups
        assert len(first.index) == len(set(first.index.tolist())) == number
        assert first.index.min() >= 16
        shards = rollout_sizes(run)[0].shard_of(first.index)
        assert np.bincount(shards).tolist() == [number // 4] * 4


def test_no_prompt_of_the_stream_is_drawn_twice(carrying, questions):
    """Not before the source ends: of 30 questions by 8 prompts and a batch of 16."""
    run = carrying(0.5)
    batches = batches_of(run, questions)
    first = carry_over.drawn_first(run, batches).groups
    positions = [*first.position.tolist(), *batches.positions(0), *batches.positions(1)]
    assert sorted(positions) == list(range(8 + 32))
    asked = [*first.examples, *batches.batch(0)[0]]
    assert len({example.id for example in asked}) == 24


def test_a_mesh_that_unfinished_rollouts_do_not_fit_is_refused_at_once(carrying):
    run = carrying(0.5)
    tries, _ = rollout_sizes(run)
    sizes = {"rows": tries.num_rows, "shards": tries.num_shards, "keys_axis": -1}
    carry_over.check_resumed(run)

    def save(step, **changes):
        folder = run.workdir / "checkpoints" / "rl" / str(step)
        (folder / "progress").mkdir(parents=True)
        progress = {"fingerprint": run.fingerprint(), "in_flight": {"sizes": sizes | changes}}
        (folder / "progress" / "metadata").write_text(json.dumps(progress))
        (folder / "commit_success.txt").touch()

    save(1)
    carry_over.check_resumed(run)
    save(2, shards=8)
    with pytest.raises(ValueError, match=r"with .*'shards': 8}, and .*'shards': 4}; resume with"):
        carry_over.check_resumed(run)
    run.config.rl.num_steps = 2
    carry_over.check_resumed(run)


def test_few_groups_move_where_shards_finished_unequal_numbers(carrying):
    """16 positions of two updates and four shards; shard 0 has 6 groups, shard 3 has 2."""
    sizes = rollout_sizes(carrying(0.5))[0]
    held = [[0] * 6 + [1] * 4, [2] * 4 + [3] * 2]
    assigned = rollout._assign_positions(held, sizes, 8)
    assert sorted(assigned) == list(range(16))
    every = [(process, row) for process, shards in enumerate(held) for row in range(len(shards))]
    assert sorted(assigned.values()) == every
    shards = sizes.shard_of(np.array([*assigned])).tolist()
    away = [group for shard, group in zip(shards, assigned.values(), strict=True)
            if held[group[0]][group[1]] != shard]  # fmt: skip
    assert away == [(0, 4), (0, 5)]  # the last ones, so that the carried-over ones stay
    first = [group for position, group in assigned.items() if position < 8]
    assert sum(group in ((0, 0), (0, 1)) for group in first) == 1  # of both updates


def test_each_update_has_its_part_of_the_prompts_that_were_carried_over(carrying, questions):
    """Of a step's 16 groups the first 8 came from the step before, two on each shard."""
    run = carrying(0.5)
    batches = batches_of(run, questions)
    carried = carry_over.drawn_first(run, batches).groups
    new = asked(np.arange(8), *batches.at(range(8, 16)), np.arange(8, 16))
    groups = rollout._share_out(run, Groups.concatenate([carried, new]), np.arange(16))
    assert groups.index.tolist() == list(range(16))
    assert sorted(groups.position.tolist()) == list(range(16))
    assert (groups.position.reshape(2, 8) < 8).sum(1).tolist() == [4, 4]
