"""Attention over full rows: training, prefill and the vision tower. For decoding see `cached`.

The mask is two integers per key: queries first[k]..last[k] of a row attend to key k. A text row
packs trees in depth-first order, `[prompt | branch 0 | branch 1 | ...] [prompt' | ...] padding`.
Its first[k] is k. Its last[k] is the end of k's tree if k is a prompt token, and the end of k's
branch if k is a response token. In an image, every patch has the image's first patch as `first` and
its last patch as `last`. Padding attends to itself, so that no softmax is empty.

Only pairs of a query block and a key block with an unmasked entry are computed. They are listed on
the device once per batch, for all layers. Scores and softmax are float32. Memory is O(S), and time
is proportional to the number of listed pairs. Rows of at most `AttentionImpl.dense_tokens` tokens
have nothing to skip and use dense attention.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from models.attention.kernels import DKV, DQ, FORWARD, MASKED, RUN, BlockPairs, Pair, block_pairs
from models.layers import ATTENDED

_TPU_ROWS = 1024  # query rows per TPU block: query tokens times query heads per kv head
_TPU_TOKENS = 512  # the largest TPU block; more would compute more masked scores of windows


@dataclasses.dataclass(frozen=True)
class AttentionImpl:
    """The implementation of attention, and the mesh axes that shard it."""

    name: str = "xla"  # "xla" for any device, "tpu" (Pallas) or "gpu" (Pallas through Triton)
    mesh: Mesh | None = None  # None for one device
    batch_axes: tuple[str, ...] = ()  # mesh axes that shard the rows
    # Mesh axes that shard the heads. Only the longest prefix that divides the heads is used; kv
    # heads may be repeated to make it divide.
    head_axes: tuple[str, ...] = ()
    interpret: bool = False  # runs a Pallas kernel in interpret mode on any device, for tests
    # Tokens per block, None for the default of `name`. One must divide the other. On a GPU both are
    # powers of two, on a TPU multiples of 128.
    query_block: int | None = None
    key_block: int | None = None
    dense_tokens: int = 96  # rows of at most this many tokens use dense attention

    def __post_init__(self):
        if self.name not in RUN:
            raise ValueError(f"attention must be one of {', '.join(RUN)}, got {self.name!r}")

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` on the shards of each device of the mesh, if there is one."""
        if self.mesh is None:
            return function
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=self.mesh, check_vma=False, **specs)


XLA = AttentionImpl()


@typing.no_type_check  # `shard_map` puts specs in the fields
@flax.struct.dataclass
class BlockMask:
    """A mask and its lists of block pairs, from `block_mask`; no lists for dense attention."""

    first: Int[Array, "B S"]  # queries first[k]..last[k] attend to key k
    last: Int[Array, "B S"]
    # Pairs owned by query blocks. Under a mesh, the concatenated lists of all row shards.
    by_query: BlockPairs | None
    by_key: BlockPairs | None  # the same pairs, owned by key blocks
    impl: AttentionImpl = flax.struct.field(pytree_node=False)  # what the lists are built for
    blocks: tuple[int, int] | None = flax.struct.field(pytree_node=False)  # tokens: query, key


def block_mask(
    first: Int[Array | np.ndarray, "B S"] | None,
    last: Int[Array | np.ndarray, "B S"],
    group: int,
    impl: AttentionImpl = XLA,
) -> BlockMask:
    """The mask of a batch of rows, for `attend`. Every token must attend to itself.

    Args:
        first, last: first and last query that attends to each key; first None: causal.
        group: query heads per kv head, 1 in a vision tower.
        impl: the implementation that will compute attention.
    """
    is_causal = first is None
    last = jnp.asarray(last, jnp.int32)
    first = jnp.arange(last.shape[1], dtype=jnp.int32) if is_causal else first
    first = jnp.broadcast_to(jnp.asarray(first, jnp.int32), last.shape)
    if last.shape[1] <= impl.dense_tokens:
        return BlockMask(first, last, None, None, impl, None)
    blocks = _block_sizes(last.shape[1], group, impl)
    lists = functools.partial(_block_lists, blocks=blocks, is_causal=is_causal)
    rows = P(impl.batch_axes)
    by_query, by_key = impl.shard_map(lists, (rows, rows), rows)(first, last)
    return BlockMask(first, last, by_query, by_key, impl, blocks)


def _block_sizes(num_tokens: int, group: int, impl: AttentionImpl) -> tuple[int, int]:
    """Tokens per query block and per key block."""
    if impl.name == "xla":  # measured: vision towers are faster with larger blocks
        num_blocks = -(-num_tokens // (128 if group == 1 else 64))
        query_block = key_block = -(-num_tokens // (16 * num_blocks)) * 16  # blocks equally full
    elif impl.name == "tpu":  # powers of two (one divides the other), at most the row length
        longest = max(128, _power_of_two(num_tokens))
        key_block = min(_TPU_TOKENS, longest)
        query_block = min(max(128, _power_of_two(_TPU_ROWS // group)), key_block)
    else:  # larger blocks spill registers at head dim 128
        query_block = key_block = 64
    query_block, key_block = impl.query_block or query_block, impl.key_block or key_block
    if max(query_block, key_block) % min(query_block, key_block):
        raise ValueError(
            f"query_block {query_block} and key_block {key_block}: one must divide the other"
        )
    return query_block, key_block


def _power_of_two(size: int) -> int:
    """The largest power of two that is at most `size`."""
    return 1 << size.bit_length() - 1


def _padded_bounds(
    first: Int[Array, "B S"], last: Int[Array, "B S"], blocks: tuple[int, int]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """first and last of rows padded to whole blocks with tokens that each attend to themselves."""
    B, S = first.shape
    more = jnp.arange(S, S + -S % max(blocks), dtype=first.dtype)
    more = jnp.broadcast_to(more, (B, len(more)))
    return jnp.concatenate([first, more], axis=1), jnp.concatenate([last, more], axis=1)


def _block_lists(
    first: Int[Array, "B S"], last: Int[Array, "B S"], *, blocks: tuple[int, int], is_causal: bool
) -> tuple[BlockPairs, BlockPairs]:
    """The unmasked pairs, by query block and by key block, numbered consecutively over all rows."""
    query_block, key_block = blocks
    first, last = _padded_bounds(first, last, blocks)
    B, S = first.shape
    query = np.arange(0, S, query_block)[:, None]
    # Every token attends to itself, so the queries that attend to a key block are contiguous.
    lowest = first.reshape(B, 1, -1, key_block).min(-1)
    highest = last.reshape(B, 1, -1, key_block).max(-1)
    is_seen = (lowest < query + query_block) & (highest >= query)  # [B, query, key blocks]
    size = is_seen.size
    if is_causal:
        size = B * int((np.arange(0, S, key_block) < query + query_block).sum())
    return block_pairs(is_seen, size), block_pairs(is_seen.swapaxes(1, 2), size)


def segment_spans(
    segments: Int[Array | np.ndarray, "B S"],
) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """First and last token of every token's segment; each padding token (-1) is one segment.

    A segment is a run of equal ids; runs of the same id that do not touch are different segments.
    """
    tokens = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_start = (segments != jnp.roll(segments, 1, axis=1)) | (segments < 0) | (tokens == 0)
    is_end = jnp.roll(is_start, -1, axis=1)
    first = jax.lax.cummax(jnp.where(is_start, tokens, 0), axis=1)
    last = jax.lax.cummin(jnp.where(is_end, tokens, tokens[-1]), axis=1, reverse=True)
    return first, last


def causal_reach(segments: Int[Array | np.ndarray, "B S"]) -> Int[Array, "B S"]:
    """`last` of a causal mask: the end of every token's segment; padding (-1) attends to itself."""
    return segment_spans(segments)[1]


def attend(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: BlockMask,
) -> Float[Array, "B S K G H"]:
    """softmax(q·k / √H)·v over the keys that each query attends to.

    Queries and keys are rotated; the mask, from `block_mask`, also selects the implementation.
    """
    if mask.last.shape != q.shape[:2]:
        raise ValueError(
            f"the mask of rows {mask.last.shape} must match q {q.shape}; build it anew"
        )
    if mask.blocks is None:
        return _attend_dense(q, k, v, mask)
    head_axes, copies = split_heads(q.shape[2], q.shape[3], mask.impl)
    if copies == 1:
        return _attend_blocks(q, k, v, mask, head_axes)
    # Repeat kv heads, so that every device has the kv head of each of its query heads.
    k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
    spread = q.reshape(*k.shape[:3], -1, q.shape[-1])
    out = _attend_blocks(spread, k, v, mask, head_axes)
    return out.reshape(q.shape)  # pyright: ignore[reportAttributeAccessIssue]  # as in `linear`


def split_heads(num_kv_heads: int, group: int, impl: AttentionImpl) -> tuple[tuple[str, ...], int]:
    """The mesh axes that shard the heads, and the copies of each kv head that this needs."""
    if impl.mesh is None:
        return (), 1
    for num_axes in range(len(impl.head_axes), 0, -1):
        axes = impl.head_axes[:num_axes]
        parts = math.prod(impl.mesh.shape[axis] for axis in axes)
        copies = parts // math.gcd(parts, num_kv_heads)
        if group % copies == 0:
            return axes, copies
    return (), 1


def _attend_dense(q, k, v, mask: BlockMask):
    """Dense masked attention; under a mesh the compiler shards it.

    Both matmuls have leading batch axes and contract adjacent axes; XLA:CPU is several times slower
    otherwise.
    """
    B, S, K, G, H = q.shape
    tokens = jnp.arange(S)[:, None]
    is_seen = (mask.first[:, None] <= tokens) & (tokens <= mask.last[:, None])  # [B, query, key]
    rows = q.swapaxes(1, 2).reshape(B, K, S * G, H)
    scores = H**-0.5 * matmul("BKTH,BKHS->BKTS", rows, k.transpose(0, 2, 3, 1))
    scores = jnp.where(jnp.repeat(is_seen, G, axis=1)[:, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = matmul("BKTS,BKSH->BKTH", weights, v.swapaxes(1, 2)).astype(q.dtype)
    return out.reshape(B, K, S, G, H).swapaxes(1, 2)


def matmul(equation: str, a: Array, b: Array) -> Array:
    """The einsum, accumulated in float32."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_blocks(q, k, v, mask: BlockMask, head_axes: tuple[str, ...]):
    return _attend_blocks_fwd(q, k, v, mask, head_axes)[0]


def _attend_blocks_fwd(q, k, v, mask, head_axes):
    attended = _sharded(_forward, mask, head_axes, "hhhm", "hl")(q, k, v, mask)
    out, lse = checkpoint_name(attended, ATTENDED)
    return out, (q, k, v, mask, out, lse)


def _attend_blocks_bwd(head_axes, saved, g):
    backward = _sharded(_backward, saved[3], head_axes, "hhhmhlh", "hhh")
    return *backward(*saved, g), None


_attend_blocks.defvjp(_attend_blocks_fwd, _attend_blocks_bwd)


def _sharded(
    function: Callable, mask: BlockMask, head_axes: tuple[str, ...], inputs: str, outputs: str
) -> Callable:
    """`function` under `shard_map`, with rows and heads sharded.

    The custom VJP calls this for the backward pass too. Differentiating through `shard_map` would
    sum the gradients of replicated inputs, which every device already has in full. Inputs and
    outputs are "h" for [B, S, heads, ...], "l" for log-sum-exps, "m" for the mask.
    """
    rows = mask.impl.batch_axes
    masks = jax.tree.map(lambda a: P(rows), mask)
    specs = {"h": P(rows, None, head_axes), "l": P(head_axes, None, rows), "m": masks}
    in_specs, out_specs = (tuple(specs[kind] for kind in kinds) for kinds in (inputs, outputs))
    return mask.impl.shard_map(function, in_specs, out_specs)


def _forward(q, k, v, mask: BlockMask) -> tuple[Array, Array]:
    """The output, and the log-sum-exps [K, ...] in the layout that `_backward` reads."""
    assert mask.by_query is not None  # dense attention has no kernel
    arrays, pair = _arrays(mask, q, k, v)
    out, lse = RUN[mask.impl.name]((FORWARD,), arrays, mask.by_query, pair, mask.impl.interpret)
    return _unfold(out, q, mask), lse.reshape(q.shape[2], -1, lse.shape[-1])


def _backward(q, k, v, mask: BlockMask, out, lse, g) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v, from the results of `_forward` and the output's gradient g."""
    arrays, pair = _arrays(mask, q, k, v)
    delta = jnp.einsum("...H,...H->...", g, out, preferred_element_type=jnp.float32)
    delta = _fold(delta[..., None], mask)
    if mask.impl.name == "gpu":
        delta, lse = delta[..., 0].T, lse.reshape(-1, lse.shape[-1])  # [heads, tokens]
    else:
        delta = delta.swapaxes(1, 2)  # [K, 1, rows], as lse
    settings = dict(arrays=(*arrays, lse, delta, _fold(g, mask)), pair=pair)
    run = functools.partial(RUN[mask.impl.name], **settings, interpret=mask.impl.interpret)
    if mask.impl.name == "xla":  # one loop, so that the compiler computes the softmax weights once
        grads = run((DQ, DKV), pairs=mask.by_key)
    else:
        grads = *run((DQ,), pairs=mask.by_query), *run((DKV,), pairs=mask.by_key)
    dq, dk, dv = (_unfold(grad, a, mask) for grad, a in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _arrays(mask: BlockMask, q: Array, k: Array, v: Array) -> tuple[tuple[Array, ...], Pair]:
    """q, k, v and bounds with the rows of the batch concatenated, and the sizes of a pair."""
    assert mask.blocks is not None
    first, last = _padded_bounds(mask.first, mask.last, mask.blocks)
    start = first.shape[1] * jnp.arange(len(first), dtype=first.dtype)[:, None]
    bounds = jnp.stack([first + start, last + start + 1], axis=-1).reshape(-1, 2)
    query_block, key_block = mask.blocks
    G, H = q.shape[3:]
    rows_per_token = 1 if mask.impl.name == "gpu" else G
    pair = Pair(query_block * rows_per_token, key_block, H, rows_per_token, H**-0.5)
    return (*(_fold(a, mask) for a in (q, k, v)), bounds), pair


def _fold(a: Float[Array, "B S K ..."], mask: BlockMask) -> Array:
    """[K, rows, H]; for a GPU, which reads with strides, [tokens, heads, H]."""
    assert mask.blocks is not None
    padding = -a.shape[1] % max(mask.blocks)
    a = jnp.pad(a, [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2))
    if mask.impl.name == "gpu":
        return a.reshape(a.shape[0] * a.shape[1], -1, a.shape[-1])
    return jnp.moveaxis(a, 2, 0).reshape(a.shape[2], -1, a.shape[-1])


def _unfold(a: Array, like: Float[Array, "B S K ..."], mask: BlockMask) -> Array:
    B, S, K, *rest = like.shape
    a = a.astype(like.dtype)
    if mask.impl.name == "gpu":
        return a.reshape(B, -1, K, *rest)[:, :S]
    return jnp.moveaxis(a.reshape(K, B, -1, *rest), 0, 2)[:, :S]


def relative_difference(a: Array, b: Array) -> Float[Array, ""]:
    """The largest difference of two arrays over the largest entry of the second, in float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.abs(a - b).max() / jnp.abs(b).max()


def largest_difference(
    first: Int[Array, "B S"] | None,
    last: Int[Array, "B S"],
    heads: tuple[int, int, int],
    impl: AttentionImpl,
    dtype=jnp.bfloat16,
) -> Float[Array, ""]:
    """Largest difference of `impl` from "xla" on random queries, keys and values; jit it.

    Args:
        first, last: as in `block_mask`.
        heads: kv heads, query heads per kv head, and head dim.
        impl: compared with "xla" on the same mesh.

    Returns:
        The maximum of `relative_difference` over the output and the gradients of q, k and v:
        about 1e-2 in bfloat16, 1e-5 in float32 at full matmul precision.
    """
    K, G, H = heads
    keys = jax.random.split(jax.random.key(0), 4)
    q, g = (jax.random.normal(key, (*last.shape, K, G, H), dtype) for key in keys[:2])
    k, v = (jax.random.normal(key, (*last.shape, K, H), dtype) for key in keys[2:])

    def results(impl):
        mask = block_mask(first, last, G, impl)
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
        return out, *pull_back(g)

    xla = AttentionImpl("xla", impl.mesh, impl.batch_axes, impl.head_axes)
    pairs = zip(results(impl), results(xla), strict=True)
    return jnp.max(jnp.stack([relative_difference(a, b) for a, b in pairs]))
