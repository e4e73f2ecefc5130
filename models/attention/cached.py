"""Attention in decoding: one new token per row against the KV caches.

The rows of a prompt share one KV cache of the prompt, the prefix. Each row has a KV cache of its
response, the suffix. One softmax runs over both.

"xla" computes the scores of all slots and masks them. The TPU and GPU kernels read only blocks with
a visible slot: a suffix is allocated for the longest response, and most rows are far from it. For
TPUs see `cached_tpu`. GPUs compute pieces of a prefix or suffix separately, as in flash decoding,
so that few long ones occupy all of the GPU, and average the outputs by their log-sum-exps.

Letters: B prompts, R rows of each, T new tokens of a row, P slots of a prefix, S slots of a suffix,
K kv heads, G query heads per kv head, H head dim. A part has O owners (prompts or rows), each with
M query rows per kv head.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from models.attention.cached_tpu import BlockList, Cache, attend_blocks, live_blocks
from models.attention.kernels import MASKED, BlockPairs, block_pairs
from models.attention.packed import XLA, AttentionImpl, matmul, split_heads

_GPU_BLOCK = 64  # slots per block
_GPU_PIECE = 4  # blocks that one program reads
# Of a prefix and of a suffix: the more query rows a block has, the more it takes to hide its copy.
_TPU_BLOCKS, _TPU_TILE = (256, 128), 128


@flax.struct.dataclass
class CacheMask:
    """The cache slots that the new tokens attend to; the same for all layers."""

    prefix: Bool[Array, "B P"]
    suffix: Bool[Array, "B R T S"]
    # The blocks to read, owned by prompts and by rows; None for "xla". Under a mesh, the
    # concatenated lists of all batch shards.
    prefix_blocks: BlockList | BlockPairs | None
    suffix_blocks: BlockList | BlockPairs | None
    impl: AttentionImpl = flax.struct.field(pytree_node=False)  # what the lists are built for


def cache_mask(
    prefix: Bool[Array, "B P"], suffix: Bool[Array, "B R T S"], impl: AttentionImpl = XLA
) -> CacheMask:
    """The mask of one decode step, for `attend_cached`; true for the slots that tokens attend to.

    The kernels support one new token per row, T = 1; larger T uses XLA.
    """
    if impl.name == "xla" or suffix.shape[2] > 1:
        return CacheMask(prefix, suffix, None, None, impl)
    of = _live_blocks if impl.name == "gpu" else live_blocks

    def lists(prefix, suffix):
        suffix = suffix.reshape(-1, suffix.shape[-1])
        return tuple(
            of(is_seen, slots_per_block(is_seen.shape[1], impl, is_prefix))
            for is_seen, is_prefix in ((prefix, True), (suffix, False))
        )

    rows = P(impl.batch_axes)
    of_prefix, of_suffix = impl.shard_map(lists, (rows, rows), rows)(prefix, suffix)
    return CacheMask(prefix, suffix, of_prefix, of_suffix, impl)


def attend_cached(
    q: Float[Array, "B R T K G H"],
    prefix: tuple[Float[Array, "B K *P"], Float[Array, "B K P H"]],
    suffix: tuple[Float[Array, "B R K *S"], Float[Array, "B R K S H"]],
    mask: CacheMask,
) -> Float[Array, "B R T K G H"]:
    """softmax(q·k / √H)·v over prefix and suffix slots.

    Keys are stored as `stored_keys` returns them. Queries and keys are rotated, the suffix includes
    the new tokens, and the mask also selects the implementation.
    """
    if mask.prefix_blocks is None:
        if keys_axis(mask.impl) == -2:
            prefix, suffix = ((k.mT, v) for k, v in (prefix, suffix))
        return _attend_dense(q, prefix, suffix, mask)
    rows, (heads, _) = mask.impl.batch_axes, split_heads(q.shape[3], 1, mask.impl)
    queries = P(rows, None, None, heads)
    specs = queries, P(rows, heads), P(rows, None, heads), P(rows)
    attend = mask.impl.shard_map(_attend_live, specs, queries)
    return attend(q, prefix, suffix, dataclasses.replace(mask, suffix=mask.suffix[:, :, 0]))


def keys_axis(impl: AttentionImpl) -> int:
    """The axis of the slots in cached keys: -1 if they are stored transposed, else -2.

    Transposed, both matmuls contract adjacent axes; XLA:CPU is several times slower otherwise. On
    a TPU writing one token would then rewrite a tile of 128.
    """
    return -2 if impl.name == "tpu" else -1


def stored_keys(k: Float[Array, "*B S H"], impl: AttentionImpl) -> Float[Array, "*B ..."]:
    """Keys as the cache stores them, see `keys_axis`."""
    return k if keys_axis(impl) == -2 else k.mT


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
    suffix, on_suffix = jax.tree.map(
        lambda a: a.reshape(-1, *a.shape[2:]), (tuple(suffix), mask.suffix)
    )
    mask = dataclasses.replace(mask, suffix=on_suffix)
    attend = _attend_gpu if mask.impl.name == "gpu" else _attend_tpu
    return attend(q[:, :, 0], prefix, suffix, mask).astype(q.dtype).reshape(q.shape)


def _attend_tpu(q, prefix, suffix, mask: CacheMask):
    """Attention over prefix and suffix in one kernel; the suffix and its mask are by row."""
    (k, v), (own_k, own_v), impl = prefix, suffix, mask.impl
    assert isinstance(mask.prefix_blocks, BlockList) and isinstance(mask.suffix_blocks, BlockList)
    sizes = slots_per_block(k.shape[-2], impl, True), slots_per_block(own_k.shape[-2], impl, False)
    caches = [
        Cache(k, v, mask.prefix, mask.prefix_blocks, sizes[0]),
        Cache(own_k, own_v, mask.suffix, mask.suffix_blocks, sizes[1]),
    ]
    return attend_blocks(q, caches, impl.interpret)


def _attend_gpu(q, prefix, suffix, mask: CacheMask):
    """Attention over the pieces of prefix and suffix, averaged by their log-sum-exps."""
    B, R, K, G, H = q.shape
    assert isinstance(mask.prefix_blocks, BlockPairs) and isinstance(mask.suffix_blocks, BlockPairs)
    by_prompt, by_row = q.swapaxes(1, 2).reshape(B, K, R * G, H), q.reshape(B * R, K, G, H)
    (k, v), (own_k, own_v), impl = prefix, suffix, mask.impl
    of_prompt = _run_gpu(by_prompt, k, v, mask.prefix, mask.prefix_blocks, impl)
    of_row = _run_gpu(by_row, own_k, own_v, mask.suffix, mask.suffix_blocks, impl)
    # [pieces, B, R, K, G, H or 1]
    shared, shared_lse = (a.reshape(-1, B, K, R, G, a.shape[-1]).swapaxes(2, 3) for a in of_prompt)
    own, own_lse = (a.reshape(-1, B, R, K, G, a.shape[-1]) for a in of_row)
    weights = jax.nn.softmax(jnp.concatenate([shared_lse, own_lse]), axis=0)
    of_shared, of_own = jnp.split(weights, [len(shared)])
    out = (of_shared * shared).sum(0) + (of_own * own).sum(0)
    return out.reshape(B * R, K, G, H)


def slots_per_block(num_slots: int, impl: AttentionImpl, is_prefix: bool) -> int:
    """Slots per block of a kernel, given the `num_slots` of a prefix or of a suffix."""
    if impl.name == "gpu":
        return impl.key_block or _GPU_BLOCK
    largest = _TPU_BLOCKS[0] if is_prefix else _TPU_BLOCKS[1]
    return impl.key_block or min(largest, -(-num_slots // _TPU_TILE) * _TPU_TILE)


def whole_blocks(num_slots: int) -> int:
    """The slots to allocate for at least `num_slots`; from 256 on no kernel pads the cache."""
    block = max(_TPU_BLOCKS)
    return num_slots if num_slots < block else -(-num_slots // block) * block


def _live_blocks(is_seen: Bool[Array, "O S"], block: int) -> BlockPairs:
    """Each owner's blocks with a visible slot; the last block if it has none."""
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


def _run_gpu(q, k, v, is_seen, pairs: BlockPairs, impl: AttentionImpl):
    """One program per owner, kv head and piece of at most `_GPU_PIECE` of the owner's blocks.

    Returns the outputs [N, O, K, M, H] and log-sum-exps [N, O, K, M, 1] of the N pieces; the
    log-sum-exp of an empty piece is -inf. Triton array sizes are powers of two; entries beyond the
    true sizes are masked.
    """
    O, K, M, H = q.shape
    num_slots = k.shape[-1]
    block = impl.key_block or _GPU_BLOCK
    num_pieces = -(-num_slots // (block * _GPU_PIECE))
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
        start = starts[owner] + pl.program_id(2) * _GPU_PIECE
        stop = jnp.minimum(start + _GPU_PIECE, starts[owner + 1])
        acc, top, total = lax.fori_loop(start, stop, step, sums)
        plgpu.store(out, acc / jnp.where(total > 0, total, 1), mask=is_row & is_dim[None])
        plgpu.store(lse, top + jnp.log(total), mask=is_row)

    def spec(*shape):
        return pl.BlockSpec((None, None, *shape), lambda owner, head, piece: (owner, head, 0, 0))

    def of_piece(*shape):
        index = lambda owner, head, piece: (piece, owner, head, 0, 0)  # noqa: E731
        return pl.BlockSpec((None, None, None, *shape), index)

    lists = [pl.BlockSpec(a.shape, lambda *_: (0,)) for a in (pairs.starts, pairs.others)]
    seen = pl.BlockSpec((None, num_slots), lambda owner, head, piece: (owner, 0))
    return pl.pallas_call(
        body,
        [jax.ShapeDtypeStruct((num_pieces, O, K, M, size), jnp.float32) for size in (H, 1)],
        grid=(O, K, num_pieces),
        in_specs=[*lists, spec(rows, dim), spec(dim, num_slots), spec(num_slots, dim), seen],
        out_specs=[of_piece(rows, dim), of_piece(rows, 1)],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=impl.interpret,
    )(pairs.starts, pairs.others, q, k, v, is_seen.astype(jnp.int32))


_INITIAL = 0.0, MASKED, 0.0  # of the output, the largest score and the sum of weights
_LEAST = 16  # smallest dimension of a Triton matmul
