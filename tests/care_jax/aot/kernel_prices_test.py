"""The price of the attention kernels of a decode step."""

import pathlib

import jax
import pytest

from care_jax.aot import kernel_prices, shapes
from care_jax.aot.kernel_prices import BANDWIDTH_SHARE, DECODE_KERNEL, decode_attention
from care_jax.decoding.schedule import Call, Sizes
from care_jax.devices.flops import CHIPS
from care_jax.devices.sharding import make_mesh
from care_jax.run.run import open_run
from configs import tiny
from models.attention.packed import AttentionImpl

SIZES = Sizes(4, 2, 4, 512, context_tokens=0, num_shards=1, period=4)


def test_a_decode_step_reads_the_blocks_of_active_rows_and_slots(monkeypatch):
    """20 slots see 3000 positions and half a block of 256 in excess, 30 rows 500 and one of 128."""
    config = tiny.get_config()
    mesh = make_mesh(**config.mesh, devices=jax.devices()[:1])
    run = open_run(config, pathlib.Path(), mesh=mesh, policy=shapes.policy(config))
    monkeypatch.setattr(kernel_prices, "implementation", lambda *a, **k: AttentionImpl("tpu"))
    text, chip = run.policy.config.text, CHIPS["v5e"]

    def seconds(**changed):
        call = dict(num_steps=10, num_tokens=0, num_slots=4, num_prompt_tokens=512)
        call |= dict(prefix_tokens=3000, suffix_tokens=500, num_active_slots=20, num_active_rows=30)
        return decode_attention(run, Call(**call | changed), SIZES, chip)

    positions = 3000 + 20 * 127.5 + 500 + 30 * 127
    num_bytes = positions / 10 * 2 * text.num_kv_heads * text.head_dim * 4  # in float32
    read = num_bytes / (BANDWIDTH_SHARE * chip.hbm_bandwidth)
    assert seconds() == pytest.approx(DECODE_KERNEL + read)
    assert seconds(num_slots=400) == seconds()  # free ones
    idle = dict(prefix_tokens=0, suffix_tokens=0, num_active_slots=0, num_active_rows=0)
    assert seconds(**idle) == DECODE_KERNEL
