"""The TPU kernel of `cached`: one program that loops over the listed blocks of the KV caches.

The caches stay in HBM. Their blocks are copied to VMEM in groups, several of which are in flight.
Queries, outputs and online softmaxes of all rows are in VMEM, so idle rows and free slots cost
nothing, and rows without a visible slot get 0.

Letters: as in `cached`; N rows of all prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from models.attention.kernels import MASKED, BlockPairs

# A group's softmaxes are computed side by side, which hides the latency of each. Copies in flight
# hide that of HBM: 768 KiB at 819 GB/s (v5e) take 0.96 µs.
_GROUP_BYTES, _MAX_GROUP = 2**18, 4  # of the blocks of a group, and their largest number
_NUM_GROUPS = 4  # in VMEM: one is computed, the others are being copied
_SUBLANES, _LANES = 8, 128
_WORKSPACE = 2**22  # bytes of VMEM for the compiler's temporaries
_TINY = 1e-30  # below any sum of weights; where there are none, 0 / _TINY is 0


@dataclasses.dataclass(frozen=True)
class Cache:
    """A KV cache, and the blocks to read. Its O owners are the prompts or the rows."""

    k: Float[Array, "O K H S"]
    v: Float[Array, "O K S H"]
    is_seen: Bool[Array, "O S"]
    pairs: BlockPairs
    block: int  # slots per block; should divide S, because the cache is padded (copied) otherwise


def attend_blocks(
    q: Float[Array, "N K G H"], caches: list[Cache], interpret: bool
) -> Float[Array, "N K G H"]:
    """softmax(q·k / √H)·v over the visible slots of all caches, in float32."""
    num_rows, K, G, H = q.shape
    q = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, -G % _SUBLANES), (0, 0)))
    caches = [_whole_blocks(cache) for cache in caches]
    lists, arrays = [], []
    scratch: list[Any] = [pltpu.VMEM((*q.shape[:3], 1), jnp.float32)] * 2
    vmem = _WORKSPACE + 4 * q.size // H * max(H, _LANES) * q.dtype.itemsize  # also output and sums
    for c in caches:
        lists += [c.pairs.starts[-1:], c.pairs.owners, c.pairs.others]
        arrays += [c.k, c.v, c.is_seen[:, None].astype(jnp.int32)]
        size = 2 * K * H * c.block * c.k.dtype.itemsize
        buffers = _NUM_GROUPS, min(max(_GROUP_BYTES // size, 1), _MAX_GROUP)
        vmem += math.prod(buffers) * (size + 4 * _SUBLANES * c.block)
        scratch += [
            pltpu.VMEM((*buffers, K, H, c.block), c.k.dtype),
            pltpu.VMEM((*buffers, K, c.block, H), c.v.dtype),
            pltpu.VMEM((*buffers, 1, c.block), jnp.int32),
            pltpu.SemaphoreType.DMA(buffers),
        ]
    in_vmem, in_hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pl.ANY))
    out = pl.pallas_call(
        functools.partial(_body, [num_rows // len(c.k) for c in caches]),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(),
            in_specs=[in_vmem] + [in_hbm] * len(arrays),
            out_specs=in_vmem,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem),
        interpret=interpret,
    )(*lists, q, *arrays)
    return out[:, :, :G]


def _whole_blocks(cache: Cache) -> Cache:
    """The cache padded to whole blocks: a copy to VMEM must stay inside the array."""
    rest = 0, -cache.is_seen.shape[1] % cache.block
    if not rest[1]:
        return cache
    return dataclasses.replace(
        cache,
        k=jnp.pad(cache.k, ((0, 0), (0, 0), (0, 0), rest)),
        v=jnp.pad(cache.v, ((0, 0), (0, 0), rest, (0, 0))),
        is_seen=jnp.pad(cache.is_seen, ((0, 0), rest)),
    )


def _body(rows_per_owner, *refs):
    num_lists = 3 * len(rows_per_owner)  # as many as arrays in HBM
    lists, q, arrays = refs[:num_lists], refs[num_lists], refs[num_lists + 1 : 2 * num_lists + 1]
    out, top, total, *buffers = refs[2 * num_lists + 1 :]
    loops = []
    for n, num_rows in enumerate(rows_per_owner):
        three, four = slice(3 * n, 3 * n + 3), slice(4 * n, 4 * n + 4)
        state = q, out, top, total
        loop = _loop(num_rows, lists[three], arrays[three], buffers[four], state)
        loops.append(loop)
    for start, _, _ in loops:
        for i in range(_NUM_GROUPS - 1):
            start(i)
    chunk = math.gcd(q.shape[0], 16)  # rows

    @pl.loop(0, q.shape[0] // chunk)
    def _(i):
        rows = pl.ds(i * chunk, chunk)
        for ref, value in ((out, 0.0), (top, MASKED), (total, 0.0)):
            ref[rows] = jnp.full((chunk, *ref.shape[1:]), value, ref.dtype)

    for _, step, num_groups in loops:
        lax.fori_loop(0, num_groups, lambda i, _, step=step: step(i), None)

    @pl.loop(0, q.shape[0] // chunk)
    def _(i):
        rows = pl.ds(i * chunk, chunk)
        out[rows] = out[rows] / jnp.maximum(total[rows], _TINY)


def _loop(num_rows, lists, arrays, buffers, state):
    """Of a cache: `start` copies group i, `step` waits for it and adds it; and number of groups."""
    (count, owners, others), (*places, arrived) = lists, buffers
    q, out, top, total = state
    K, H, (_, group) = q.shape[1], q.shape[3], arrived.shape
    block = places[0].shape[-1]

    def number(i, g):
        """Of a block of the list; a group that is not full repeats the last."""
        return jnp.minimum(i * group + g, count[0] - 1)

    def copies(i, g):
        n, place = number(i, g), (i % _NUM_GROUPS, g)
        owner, slots = owners[n], pl.ds(pl.multiple_of(others[n] * block, block), block)
        k, v, is_seen = arrays
        sources = k.at[owner, :, :, slots], v.at[owner, :, slots], is_seen.at[owner, :, slots]
        return [
            pltpu.make_async_copy(source, target.at[place], arrived.at[place])
            for source, target in zip(sources, places, strict=True)
        ]

    def rows_of(i, g):
        return pl.ds(owners[number(i, g)] * num_rows, num_rows)

    def start(i):
        @pl.when(i * group < count[0])
        def _():
            for g in range(group):
                for copy in copies(i, g):
                    copy.start()

    def attended(i, g, h):
        """The softmax over one block: output before division, largest score, sum of weights."""
        k, v, is_seen = (target[i % _NUM_GROUPS, g] for target in places)
        queries = q[rows_of(i, g), h].reshape(-1, H).astype(k.dtype)
        is_seen = (is_seen != 0) & (i * group + g < count[0])
        scores = jnp.dot(queries, k[h], preferred_element_type=jnp.float32) * H**-0.5
        scores = jnp.where(is_seen, scores, MASKED)
        largest = scores.max(1, keepdims=True)
        weights = jnp.where(is_seen, jnp.exp(scores - largest), 0.0)
        part = jnp.dot(weights.astype(v.dtype), v[h], preferred_element_type=jnp.float32)
        return part, largest, weights.sum(1, keepdims=True)

    def step(i):
        start(i + _NUM_GROUPS - 1)
        for g in range(group):
            for copy in copies(i, g):
                copy.wait()
        found = [(g, h, attended(i, g, h)) for g in range(group) for h in range(K)]
        for g, h, sums in found:
            part, largest, weight = (a.reshape(num_rows, -1, a.shape[-1]) for a in sums)
            rows = rows_of(i, g)
            before = top[rows, h]
            top[rows, h] = after = jnp.maximum(before, largest)
            old, new = jnp.exp(before - after), jnp.exp(largest - after)
            total[rows, h] = old * total[rows, h] + new * weight
            out[rows, h] = old * out[rows, h] + new * part

    return start, step, pl.cdiv(count[0], group)
