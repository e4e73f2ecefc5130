"""Compares the device's attention kernel with XLA before a stage uses it.

The kernels were compiled for TPUs and GPUs and run step by step on a CPU; none has run on an
accelerator yet. So a run on one compares its kernel with XLA's products, forward and backward, on
packed rows of the stage's shape, and falls back to XLA where they differ.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from care_jax.devices import sharding
from care_jax.metrics import print_line
from care_jax.run import Run
from models.attention import largest_difference
from models.attention_mask import AttentionImpl

# Of the largest entry. Rounding gives 1e-2 in bfloat16, and 1e-3 where float32 products are
# computed in fewer bits; a wrong mask gives about 1.
TOLERANCE = 5e-2


def training_attention(run: Run, row_tokens: int) -> AttentionImpl:
    """What computes attention over the packed rows of a stage.

    Under model.attention = "auto" the device's kernel, if it has one that agrees with XLA.

    Args:
        run: the run.
        row_tokens: of a row of the stage.
    """
    name, rules = run.config.model.attention, run.config.sharding_rules
    impl = sharding.attention_impl(name, rules, run.mesh)
    if name != "auto" or impl.name == "xla":
        return impl
    text = run.policy.config.text
    group = text.num_heads // text.num_kv_heads
    heads = text.num_kv_heads, group, text.head_dim
    num_rows = sharding.num_shards(run.train_batch_place)
    reach = np.tile(trial_reach(row_tokens), (num_rows, 1))
    compare = functools.partial(
        largest_difference,
        None,
        heads=heads,
        impl=impl,
        dtype=jnp.dtype(run.config.model.compute_dtype),
    )
    difference = float(jax.jit(compare)(sharding.replicate(reach, run.mesh)))
    is_close = difference <= TOLERANCE  # false for NaN
    print_line(
        f"attention: the {impl.name} kernel differs from XLA by {difference:.1e} on rows of "
        f"{row_tokens} tokens, {'so it is used' if is_close else 'so XLA is used'}"
    )
    if is_close:
        return impl
    return sharding.attention_impl("xla", rules, run.mesh)


def trial_reach(num_tokens: int) -> Int[np.ndarray, " S"]:
    """A row of trees of unequal prompts and responses, and padding: see `batch.TreeRows.reach`."""
    rng = np.random.default_rng(0)
    reach, start = np.arange(num_tokens, dtype=np.int32), 0
    while True:
        prompt = int(rng.integers(num_tokens // 32, num_tokens // 8) + 1)
        branches = rng.integers(1, num_tokens // 16 + 2, 5).tolist()
        stop = start + prompt + sum(branches)
        if stop > num_tokens:
            return reach
        reach[start : start + prompt] = stop - 1
        end = start + prompt
        for length in branches:
            reach[end : end + length] = end + length - 1
            end += length
        start = stop
