"""FLOPs and bytes against numbers worked out by hand, and against the masks they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax.aot import roofline
from care_jax.aot.roofline import DecodeBatch, Layout, Work
from care_jax.decoding import sampler
from care_jax.devices import flops
from care_jax.devices.flops import Chip, Packed
from models import backbone
from models.config import TextConfig, VisionConfig
from models.release.known import RELEASES

TEXT = TextConfig(
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=10,
    norm_eps=1e-6,
    rope_theta=1e4,
    mrope_section=(1, 0, 0),
    tie_embeddings=True,
    max_position_embeddings=64,
)
TOWER = VisionConfig(
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    output_size=4,
    patch_size=2,
    temporal_patch_size=2,
    in_channels=3,
    merge_size=2,
    window_size=4,
    full_attention_layers=(1,),
)
SMALL = dataclasses.replace(RELEASES["Qwen/Qwen2.5-VL-7B-Instruct"], text=TEXT, vision=TOWER)
BATCH = DecodeBatch(prompts=2, prompt_tokens=3, patches=8, rows=2, row_tokens=2)
# Two prompts of 3 tokens with an image of 8 patches each, two responses of 2 tokens to each.
PACKED = Packed(tokens=14, patches=16, pairs=48, patch_pairs=128, scored=8)
LAYOUT = Layout(batch_parts=2, weight_parts=2, product_parts=1, itemsize=2)


def test_decoder_counts_two_flops_for_every_weight_and_four_for_every_pair():
    """A layer has q, out 4x4 and k, v 4x2, and three of 4x8: 48 + 96 weights; 2 heads of 2."""
    assert flops.decoder_flops(TEXT, 3, 0, 0) == 2 * 2 * 3 * 144
    assert flops.decoder_flops(TEXT, 0, 5, 0) == 2 * 4 * 5 * 2 * 2
    assert flops.decoder_flops(TEXT, 0, 0, 7) == 2 * 7 * 4 * 10
    assert roofline.decoder_weights(TEXT) == 2 * 144 + 40


def test_tower_counts_windows_whole_images_and_mergers():
    """8 patches of 24 values: 192 + 2 layers of 256 + 384 weights each; a window holds 4."""
    dense = 8 * (192 + 2 * 640) + 2 * (32 * 32 + 32 * 4)
    pairs = 8 * 8 + 8 * 4
    assert flops.tower_flops(TOWER, 8) == 2 * dense + 4 * 8 * pairs
    deep = dataclasses.replace(
        TOWER, window_size=0, full_attention_layers=(), deepstack_layers=(0,), gated=False
    )
    dense = 8 * (192 + 2 * 512) + 2 * 2 * (32 * 32 + 32 * 4)
    assert flops.tower_flops(deep, 8) == 2 * dense + 4 * 8 * 2 * 8 * 8


@pytest.mark.parametrize(("prompt", "responses"), [(3, (2, 2)), (5, (4, 7, 0)), (4, (1,))])
def test_pairs_of_a_tree_are_those_that_its_mask_shows(prompt, responses):
    ends = prompt + np.cumsum(responses)
    reach = np.full(ends[-1], ends[-1] - 1)
    for end, length in zip(ends, responses, strict=True):
        reach[end - length : end] = end - 1
    token = np.arange(len(reach))
    num_pairs = int(((token <= token[:, None]) & (token[:, None] <= reach)).sum())
    got = flops.tree_pairs(np.array([prompt, prompt]), np.array([responses, responses]))
    assert got.tolist() == [num_pairs, num_pairs]


def test_training_is_three_forwards_and_what_is_recomputed():
    tower, layers, logits = flops.forward_flops(SMALL, PACKED)
    assert tower == 2 * flops.tower_flops(TOWER, 8)
    assert logits == 2 * 8 * 40 and layers == 2 * 2 * 14 * 144 + 2 * 4 * 48 * 4
    for settings, expected in (
        ({"remat": "none"}, 3 * tower + 3 * layers + 4 * logits),
        ({"remat": "dots"}, 3 * tower + 3 * layers + 4 * logits),
        ({"remat": "layer"}, 4 * tower + 4 * layers + 4 * logits),
        ({"remat": "layer", "freeze_vision": True}, tower + 4 * layers + 4 * logits),
        ({"remat": "none", "has_adapters": True}, tower + 2 * layers + 3 * logits),
    ):
        assert flops.train_flops(SMALL, PACKED, **settings) == expected, settings


def test_an_update_is_worth_three_forwards_of_what_is_not_padding():
    """Prompts of 3 and 2 tokens, responses of 2 and 1, and of 0 and 4; one without any."""
    sizes, lengths = np.array([[3, 8], [2, 0], [9, 8]]), np.array([[2, 1], [0, 4], [0, 0]])
    pairs = (6 + 2 * 3 + 3 + 3 + 1) + (3 + 4 * 2 + 10)
    decoder = flops.decoder_flops(TEXT, 12, pairs, 7)
    worth = flops.model_flops(SMALL, sizes, lengths)
    tower = flops.tower_flops(TOWER, 8)
    assert worth == 3 * (decoder + tower)
    adapted = flops.model_flops(SMALL, sizes, lengths, has_adapters=True)
    assert adapted == 2 * decoder + tower


def test_decoding_reads_weights_and_cache_in_every_step():
    """328 weights; 2 prompts of 3 tokens and 4 rows of 2 keep 14 keys and values of 2, 2 layers."""
    work = roofline.decode_work(SMALL, BATCH, LAYOUT, num_steps=3, num_tokens=7)
    cache = 14 * 2 * 2 * 2 * 2 / 2  # half of the prompts
    assert work.tokens == 7 and work.hbm_bytes == 3 * (328 * 2 + cache)
    assert work.num_passes == 3
    # Each of 4 rows is computed in each step, against 3 + 2 slots.
    assert work.flops == flops.decoder_flops(TEXT, 12, 12 * 5, 12)


def test_decoding_reads_as_much_of_the_cache_as_attention_needs():
    """4 slots of prompts, which two rows each attend to, and 5 of rows, in all three steps."""
    settings = dict(num_steps=3, num_tokens=7, num_read=(4, 5))
    work = roofline.decode_work(SMALL, BATCH, LAYOUT, **settings)
    assert work.hbm_bytes == 3 * 328 * 2 + 9 * 2 * 2 * 2 * 2 / 2
    assert work.flops == flops.decoder_flops(TEXT, 12, 2 * 4 + 5, 12)


def test_each_microbatch_gathers_the_weights_of_other_chips_in_every_pass():
    work = roofline.train_work(SMALL, PACKED, LAYOUT, num_microbatches=3, remat="layer")
    assert work.ici_bytes == 3 * 4 * 328 * 2 / 2  # three passes and the gradient
    assert work.hbm_bytes == 3 * 3 * 328 * 2 + 32 * 328 / 2 and work.num_passes == 3
    score = roofline.score_work(SMALL, PACKED, LAYOUT, num_microbatches=3)
    assert (score.ici_bytes, score.hbm_bytes) == (3 * 328 * 2 / 2, 3 * 328 * 2)
    assert score.num_passes == 3
    assert score.flops == sum(flops.forward_flops(SMALL, PACKED))


def test_time_is_that_of_the_scarcest_resource():
    chip = Chip(flops=10, hbm=1, hbm_bandwidth=5, ici_bandwidth=2, dcn_bandwidth=1)
    assert Work(flops=100, hbm_bytes=5, ici_bytes=2).seconds(chip, num_chips=2) == 5
    assert Work(flops=100, hbm_bytes=30, ici_bytes=2).seconds(chip, num_chips=2) == 6
    work = Work(flops=100, hbm_bytes=30, ici_bytes=14)
    assert work.seconds(chip, num_chips=2) == 7
    assert work.bounds(chip, num_chips=2) == {"compute": 5, "memory": 6, "network": 7, "slices": 0}
    assert Work(flops=100, ici_bytes=14, dcn_bytes=8).seconds(chip, num_chips=2) == 8


def test_prefill_is_what_the_compiler_counts(policy, params, prompts):
    """Unrolled and with one layer in the tower, so that the compiler counts each product once.

    It adds norms, rotations and softmax, which weigh more the smaller the width; the mask does not
    keep it from counting what is masked.
    """
    decode_params = backbone.to_decode_layout(params, policy.config, jnp.float32)
    prefill = jax.jit(
        lambda params: sampler.prefill(params, prompts, policy.config, dtype="float32")
    )
    counted = prefill.lower(decode_params).compile().cost_analysis()["flops"]
    B, P = prompts.tokens.shape
    batch = DecodeBatch(B, P, prompts.images.patches.shape[1], 1, 0)
    text = policy.config.text
    masked = 4 * text.num_layers * text.num_heads * text.head_dim * B * (P * P - P * (P + 1) // 2)
    ours = roofline.prefill_work(policy.config, batch, LAYOUT).flops + masked
    np.testing.assert_allclose(counted / ours, 1, atol=0.15)
