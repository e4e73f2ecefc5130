"""The attention kernels of the device against dense attention: differences and times."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.devices import sharding
from care_jax.rl.rollout import rollout_sizes
from care_jax.run import attention_check
from care_jax.run.run import Run
from models.attention.mask import AttentionImpl
from models.attention.packed import attend, block_mask
from perf.accelerator.rates import best_seconds

DENSE_TOKENS = 2048  # of a row, whose dense logits fit on a device


def measure(run: Run) -> list[dict[str, Any]]:
    """A row for each kernel that the run would use.

    Differences are the largest, relative to the largest entry: of the output ("forward") and of the
    gradients of queries, keys and values ("backward").
    """
    text, vision = run.policy.config.text, run.policy.config.vision
    impl = sharding.attention_impl("auto", run.config.sharding_rules, run.mesh)
    xla = sharding.attention_impl("xla", run.config.sharding_rules, run.mesh)
    num_tokens, num_patches = run.config.rl.row_tokens, run.config.rl.row_patches
    heads = text.num_kv_heads, text.num_heads // text.num_kv_heads, text.head_dim
    few = min(DENSE_TOKENS, num_tokens)
    text_row = None, attention_check.trial_reach(num_tokens)
    few_text = None, attention_check.trial_reach(few)
    image_row = attention_check.trial_images(num_patches)
    few_patches = attention_check.trial_images(min(few, num_patches))
    image_heads = vision.num_heads, 1, vision.head_dim
    rows = []
    for name, whole, part, shape in (
        (f"rows of {num_tokens} tokens", text_row, few_text, heads),
        (f"rows of {num_patches} patches", image_row, few_patches, image_heads),
    ):
        forward, backward = differences(run, impl, *part, shape)
        times = {side: seconds(run, each, *whole, shape) for side, each in _sides(impl, xla)}
        rows.append({"kernel": name, "forward": forward, "backward": backward, **times})
    apart, ours, theirs = attention_check.compare_steps(
        run, rollout_sizes(run)[0], max(run.policy.prompts.buckets)[0]
    )
    row = {"kernel": "a decode step, of one layer", "forward": apart, "backward": None}
    return [*rows, {**row, "seconds": ours / 1e3, "XLA's seconds": theirs / 1e3}]


def _sides(impl: AttentionImpl, xla: AttentionImpl) -> tuple[tuple[str, AttentionImpl], ...]:
    return ("seconds", impl), ("XLA's seconds", xla)


def _arrays(run: Run, last, heads):
    """q, k, v and a gradient of the output, in the compute dtype, a row for each shard."""
    K, G, H = heads
    num_rows = sharding.num_shards(run.train_batch_sharding)
    dtype = jnp.dtype(run.config.model.compute_dtype)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (K, G, H), (K, H), (K, H), (K, G, H)
    return [
        jax.random.normal(key, (num_rows, len(last), *shape), dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def _rows(run: Run, row):
    num_rows = sharding.num_shards(run.train_batch_sharding)
    return None if row is None else sharding.replicate(np.tile(row, (num_rows, 1)), run.mesh)


def differences(run: Run, impl: AttentionImpl, first, last, heads) -> tuple[float, float]:
    """(forward, backward) difference of a kernel from dense attention in float32.

    Args:
        run: the run.
        impl: the kernel.
        first, last: of one row, as in `models.attention.packed.block_mask`.
        heads: kv heads, query heads per kv head, head dim.
    """
    q, k, v, g = _arrays(run, last, heads)

    @jax.jit
    def apart(first, last, q, k, v, g):
        def kernel(q, k, v):
            return attend(q, k, v, block_mask(first, last, heads[1], impl))

        def reference(q, k, v):
            return dense(q, k, v, first, last)

        ours, theirs = ([*_with_gradients(f, q, k, v, g)] for f in (kernel, reference))
        return [jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in zip(ours, theirs, strict=True)]

    forward, *backward = map(float, apart(_rows(run, first), _rows(run, last), q, k, v, g))
    return forward, max(backward)


def _with_gradients(function, q, k, v, g):
    out, pull_back = jax.vjp(function, q, k, v)
    return (x.astype(jnp.float32) for x in (out, *pull_back(g.astype(out.dtype))))


def dense(q, k, v, first, last):
    """Attention with all logits in memory: query q sees key k iff first[k] <= q <= last[k].

    Args:
        q: [B, S, K, G, H].
        k, v: [B, S, K, H].
        first, last: [B, S]; first is None for the key itself.

    Returns:
        [B, S, K, G, H] in float32.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    places = jnp.arange(last.shape[1])
    first = places[None] if first is None else first
    is_seen = (first[:, None] <= places[:, None]) & (places[:, None] <= last[:, None])
    with jax.default_matmul_precision("highest"):
        logits = jnp.einsum("bqkgh,bskh->bkgqs", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], logits, -1e30), axis=-1)
        return jnp.einsum("bkgqs,bskh->bqkgh", weights, v)


def seconds(run: Run, impl: AttentionImpl, first, last, heads) -> float:
    """Seconds of forward and backward over one row a shard."""
    q, k, v, g = _arrays(run, last, heads)

    @jax.jit
    def both(first, last, q, k, v, g):
        def kernel(q, k, v):
            return attend(q, k, v, block_mask(first, last, heads[1], impl))

        out, pull_back = jax.vjp(kernel, q, k, v)
        return out, pull_back(g)

    rows = _rows(run, first), _rows(run, last)
    return best_seconds(lambda: both(*rows, q, k, v, g))
