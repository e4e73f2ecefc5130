import numpy as np
import pytest

from care_jax.rollout import plan_waves


def plan(num_tokens, num_shards, prompts_per_update=8, decode_prompts=4):
    return plan_waves(
        np.asarray(num_tokens),
        prompts_per_update=prompts_per_update,
        decode_prompts=decode_prompts,
        num_shards=num_shards,
    )


def test_waves_of_one_shard_go_from_the_shortest_prompt_to_the_longest_ties_by_place():
    np.testing.assert_array_equal(
        plan([5, 1, 3, 1, 9, 2, 2, 8], num_shards=1), [[1, 3, 5, 6], [2, 0, 7, 4]]
    )


@pytest.mark.parametrize(("num_shards", "decode_prompts"), [(2, 2), (2, 8), (4, 4), (4, 8)])
def test_a_prompt_is_decoded_on_the_shard_that_trains_it(num_shards, decode_prompts):
    num_tokens = np.random.default_rng(0).integers(1, 50, 24)
    waves = plan(num_tokens, num_shards, decode_prompts=decode_prompts)
    assert waves.shape == (24 // decode_prompts, decode_prompts)
    assert sorted(waves.ravel()) == list(range(24))
    shard_of_place = np.tile(np.repeat(np.arange(num_shards), 8 // num_shards), 3)
    by_shard = waves.reshape(len(waves), num_shards, -1)
    for shard in range(num_shards):
        own = by_shard[:, shard].ravel()
        assert set(shard_of_place[own]) == {shard}
        assert (np.diff(num_tokens[own]) >= 0).all()
