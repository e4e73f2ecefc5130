"""The attention mask: two integers per key, and the lists of unmasked block pairs.

Queries first[k]..last[k] of a row attend to key k. A text row packs trees in depth-first order,
`[prompt | branch 0 | branch 1 | ...] [prompt' | ...] padding`. Its first[k] is k. Its last[k] is
the end of k's tree if k is a prompt token, and the end of k's branch if k is a response token. In
an image, every patch has the image's first patch as `first` and its last patch as `last`. Padding
attends to itself, so that no softmax is empty. Only pairs of a query block and a key block with an
unmasked entry are computed. They are listed on the device once per batch, for all layers.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

# Query rows per TPU block: query tokens times query heads per kv head.
_TPU_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class AttentionImpl:
    """The implementation of attention over full rows.

    Attributes:
        name: "xla" for any device, "tpu" (Pallas) or "gpu" (Pallas through Triton).
        mesh: the devices that rows and heads are sharded over; None for one device.
        batch_axes: mesh axes that shard the rows.
        head_axes: mesh axes that shard the heads. Only the longest prefix that divides the heads is
            used; kv heads may be repeated to make it divide.
        interpret: runs a Pallas kernel in interpret mode on any device, for tests.
        query_block, key_block: tokens per block; None for the default of `name`. One must divide
            the other. On a GPU both are powers of two, on a TPU multiples of 128.
        dense_tokens: rows of at most this many tokens use dense attention.
    """

    name: str = "xla"
    mesh: Mesh | None = None
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()
    interpret: bool = False
    query_block: int | None = None
    key_block: int | None = None
    dense_tokens: int = 96

    def __post_init__(self):
        if self.name not in _NAMES:
            known = ", ".join(_NAMES)
            raise ValueError(f"attention must be one of {known}, got {self.name!r}")


_NAMES = ("xla", "tpu", "gpu")

XLA = AttentionImpl()


@flax.struct.dataclass
class BlockPairs:
    """The pairs of blocks to compute, grouped by one block of the pair, its owner.

    Attributes:
        starts: the pairs of owner i are starts[i] to starts[i + 1] - 1.
        owners: the owner of each pair; 0 after the last pair.
        others: the other block of each pair.
    """

    starts: Int[Array, " blocks+1"]
    owners: Int[Array, " n"]
    others: Int[Array, " n"]


@flax.struct.dataclass
class BlockMask:
    """A mask and its lists of block pairs, from `block_mask`.

    Attributes:
        first, last: queries first[k]..last[k] attend to key k.
        by_query: pairs owned by query blocks; None for dense attention. Under a mesh, the
            concatenated lists of all row shards.
        by_key: the same pairs, owned by key blocks.
        impl: the implementation that the lists were built for.
        blocks: tokens per query block and per key block; None for dense attention.
    """

    first: Int[Array, "B S"]
    last: Int[Array, "B S"]
    by_query: BlockPairs | None
    by_key: BlockPairs | None
    impl: AttentionImpl = flax.struct.field(pytree_node=False)
    blocks: tuple[int, int] | None = flax.struct.field(pytree_node=False)


def block_mask(
    first: Int[Array, "B S"] | None,
    last: Int[Array, "B S"],
    group: int,
    impl: AttentionImpl = XLA,
) -> BlockMask:
    """The mask of a batch of rows, for `attend`.

    Args:
        first: first query that attends to each key; None for a causal mask (the key itself).
        last: last query that attends to each key. Every token must attend to itself.
        group: query heads per kv head, 1 in a vision tower.
        impl: the implementation that will compute attention.
    """
    is_causal = first is None
    last = jnp.asarray(last, jnp.int32)
    first = jnp.arange(last.shape[1], dtype=jnp.int32) if is_causal else first
    first = jnp.broadcast_to(jnp.asarray(first, jnp.int32), last.shape)
    if last.shape[1] <= impl.dense_tokens:
        return BlockMask(first, last, None, None, impl, None)
    query_block, key_block = _block_sizes(last.shape[1], group, impl)
    lists = functools.partial(
        _block_lists, query_block=query_block, key_block=key_block, is_causal=is_causal
    )
    if impl.mesh is not None:
        rows = P(impl.batch_axes)
        lists = jax.shard_map(
            lists, mesh=impl.mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False
        )
    by_query, by_key = lists(first, last)
    return BlockMask(first, last, by_query, by_key, impl, (query_block, key_block))


def _block_sizes(num_tokens: int, group: int, impl: AttentionImpl) -> tuple[int, int]:
    """Tokens per query block and per key block."""
    if impl.name == "xla":  # measured: vision towers are faster with larger blocks
        num_blocks = -(-num_tokens // (128 if group == 1 else 64))
        query_block = key_block = -(-num_tokens // (16 * num_blocks)) * 16  # blocks equally full
    elif impl.name == "tpu":  # powers of two (one divides the other), at most the row length
        longest = max(128, _power_of_two(num_tokens))
        query_block = min(max(128, _power_of_two(_TPU_ROWS // group)), longest)
        key_block = min(512, longest)
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


def padded_bounds(
    first: Int[Array, "B S"], last: Int[Array, "B S"], padding: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """first and last of rows with `padding` more tokens, each attending only to itself."""
    more = first.shape[1] + jnp.arange(padding, dtype=first.dtype)
    more = jnp.broadcast_to(more, (len(first), padding))
    first, last = (jnp.concatenate([a, more], axis=1) for a in (first, last))
    return first, last


def _block_lists(
    first: Int[Array, "B S"],
    last: Int[Array, "B S"],
    *,
    query_block: int,
    key_block: int,
    is_causal: bool,
) -> tuple[BlockPairs, BlockPairs]:
    """The unmasked pairs, by query block and by key block. Blocks are numbered through all rows."""
    padding = -first.shape[1] % max(query_block, key_block)
    first, last = padded_bounds(first, last, padding)
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


def block_pairs(is_seen: Bool[Array, "B O N"], size: int) -> BlockPairs:
    """The pairs that are seen, at most `size`; owners and others are numbered through all rows."""
    batch, owner, other = jnp.nonzero(is_seen, size=size, fill_value=0)
    ends = jnp.cumsum(is_seen.sum(-1).reshape(-1))
    owner, other = batch * is_seen.shape[1] + owner, batch * is_seen.shape[2] + other
    return BlockPairs(*(a.astype(jnp.int32) for a in (jnp.pad(ends, (1, 0)), owner, other)))


def segment_spans(
    segments: Int[Array, "B S"],
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


def causal_reach(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """`last` of a causal mask: the end of every token's segment; padding (-1) attends to itself."""
    return segment_spans(segments)[1]
