"""FLOPs and bytes of each call of a run's programs, for the roofline.

`compile` uses it for compiled programs, `perf.first_hour` for timed calls.
"""

from __future__ import annotations

import jax.numpy as jnp

from care_jax.aot import roofline
from care_jax.aot.roofline import DecodeBatch, Layout, Work
from care_jax.decoding.schedule import Sizes
from care_jax.decoding.simulation import Call
from care_jax.devices import sharding
from care_jax.devices.flops import Packed
from care_jax.run.run import Run
from models.attention.cached import slots_per_block
from models.attention.packed import AttentionImpl


def layout(run: Run, is_decoding: bool = False) -> Layout:
    """Number of shards of batches, all-gathered weights and matmuls under the sharding rules."""
    rules = run.config.decode_sharding_rules if is_decoding else run.config.sharding_rules
    axes = "batch", "embed", "mlp"
    parts = (sharding.num_shards_of(axis, rules, run.mesh) for axis in axes)
    return Layout(*parts, itemsize=jnp.dtype(run.config.model.compute_dtype).itemsize)


def prefill(run: Run, sizes: Sizes, bucket: tuple[int, int]) -> Work:
    """Prefill of `sizes.num_new` prompts, padded to a bucket of (tokens, patches)."""
    batch = DecodeBatch(sizes.num_new, *bucket, 1, 0)
    return roofline.prefill_work(run.policy.config, batch, layout(run, is_decoding=True))


def decode(run: Run, sizes: Sizes, call: Call, impl: AttentionImpl) -> Work:
    """The decode steps of one call; XLA's attention reads the whole caches."""
    batch = DecodeBatch(call.num_slots, call.num_prompt_tokens, 0, sizes.num_rows, sizes.max_tokens)
    return roofline.decode_work(
        run.policy.config,
        batch,
        layout(run, is_decoding=True),
        num_steps=call.num_steps,
        num_tokens=call.num_tokens,
        num_read=None if impl.name == "xla" else positions_read(call, sizes, impl),
    )


def positions_read(call: Call, sizes: Sizes, impl: AttentionImpl) -> tuple[int, int]:
    """Cache positions of prompts and of rows that a kernel reads in a call, in whole blocks.

    A prompt ends at a block boundary, so on average half a block is read in excess. The positions
    of a row start and end anywhere, so it is one block. Idle rows and free slots read nothing; a
    GPU's block for each is left out.
    """

    def read(num_tokens, num_owners, num_positions, is_prefix):
        block = slots_per_block(num_positions, impl, is_prefix)
        touched = num_tokens + num_owners * (block - 1) * (0.5 if is_prefix else 1)
        return int(min(touched, num_owners * num_positions))

    return (
        read(call.prefix_tokens, call.num_active_slots, call.num_prompt_tokens, True),
        read(call.suffix_tokens, call.num_active_rows, sizes.max_tokens, False),
    )


def score(run: Run, num_microbatches: int, packed: Packed) -> Work:
    """Log-probabilities of all responses of an update."""
    return roofline.score_work(
        run.policy.config, packed, layout(run), num_microbatches=num_microbatches
    )


def train(run: Run, num_microbatches: int, packed: Packed) -> Work:
    """Forward and backward over packed rows, and the optimizer."""
    model = run.config.model
    return roofline.train_work(
        run.policy.config,
        packed,
        layout(run),
        num_microbatches=num_microbatches,
        remat=model.remat,
        freeze_vision=model.freeze_vision,
        has_adapters=bool(model.lora_rank),
    )
