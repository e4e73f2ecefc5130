"""The TPU kernel of `cached`: one program that loops over the blocks of the KV caches to be read.

The caches stay in HBM. Their blocks are copied to VMEM in groups, several of which are in flight.
Queries and online softmaxes of all rows are in VMEM, so idle rows and free slots cost nothing, and
rows without a visible slot get 0.

Letters: as in `cached`; O owners of a cache's blocks, the prompts or the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import typing
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from models.attention.kernels import MASKED

# A group's softmaxes are computed side by side, which hides the latency of each. Copies in flight
# hide that of HBM: 768 KiB at 819 GB/s (v5e) take 0.96 µs.
_GROUP_BYTES, _MAX_GROUP = 2**18, 4  # of the blocks of a group, and their largest number
_NUM_GROUPS = 4  # in VMEM: one is computed, the others are being copied
_SUBLANES, _LANES = 8, 128
_WORKSPACE = 2**22  # bytes of VMEM for the compiler's temporaries
_TINY = 1e-30  # below any sum of weights; where there are none, 0 / _TINY is 0


@typing.no_type_check  # `shard_map` puts specs in the fields
@flax.struct.dataclass
class BlockList:
    """The blocks of a cache with a visible slot, the first `count` entries."""

    count: Int[Array, " 1"]
    owners: Int[Array, " n"]
    blocks: Int[Array, " n"]  # of the owner


def live_blocks(is_seen: Bool[Array, "O S"], block: int) -> BlockList:
    """The blocks of `block` slots with a visible slot. By sorting, a single operation on a TPU."""
    padded = jnp.pad(is_seen, ((0, 0), (0, -is_seen.shape[1] % block)))
    is_live = padded.reshape(len(is_seen), -1, block).any(-1)
    numbers = jnp.arange(is_live.size, dtype=jnp.int32).reshape(is_live.shape)
    numbers = jnp.where(is_live, numbers, is_live.size).reshape(-1)
    numbers = jnp.sort(numbers, stable=False)
    count = is_live.sum(dtype=jnp.int32)
    return BlockList(count[None], numbers // is_live.shape[1], numbers % is_live.shape[1])


@dataclasses.dataclass(frozen=True)
class Cache:
    """A KV cache, and the blocks to read."""

    k: Float[Array, "O K S H"]
    v: Float[Array, "O K S H"]
    is_seen: Bool[Array, "O S"]
    live: BlockList
    block: int  # slots per block; should divide S, because the cache is padded (copied) otherwise


def attend_blocks(
    q: Float[Array, "B R K G H"], caches: list[Cache], interpret: bool
) -> Float[Array, "B R K G H"]:
    """softmax(q·k / √H)·v over the visible slots of all caches."""
    B, R, K, G, H = q.shape
    q = q.transpose(2, 3, 1, 0, 4)  # as the matmuls beside the kernel have it, so nothing is copied
    state = B * R * K * -(-G // _SUBLANES) * _SUBLANES, H
    lanes = -(-H // _LANES) * _LANES  # that a vector of H numbers takes
    vmem = _WORKSPACE + 8 * state[0] * lanes * 4  # with q and the output
    lists, arrays, scratch = [], [], [pltpu.VMEM(state, jnp.float32)] * 4
    for c in map(_whole_blocks, caches):
        lists += [c.live.count, c.live.owners, c.live.blocks]
        arrays += [c.k, c.v, c.is_seen[:, None].astype(jnp.int32)]
        size = 2 * K * lanes * c.block * c.k.dtype.itemsize
        buffers = _NUM_GROUPS, min(max(_GROUP_BYTES // size, 1), _MAX_GROUP)
        vmem += math.prod(buffers) * (size + 4 * _SUBLANES * c.block)
        scratch += [pltpu.VMEM((*buffers, K, c.block, H), a.dtype) for a in (c.k, c.v)]
        scratch += [pltpu.VMEM((*buffers, 1, c.block), jnp.int32), pltpu.SemaphoreType.DMA(buffers)]
    in_vmem, in_hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pl.ANY))
    out = pl.pallas_call(
        functools.partial(_body, [B * R // len(c.k) for c in caches]),
        jax.ShapeDtypeStruct((K, B * R, G, H), q.dtype),
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
    return out.swapaxes(0, 1).reshape(B, R, K, G, H)


def _whole_blocks(cache: Cache) -> Cache:
    """The cache padded to whole blocks: a copy to VMEM must stay inside the array."""
    rest = 0, -cache.is_seen.shape[1] % cache.block
    if not rest[1]:
        return cache
    k, v = (jnp.pad(a, ((0, 0), (0, 0), rest, (0, 0))) for a in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v, is_seen=jnp.pad(cache.is_seen, ((0, 0), rest)))


def _body(rows_per_owner: list[int], *refs: Any) -> None:
    """`rows_per_owner` by cache. The state has a row per kv head, row and padded query head."""
    num, left = 3 * len(rows_per_owner), iter(refs)
    lists, (q,), arrays, (out, *state) = (
        list(itertools.islice(left, size)) for size in (num, 1, num, 5)
    )
    (K, G, R, B, _), (queries, sums, top, total), buffers = q.shape, state, list(left)
    padded = queries.shape[0] // (K * R * B)
    loops = [
        _loop(
            num_rows * padded,
            B * R * padded,
            lists[3 * n : 3 * n + 3],
            arrays[3 * n : 3 * n + 3],
            buffers[4 * n : 4 * n + 4],
            state,
        )
        for n, num_rows in enumerate(rows_per_owner)
    ]
    for start, _, _ in loops:
        for i in range(_NUM_GROUPS - 1):
            start(i)

    def rows_of(h, r, g):
        """Of row r of every prompt."""
        return pl.ds((h * B * R + r) * padded + g, B, stride=R * padded)

    def begin(i, _):
        h, r = lax.div(i, R), lax.rem(i, R)
        part = pl.ds(i * B * padded, B * padded)
        for ref, value in ((sums, 0.0), (top, MASKED), (total, 0.0)):
            ref[part] = jnp.full((B * padded, ref.shape[1]), value, ref.dtype)
        for g in range(G):
            queries[rows_of(h, r, g)] = q[h, g, r].astype(jnp.float32)

    lax.fori_loop(0, K * R, begin, None)
    for _, step, num_groups in loops:
        lax.fori_loop(0, num_groups, lambda i, _, step=step: step(i), None)

    chunk = math.gcd(B * R, 16)

    def finish(i, _):
        part = pl.ds(i * chunk * padded, chunk * padded)
        mean = sums[part] / jnp.maximum(total[part], _TINY)
        h, n = lax.div(i * chunk, B * R), lax.rem(i * chunk, B * R)
        mean = mean.reshape(chunk, padded, -1)[:, :G]
        out[h, pl.ds(n, chunk)] = mean.astype(out.dtype)

    lax.fori_loop(0, K * B * R // chunk, finish, None)


def _loop(num_rows: int, rows_per_head: int, lists, arrays, buffers, state):
    """`start` copies group i, `step` waits for it and adds it to the sums; and number of groups.

    Args:
        num_rows: rows of the state that an owner has for a kv head.
        rows_per_head: rows of the state that all owners have for it.
    """
    (count, owners, blocks), (*places, arrived) = lists, buffers
    queries, sums, top, total = state
    (_, group), (_, _, K, block, H) = arrived.shape, places[0].shape

    def number(i, g):
        """Of a block in the list; a group that is not full repeats the last."""
        return jnp.minimum(i * group + g, count[0] - 1)

    def copies(i, g):
        n, place = number(i, g), (lax.rem(i, _NUM_GROUPS), g)
        owner, slots = owners[n], pl.ds(pl.multiple_of(blocks[n] * block, block), block)
        k, v, is_seen = arrays
        sources = k.at[owner, :, slots], v.at[owner, :, slots], is_seen.at[owner, :, slots]
        return [
            pltpu.make_async_copy(source, target.at[place], arrived.at[place])
            for source, target in zip(sources, places, strict=True)
        ]

    def rows_of(i, g, h):
        first = h * rows_per_head + owners[number(i, g)] * num_rows
        return pl.ds(pl.multiple_of(first, _SUBLANES), num_rows)

    def start(i):
        @pl.when(i * group < count[0])
        def _():
            for g in range(group):
                for copy in copies(i, g):
                    copy.start()

    def attended(i, g, h):
        """The softmax over one block: output before division, largest score, sum of weights."""
        k, v, is_seen = (target[lax.rem(i, _NUM_GROUPS), g] for target in places)
        q, is_seen = queries[rows_of(i, g, h)].astype(k.dtype), is_seen != 0
        scores = lax.dot_general(
            q, k[h], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        is_seen &= i * group + g < count[0]
        scores = jnp.where(is_seen, scores * H**-0.5, MASKED)
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
        for g, h, (part, largest, weight) in found:
            rows = rows_of(i, g, h)
            before = top[rows]
            top[rows] = after = jnp.maximum(before, largest)
            old, new = jnp.exp(before - after), jnp.exp(largest - after)
            total[rows] = old * total[rows] + new * weight
            sums[rows] = old * sums[rows] + new * part

    return start, step, pl.cdiv(count[0], group)
