"""A step's rows and schedules: at worst those of the largest batch, expected of drawn lengths."""

import jax
import numpy as np
import pytest

from care_jax.aot import step_sizes
from care_jax.config.checks import fill_in
from care_jax.devices import flops
from care_jax.devices.sharding import make_mesh
from care_jax.packing.plan import TreeSizes, plan_rows
from care_jax.rl.rollout_programs import num_context_tokens
from care_jax.run.run import Run
from configs import tiny

MEAN = 12


@pytest.fixture
def run(policy, tmp_path):
    config = tiny.get_config()
    config.data.buckets = ((96, 64), (128, 64))
    config.data.max_pixels = 1024
    config.rl.row_tokens, config.rl.decode_prompts, config.rl.row_lengths = 512, 16, 16
    config.sft.row_tokens = 256
    mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
    return Run(fill_in(config, mesh), policy, mesh, tmp_path)


@pytest.fixture
def drawn(run, monkeypatch):
    """(prompts, responses) in place of drawn ones: response r of prompt n has n % 20 + r + 1."""
    prompts = np.stack([np.arange(64) + 20, np.full(64, 32)], 1)
    responses = np.arange(64)[:, None] % 20 + np.arange(9) + 1
    monkeypatch.setattr(step_sizes, "draw", lambda *_: (prompts, responses))
    return prompts, responses


def test_the_largest_step_is_full(run):
    """64 prompts on 16 slots, updates of 32; of 36 tokens 11 and a cue are forced."""
    step = step_sizes.largest_step(run)
    decoding, reflecting = step.decoding, step.reflecting
    assert len(step.updates) == 2
    # A prefill has a prompt of either shard. Of 8 rollouts 4 are in flight: a row has two of 36.
    assert decoding.prefills == ((128, 64),) * 32
    assert sum(call.num_tokens for call in decoding.calls) == 64 * 8 * 36
    assert decoding.num_steps == 64 // 16 * 2 * 35
    assert {call.num_prompt_tokens for call in decoding.calls} == {128}
    context = num_context_tokens(run)
    assert reflecting.prefills == ((128 + context, 64),) * 32  # for 32 slots, with a row each
    assert sum(call.num_tokens for call in reflecting.calls) == 64 * (36 - context)
    plan, packed = step.updates[0]
    assert plan.real_tokens == 32 * (128 + 9 * 36) and packed.scored == 32 * 9 * 36
    # One tree of 128 + 9 * 36 tokens to a row, 480 of its 512: lengths are sixteenths.
    assert step.num_microbatches == 2 * 32 // run.config.rl.microbatch_size
    assert step.train_fill == 452 / 480


def test_all_that_is_drawn_is_decoded(run, drawn):
    _, responses = drawn
    step = step_sizes.expected_step(run, MEAN)
    assert sum(call.num_tokens for call in step.decoding.calls) == responses[:, :8].sum()
    room = 36 - num_context_tokens(run)
    sampled = sum(call.num_tokens for call in step.reflecting.calls)
    assert sampled == np.minimum(responses[:, 8], room).sum()
    # The smallest bucket that holds 20 + 40 tokens, before that which holds 20 + 63.
    assert step.decoding.prefills[0] == (96, 64)


def test_updates_are_planned_as_a_run_plans_them(run, drawn):
    prompts, responses = drawn
    step = step_sizes.expected_step(run, MEAN)
    for (plan, packed), start in zip(step.updates, (0, 32), strict=True):
        part = slice(start, start + 32)
        expected = plan_rows(
            TreeSizes(*prompts[part].T, responses[part]),
            row_tokens=512,
            row_patches=run.config.rl.row_patches,
            microbatch_size=run.config.rl.microbatch_size,
        )
        assert plan.num_microbatches == expected.num_microbatches
        assert (packed.tokens, packed.patches) == (
            expected.computed_tokens,
            expected.computed_patches,
        )
        pairs = flops.tree_pairs(prompts[part, 0], responses[part]).sum()
        assert packed.pairs == pairs and packed.patch_pairs == 32 * 32 * 32
        assert packed.scored == responses[part].sum()
    real = sum((prompts.sum(0)[0], responses.sum()))
    assert step.train_fill == real / sum(packed.tokens for _, packed in step.updates)


def test_shorter_responses_make_a_smaller_step(run):
    largest, expected = step_sizes.largest_step(run), step_sizes.expected_step(run, MEAN)
    assert expected.num_microbatches < largest.num_microbatches
    assert expected.decoding.num_steps < 0.6 * largest.decoding.num_steps
    again = step_sizes.expected_step(run, MEAN)
    assert again.decoding == expected.decoding  # drawn alike every time


def test_the_cold_start_is_planned_too(run):
    num_microbatches, packed = step_sizes.largest_imitation(run)
    assert (num_microbatches, packed.tokens, packed.scored) == (8, 64 * 256, 64 * 256)
    assert packed.pairs == 64 * 256 * 257 // 2 and packed.patch_pairs == 64 * 128**2
    num_expected, expected = step_sizes.expected_imitation(run, MEAN)
    assert num_expected < num_microbatches and expected.scored < 64 * 3 * MEAN


def test_carrying_prompts_over_decodes_a_typical_step_with_fewer_idle_rows(run, monkeypatch):
    """One rollout of a prompt has 36 tokens, the others 9: a step of 64 prompts needs 792 of them.

    A step without carrying over waits for the long one of the prompts that were admitted last.
    """
    seeds = []

    def draw(run, num_prompts, num_rows, mean, cap, seed=0):
        seeds.append((seed, num_prompts))
        responses = np.full((num_prompts, num_rows), 9)
        responses[np.arange(num_prompts), np.arange(num_prompts) % 8] = 36
        return np.tile([40, 32], (num_prompts, 1)), responses

    monkeypatch.setattr(step_sizes, "draw", draw)
    alone = step_sizes.expected_step(run, MEAN)
    assert alone.num_left == 0 and alone.least_decode_steps == 64 * (7 * 9 + 36) / (16 * 4)
    run.config.rl.carry_over, seeds[:] = 0.15, []
    step = step_sizes.expected_step(run, MEAN)
    assert seeds[-10:] == [(0, 74), *((number, 64) for number in range(1, 10))]  # 2 shards: 10 more
    # As many slots as hold 5 prompts on either shard, some of them spread over several.
    assert 0 < step.num_left <= 16
    assert step.reflecting == alone.reflecting and step.updates[0][1] == alone.updates[0][1]
    assert step.decoding.num_steps < alone.decoding.num_steps
    assert step.least_decode_steps == pytest.approx(alone.least_decode_steps, rel=0.05)
