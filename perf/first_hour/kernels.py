"""Kernels of the device: attention at the shapes of every release, and the products of experts.

Each with its difference from dense attention, or from a float32 product for each expert, and its
time against XLA's, in bfloat16 and float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.devices import sharding
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.run import attention_check
from care_jax.run.run import Run
from models.attention.packed import AttentionImpl, attend, block_mask, relative_difference
from models.grouped import grouped
from perf.first_hour import backbone
from perf.first_hour.parts import attempt
from perf.first_hour.rates import best_seconds

RELEASES = ("qwen25vl_3b", "qwen25vl_7b", "qwen3vl_4b", "qwen3vl_8b")
# Rows, experts, input and output width of a product: 2048 tokens, each with 8 of 128 experts.
EXPERTS, SMALL_EXPERTS = (16384, 128, 2048, 768), (512, 4, 64, 48)
DENSE_TOKENS = 2048  # maximum tokens of a row whose dense attention fits on a device


def measure(*, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """A row for each kernel, shape of heads and dtype; releases of equal shape share it."""
    for dtype in ("bfloat16", "float32"):
        runs = {
            name: backbone.open_backbone(name, is_small=is_small, compute_dtype=dtype)
            for name in RELEASES
        }
        shape = SMALL_EXPERTS if is_small else EXPERTS
        labels = {"kernel": "experts", "dtype": dtype, "releases": ["qwen3vl_30b"]}
        measured = functools.partial(experts, *shape, jnp.dtype(dtype))
        yield from attempt(labels | {"heads": shape[1:]}, lambda row=measured: [row()], until)
        for kernel in KERNELS:
            by_heads: dict[Any, list[str]] = {}
            for name, run in runs.items():
                by_heads.setdefault(heads_of(kernel, run), []).append(name)
            for heads, names in by_heads.items():
                labels = {"kernel": kernel, "dtype": dtype, "releases": names, "heads": heads}
                row = functools.partial(KERNELS[kernel], runs[names[0]], heads)
                yield from attempt(labels, lambda row=row: [row()], until)


def heads_of(kernel: str, run: Run) -> tuple[int, int, int]:
    """(kv heads, query heads of each, head dim) of a kernel of `KERNELS`."""
    text, vision = run.policy.config.text, run.policy.config.vision
    if kernel == "images":
        return vision.num_heads, 1, vision.head_dim
    return text.num_kv_heads, text.num_heads // text.num_kv_heads, text.head_dim


def _packed(run: Run, heads, size: int, row_of: Callable) -> dict[str, Any]:
    """Of rows of `size` tokens or patches.

    Differences are `relative_difference`, of the output ("forward") and of the gradients of
    queries, keys and values ("backward").
    """
    impl, xla = (run.attention(name=name) for name in ("kernel", "xla"))
    forward, backward = differences(run, impl, *row_of(min(DENSE_TOKENS, size)), heads)
    times = (seconds(run, each, *row_of(size), heads) for each in (impl, xla))
    names = "size", "forward", "backward", "seconds", "xla_seconds"
    return dict(zip(names, (size, forward, backward, *times), strict=True))


def _text(run: Run, heads) -> dict[str, Any]:
    return _packed(run, heads, run.config.rl.row_tokens, _trial_text)


def _images(run: Run, heads) -> dict[str, Any]:
    return _packed(run, heads, run.config.rl.row_patches, attention_check.trial_images)


def _decode(run: Run, heads) -> dict[str, Any]:
    """Of one layer in a decode step, against XLA."""
    sizes, (num_tokens, _) = rollout_sizes(run)[0], max(run.policy.prompts.buckets)
    apart, ours, theirs = attention_check.compare_steps(run, sizes, num_tokens)
    num_layers = run.policy.config.text.num_layers
    times = {"seconds": ours / 1e3 / num_layers, "xla_seconds": theirs / 1e3 / num_layers}
    return {"size": num_tokens, "forward": apart, **times}


KERNELS: dict[str, Callable[..., dict[str, Any]]] = {
    "text": _text,
    "images": _images,
    "decode": _decode,
}


def experts(
    num_rows: int, num_experts: int, width_in: int, width_out: int, dtype
) -> dict[str, Any]:
    """Of the grouped product of uneven groups, one of them empty, with its gradients."""
    shares = np.random.default_rng(0).dirichlet(np.full(num_experts - 1, 0.7))
    sizes = np.append(np.floor(shares * num_rows), 0).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (num_rows, width_in), (num_experts, width_in, width_out), (num_rows, width_out)
    lhs, kernels, g = (jax.random.normal(*pair, dtype) for pair in zip(keys, shapes, strict=True))
    g = jnp.where(jnp.arange(num_rows)[:, None] < sizes.sum(), g, 0)

    def gradients(product, lhs, kernels, g):
        out, pull_back = jax.vjp(lambda lhs, kernels: product(lhs, kernels, sizes), lhs, kernels)
        return jnp.where(g == 0, 0, out), *pull_back(g.astype(out.dtype))

    def in_float32(lhs, kernels, sizes):
        arrays = (x.astype(jnp.float32) for x in (lhs, kernels))
        return jax.lax.ragged_dot(*arrays, sizes, precision="highest")

    def both(product):
        return jax.jit(functools.partial(gradients, product))

    pairs = zip(both(grouped)(lhs, kernels, g), both(in_float32)(lhs, kernels, g), strict=True)
    apart = [float(relative_difference(a, b)) for a, b in pairs]
    times = (
        best_seconds(functools.partial(both(product), lhs, kernels, g))
        for product in (grouped, jax.lax.ragged_dot)
    )
    names = "size", "forward", "backward", "seconds", "xla_seconds"
    return dict(zip(names, (num_rows, apart[0], max(apart[1:]), *times), strict=True))


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
        return [relative_difference(a, b) for a, b in zip(ours, theirs, strict=True)]

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
