"""Attention in decoding: one new token per row against the KV caches.

The rows of a prompt share one KV cache of the prompt, the prefix. Each row has a KV cache of its
response, the suffix. One softmax runs over both.

"xla" computes the scores of all slots and masks them. The TPU and GPU kernels read only blocks with
a visible slot: a suffix is allocated for the longest response, and most rows are far from it. They
compute prefix and suffix separately, as in flash decoding, and average the two outputs by their
log-sum-exps.

Letters: B prompts, R rows of each, T new tokens of a row, P slots of a prefix, S slots of a suffix,
K kv heads, G query heads per kv head, H head dim. A part has O owners (prompts or rows), each with
M query rows per kv head.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from models.attention.kernels import MASKED, BlockPairs, block_pairs
from models.attention.packed import XLA, AttentionImpl, matmul, split_heads

_TPU_BLOCK, _GPU_BLOCK = 256, 64  # slots per block


@flax.struct.dataclass
class CacheMask:
    """The cache slots that the new tokens attend to; the same for all layers."""

    prefix: Bool[Array, "B P"]
    suffix: Bool[Array, "B R T S"]
    # The blocks to read, owned by prompts and by rows; None for "xla". Under a mesh, the
    # concatenated lists of all batch shards.
    prefix_blocks: BlockPairs | None
    suffix_blocks: BlockPairs | None
    impl: AttentionImpl = flax.struct.field(pytree_node=False)  # what the lists are built for


def cache_mask(
    prefix: Bool[Array, "B P"], suffix: Bool[Array, "B R T S"], impl: AttentionImpl = XLA
) -> CacheMask:
    """The mask of one decode step, for `attend_cached`; true for the slots that tokens attend to.

    The kernels support one new token per row, T = 1; larger T uses XLA.
    """
    if impl.name == "xla" or suffix.shape[2] > 1:
        return CacheMask(prefix, suffix, None, None, XLA)

    def lists(prefix, suffix):
        suffix = suffix.reshape(-1, suffix.shape[-1])
        return _live_blocks(prefix, impl), _live_blocks(suffix, impl)

    rows = P(impl.batch_axes)
    lists = impl.shard_map(lists, (rows, rows), rows)
    return CacheMask(prefix, suffix, *lists(prefix, suffix), impl)


def attend_cached(
    q: Float[Array, "B R T K G H"],
    prefix: tuple[Float[Array, "B K H P"], Float[Array, "B K P H"]],
    suffix: tuple[Float[Array, "B R K H S"], Float[Array, "B R K S H"]],
    mask: CacheMask,
) -> Float[Array, "B R T K G H"]:
    """softmax(q·k / √H)·v over prefix and suffix slots.

    Keys are stored transposed, [..., H, S], so that both matmuls contract adjacent axes; XLA:CPU is
    several times slower otherwise. Queries and keys are rotated, the suffix includes the new
    tokens, and the mask also selects the implementation.
    """
    if mask.impl.name == "xla":
        return _attend_dense(q, prefix, suffix, mask)
    rows, (heads, _) = mask.impl.batch_axes, split_heads(q.shape[3], 1, mask.impl)
    queries = P(rows, None, None, heads)
    specs = queries, P(rows, heads), P(rows, None, heads), P(rows)
    attend = mask.impl.shard_map(_attend_live, specs, queries)
    return attend(q, prefix, suffix, dataclasses.replace(mask, suffix=mask.suffix[:, :, 0]))


def _attend_dense(q, prefix, suffix, mask: CacheMask):
    """Dense masked attention; under a mesh the compiler shards it."""
    scale = q.shape[-1] ** -0.5
    k, v = suffix
    scores = scale * matmul("BRKTGH,BRKHS->BRKTGS", q.transpose(0, 1, 3, 2, 4, 5), k)
    scores = jnp.where(mask.suffix[:, :, None, :, None], scores, MASKED)
    shared_k, shared_v = prefix
    shared_scores = scale * matmul("BKRTGH,BKHP->BKRTGP", q.transpose(0, 3, 1, 2, 4, 5), shared_k)
    shared_scores = jnp.where(mask.prefix[:, None, None, None, None], shared_scores, MASKED)
    top = jnp.maximum(scores.max(-1), shared_scores.max(-1).swapaxes(1, 2))
    weights = jnp.exp(scores - top[..., None])
    shared_weights = jnp.exp(shared_scores - top.swapaxes(1, 2)[..., None])
    total = weights.sum(-1) + shared_weights.sum(-1).swapaxes(1, 2)
    out = matmul("BRKTGS,BRKSH->BRKTGH", weights.astype(v.dtype), v)
    shared_out = matmul("BKRTGP,BKPH->BKRTGH", shared_weights.astype(v.dtype), shared_v)
    out = out + shared_out.swapaxes(1, 2)
    return (out / total[..., None]).astype(q.dtype).swapaxes(2, 3)


def _attend_live(q, prefix, suffix, mask: CacheMask):
    """Attention over the listed blocks, on one device."""
    B, R, _, K, G, H = q.shape
    q, part = q[:, :, 0], functools.partial(_RUN[mask.impl.name], impl=mask.impl)
    assert mask.prefix_blocks is not None and mask.suffix_blocks is not None  # not "xla"

    def by_row(a):
        return a.reshape(B * R, *a.shape[2:])

    k, v = map(by_row, suffix)
    of_row, row_lse = part(by_row(q), k, v, by_row(mask.suffix), mask.suffix_blocks)
    by_prompt = q.swapaxes(1, 2).reshape(B, K, R * G, H)
    k, v = prefix
    of_prompt = part(by_prompt, k, v, mask.prefix, mask.prefix_blocks)
    shared, shared_lse = (
        by_row(a.reshape(B, K, R, G, a.shape[-1]).swapaxes(1, 2)) for a in of_prompt
    )
    share = jax.nn.sigmoid(shared_lse - row_lse)
    out = share * shared + (1 - share) * of_row
    return out.astype(q.dtype).reshape(B, R, 1, K, G, H)


def slots_per_block(num_slots: int, impl: AttentionImpl) -> int:
    """Slots per block of a kernel, given the `num_slots` of a prefix or a suffix."""
    if impl.name == "gpu":
        return impl.key_block or _GPU_BLOCK
    return min(impl.key_block or _TPU_BLOCK, num_slots)


def _live_blocks(is_seen: Bool[Array, "O S"], impl: AttentionImpl) -> BlockPairs:
    """Each owner's blocks with a visible slot; the last block if it has none."""
    block = slots_per_block(is_seen.shape[1], impl)
    padded = jnp.pad(is_seen, ((0, 0), (0, -is_seen.shape[1] % block)))
    is_live = padded.reshape(len(is_seen), -1, block).any(-1)
    is_live = is_live.at[:, -1].max(~is_live.any(-1))
    return block_pairs(is_live[None], is_live.size)


def _visit(sums, q, k, v, is_seen, scale: float):
    """The online softmax of M query rows after one more block of n slots; `is_seen` is [1, n]."""
    acc, top, total = sums  # output [M, H], largest score [M, 1], sum of weights [M, 1]
    scores = jnp.dot(q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(is_seen, scores, MASKED)
    new = jnp.maximum(top, scores.max(1, keepdims=True))
    weights, decay = jnp.exp(scores - new), jnp.exp(top - new)
    part = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return decay * acc + part, new, decay * total + weights.sum(1, keepdims=True)


# A kernel computes one part: q [O, K, M, H], k [O, K, H, S], v [O, K, S, H], visible slots [O, S]
# and the blocks to read -> output [O, K, M, H] and log-sum-exp [O, K, M, 1].


def _run_tpu(q, k, v, is_seen, pairs: BlockPairs, impl: AttentionImpl):
    """A grid over a dynamic number of blocks, whose lists are prefetched.

    The sums of an owner stay in VMEM while the grid iterates over its blocks.
    """
    _, K, M, H = q.shape
    num_slots = k.shape[-1]
    block = slots_per_block(num_slots, impl)

    def body(starts, owners, others, q, k, v, is_seen, out, lse, *sums):
        n = pl.program_id(0)
        owner = owners[n]

        @pl.when(n == starts[owner])
        def _():
            for ref, value in zip(sums, _INITIAL, strict=True):
                ref[...] = jnp.full_like(ref, value)

        seen = is_seen[...] != 0
        num_left = num_slots - others[n] * block  # the last block may exceed the slots
        is_slot = lax.broadcasted_iota(jnp.int32, (block, 1), 0) < num_left
        seen &= lax.broadcasted_iota(jnp.int32, (1, block), 1) < num_left
        for h in range(K):
            values = jnp.where(is_slot, v[h], jnp.zeros_like(v[h]))
            new = _visit([ref[h] for ref in sums], q[h], k[h], values, seen, H**-0.5)
            for ref, a in zip(sums, new, strict=True):
                ref[h] = a

        @pl.when(n + 1 == starts[owner + 1])
        def _():
            acc, top, total = (ref[...] for ref in sums)
            out[...] = acc / total
            lse[...] = top + jnp.log(total)

    def spec(*shape, axis=None):
        """An owner's block of this shape; along `axis`, the block of slots of a pair."""

        def index(n, starts, owners, others):
            return owners[n], *(others[n] if a == axis else 0 for a in range(len(shape)))

        return pl.BlockSpec((None, *shape), index)

    return pl.pallas_call(
        body,
        _output_shapes(q),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pairs.starts[-1],),
            in_specs=[
                spec(K, M, H),
                spec(K, H, block, axis=2),
                spec(K, block, H, axis=1),
                spec(1, block, axis=1),
            ],
            out_specs=[spec(K, M, H), spec(K, M, 1)],
            scratch_shapes=[pltpu.VMEM((K, M, size), jnp.float32) for size in (H, 1, 1)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=impl.interpret,
    )(pairs.starts, pairs.owners, pairs.others, q, k, v, is_seen[:, None].astype(jnp.int32))


def _run_gpu(q, k, v, is_seen, pairs: BlockPairs, impl: AttentionImpl):
    """One program per owner and kv head, which loops over the owner's blocks.

    Triton array sizes are powers of two; entries beyond the true sizes are masked.
    """
    O, K, M, H = q.shape
    num_slots = k.shape[-1]
    block = slots_per_block(num_slots, impl)
    rows, dim = max(pl.next_power_of_2(M), _LEAST), max(pl.next_power_of_2(H), _LEAST)

    def body(starts, others, q, k, v, is_seen, out, lse):
        owner = pl.program_id(0)
        is_dim, is_row = jnp.arange(dim) < H, jnp.arange(rows)[:, None] < M
        queries = plgpu.load(q, mask=is_row & is_dim[None], other=0.0)

        def step(n, sums):
            slots = pl.ds(others[n] * block, block)
            is_slot = others[n] * block + jnp.arange(block) < num_slots
            keys = plgpu.load(k.at[:, slots], mask=is_dim[:, None] & is_slot[None], other=0.0)
            values = plgpu.load(v.at[slots], mask=is_slot[:, None] & is_dim[None], other=0.0)
            seen = plgpu.load(is_seen.at[slots], mask=is_slot, other=0)
            return _visit(sums, queries, keys, values, seen[None] != 0, H**-0.5)

        sums = tuple(map(jnp.full, ((rows, dim), (rows, 1), (rows, 1)), _INITIAL))
        sums = lax.fori_loop(starts[owner], starts[owner + 1], step, sums)
        acc, top, total = sums
        plgpu.store(out, acc / total, mask=is_row & is_dim[None])
        plgpu.store(lse, top + jnp.log(total), mask=is_row)

    def spec(*shape):
        return pl.BlockSpec((None, None, *shape), lambda owner, head: (owner, head, 0, 0))

    lists = [pl.BlockSpec(a.shape, lambda owner, head: (0,)) for a in (pairs.starts, pairs.others)]
    seen = pl.BlockSpec((None, num_slots), lambda owner, head: (owner, 0))
    return pl.pallas_call(
        body,
        _output_shapes(q),
        grid=(O, K),
        in_specs=[*lists, spec(rows, dim), spec(dim, num_slots), spec(num_slots, dim), seen],
        out_specs=[spec(rows, dim), spec(rows, 1)],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=impl.interpret,
    )(pairs.starts, pairs.others, q, k, v, is_seen.astype(jnp.int32))


def _output_shapes(q):
    return [jax.ShapeDtypeStruct((*q.shape[:3], size), jnp.float32) for size in (q.shape[3], 1)]


_INITIAL = 0.0, MASKED, 0.0  # of the output, the largest score and the sum of weights
_LEAST = 16  # smallest dimension of a Triton matmul
_RUN = {"tpu": _run_tpu, "gpu": _run_gpu}
