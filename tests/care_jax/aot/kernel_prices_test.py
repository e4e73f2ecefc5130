"""Prices of attention kernels: of a decode step, and of a GPU."""

import pathlib

import jax
import pytest

from care_jax.aot import kernel_prices, shapes, step_sizes
from care_jax.aot.kernel_prices import BANDWIDTH_SHARE, DECODE_KERNEL, decode_attention
from care_jax.decoding.schedule import Sizes
from care_jax.decoding.simulation import Call
from care_jax.devices.flops import CHIPS
from care_jax.devices.sharding import make_mesh
from care_jax.run.run import open_run
from configs import tiny
from models.attention.kernels import DKV, DQ, FORWARD
from models.attention.packed import AttentionImpl

FORWARD_SHARE = kernel_prices.GPU_KERNEL_SHARE[FORWARD]
SIZES = Sizes(4, 2, 4, 512, num_context_tokens=0, num_shards=1, period=4)


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


def test_a_gpu_s_kernels_are_priced_by_query_heads(monkeypatch):
    """Gradients of queries have 3 matmuls and those of keys and values 4, where a forward has 2.

    The latter are written by query head, see `kernels._run_gpu`.
    """
    config = tiny.get_config()
    config.rl.row_tokens, config.stages = 512, ("rl",)
    config.data.buckets = ((128, 64),)
    mesh = make_mesh(**config.mesh, devices=jax.devices()[:1])
    run = open_run(config, pathlib.Path(), mesh=mesh, policy=shapes.policy(config))
    monkeypatch.setattr(kernel_prices, "implementation", lambda *a, **k: AttentionImpl("gpu"))
    expected, text = step_sizes.expected_step(run, 12.0), run.policy.config.text
    price = kernel_prices.kernel_prices(run, expected, CHIPS["h100"])["rl update"]
    queries, keys = (f"{dtype}[512,{text.num_heads},24]" for dtype in ("bf16", "f32"))
    forward = price("decoder", f"({queries}, f32[{text.num_heads},512])")
    share = {walk: kernel_prices.GPU_KERNEL_SHARE[walk] / FORWARD_SHARE for walk in (DQ, DKV)}
    assert price("decoder", queries) == pytest.approx(1.5 * forward / share[DQ])
    assert price("decoder", f"({keys}, {keys})") == pytest.approx(2 * forward / share[DKV])
    rows = [(plan, row) for plan, _ in expected.updates for row in plan.rows if row]
    spans = [kernel_prices._reach(*each) for each in rows]
    impl, group = AttentionImpl("gpu"), text.num_heads // text.num_kv_heads
    scores = kernel_prices._num_scores(spans, group, impl)
    flops = 2 * 2 * scores * 128 * text.num_heads * config.rl.microbatch_size
    assert forward == pytest.approx(flops / (FORWARD_SHARE * CHIPS["h100"].flops)) and forward > 0
