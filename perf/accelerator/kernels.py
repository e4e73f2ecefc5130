"""Attention kernels of the device: difference from dense attention, and time against XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.devices import sharding
from care_jax.rl.rollout import rollout_sizes
from care_jax.run import attention_check
from care_jax.run.run import Run
from models.attention.packed import AttentionImpl, attend, block_mask
from perf.accelerator.rates import best_seconds

DENSE_TOKENS = 2048  # maximum tokens of a row whose dense attention fits on a device


def measure(run: Run) -> list[dict[str, Any]]:
    """A row for each kernel that the run would use.

    Differences are max |a - b| / max |b|, of the output ("forward") and of the gradients of
    queries, keys and values ("backward").
    """
    text, vision = run.policy.config.text, run.policy.config.vision
    impl, xla = (
        sharding.attention_impl(name, run.config.sharding_rules, run.mesh)
        for name in ("auto", "xla")
    )

    text_heads = text.num_kv_heads, text.num_heads // text.num_kv_heads, text.head_dim
    image_heads = vision.num_heads, 1, vision.head_dim
    rows = []
    for unit, size, row_of, heads in (
        ("tokens", run.config.rl.row_tokens, _trial_text, text_heads),
        ("patches", run.config.rl.row_patches, attention_check.trial_images, image_heads),
    ):
        forward, backward = differences(run, impl, *row_of(min(DENSE_TOKENS, size)), heads)
        times = [seconds(run, each, *row_of(size), heads) for each in (impl, xla)]
        rows.append((f"rows of {size} {unit}", forward, backward, *times))
    sizes, bucket = rollout_sizes(run)[0], max(run.policy.prompts.buckets)
    apart, ours, theirs = attention_check.compare_steps(run, sizes, bucket[0])
    rows.append(("a decode step, of one layer", apart, None, ours / 1e3, theirs / 1e3))
    names = "kernel", "forward", "backward", "seconds", "XLA's seconds"
    return [dict(zip(names, row, strict=True)) for row in rows]


def _trial_text(num_tokens: int):
    return None, attention_check.trial_reach(num_tokens)


def _arrays(run: Run, first, last, heads):
    """first, last, q, k, v and an output gradient, in the compute dtype, one row per shard."""
    K, G, H = heads
    num_rows = sharding.num_shards(run.train_batch_sharding)
    spans = (
        None if row is None else sharding.replicate(np.tile(row, (num_rows, 1)), run.mesh)
        for row in (first, last)
    )
    dtype = jnp.dtype(run.config.model.compute_dtype)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (K, G, H), (K, H), (K, H), (K, G, H)
    arrays = (
        jax.random.normal(key, (num_rows, len(last), *shape), dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    return *spans, *arrays


def _with_gradients(function, q, k, v, g):
    out, pull_back = jax.vjp(function, q, k, v)
    return out, *pull_back(g.astype(out.dtype))


def differences(run: Run, impl: AttentionImpl, first, last, heads) -> tuple[float, float]:
    """(forward, backward) difference of a kernel from dense attention in float32.

    `first` and `last` are of one row, see `models.attention.packed.block_mask`; `heads` is (kv
    heads, query heads per kv head, head dim).
    """

    @jax.jit
    def apart(first, last, *arrays):
        mask = block_mask(first, last, heads[1], impl)
        ours = _with_gradients(lambda q, k, v: attend(q, k, v, mask), *arrays)
        theirs = _with_gradients(lambda q, k, v: dense(q, k, v, first, last), *arrays)
        pairs = ((x.astype(jnp.float32) for x in pair) for pair in zip(ours, theirs, strict=True))
        return [jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs]

    forward, *backward = map(float, apart(*_arrays(run, first, last, heads)))
    return forward, max(backward)


def dense(q, k, v, first, last):
    """Dense attention in float32: query q attends to key k iff first[k] <= q <= last[k].

    q and the result are [B, S, K, G, H], k and v [B, S, K, H], first and last [B, S]; first None
    means first[k] = k.
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
    """Seconds of forward and backward over one row per shard."""

    @jax.jit
    def both(first, last, *arrays):
        mask = block_mask(first, last, heads[1], impl)
        return _with_gradients(lambda q, k, v: attend(q, k, v, mask), *arrays)

    arrays = _arrays(run, first, last, heads)
    return best_seconds(lambda: both(*arrays))
