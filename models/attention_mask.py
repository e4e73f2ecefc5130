"""Which tokens of a row see which: two integers per key, and the blocks that follow from them.

Key k is seen by the queries first[k]..last[k] of its row. A text row of trees in depth-first order,
`[prompt | branch 0 | branch 1 | ...] [prompt' | ...] padding`, has first[k] = k and last[k] = the
end of k's tree if k is a prompt token, the end of its branch if it is a response token. An image
has the first and the last of its patches for all of them. Padding sees itself, so that every
softmax has a term. Only pairs of a query block and a key block that see each other are computed:
they are listed on the device, once per batch, and every layer walks the same lists.
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
from jaxtyping import Array, Int

# Query rows of a TPU block: its query tokens times the query heads of a kv head.
_TPU_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class AttentionImpl:
    """What computes attention over whole rows.

    Attributes:
        name: "xla" for any device, "tpu" (Pallas) or "gpu" (Pallas through Triton).
        mesh: the devices that rows and heads are sharded over; None for one device.
        batch_axes: mesh axes that shard the rows.
        head_axes: mesh axes that shard the heads, as many of them, from the first on, as divide.
        interpret: runs a Pallas kernel step by step on any device, for tests.
        query_block, key_block: tokens of a block; None for what suits `name`. One must divide the
            other. For a GPU both are powers of two, for a TPU multiples of 128.
        dense_tokens: rows of at most this many tokens are one masked product.
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
    """The n pairs of blocks to visit, grouped by the block that owns them.

    Attributes:
        starts: pairs starts[i] to starts[i + 1] are those of owner i.
        owners: the owner of each pair; 0 behind the last pair.
        others: the block that the owner meets.
    """

    starts: Int[Array, " blocks+1"]
    owners: Int[Array, " n"]
    others: Int[Array, " n"]


@flax.struct.dataclass
class BlockMask:
    """A mask and how to walk it, from `block_mask`.

    Attributes:
        first, last: key k is seen by the queries first[k]..last[k].
        by_query: pairs owned by query blocks; None where rows are one dense product. Under a mesh
            each shard of the rows has lists of its own, one after another.
        by_key: the same pairs, owned by key blocks.
        impl: what the lists were made for.
        blocks: tokens of a query block and of a key block; None where rows are dense.
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
        first: first query that sees each key; None for causal rows, where it is the key itself.
        last: last query that sees each key. Every token must see itself.
        group: query heads of a kv head, 1 in a vision tower.
        impl: what will compute attention.
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
    """Tokens of a query block and of a key block."""
    if impl.name == "xla":  # measured, perf/attention.py: towers gain from larger blocks
        num_blocks = -(-num_tokens // (128 if group == 1 else 64))
        query_block = key_block = -(-num_tokens // (16 * num_blocks)) * 16  # all equally full
    elif (
        impl.name == "tpu"
    ):  # powers of two, so that they divide each other, up to the row's length
        longest = max(128, _power_of_two(num_tokens))
        query_block = min(max(128, _power_of_two(_TPU_ROWS // group)), longest)
        key_block = min(512, longest)
    else:  # larger ones spill registers at head size 128
        query_block = key_block = 64
    query_block, key_block = impl.query_block or query_block, impl.key_block or key_block
    if max(query_block, key_block) % min(query_block, key_block):
        raise ValueError(
            f"query_block {query_block} and key_block {key_block}: one must divide the other"
        )
    return query_block, key_block


def _power_of_two(size: int) -> int:
    """The largest that is not above `size`."""
    return 1 << size.bit_length() - 1


def padded_bounds(
    first: Int[Array, "B S"], last: Int[Array, "B S"], padding: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """first and last of rows with `padding` more tokens, each of which sees itself."""
    more = first.shape[1] + jnp.arange(padding, dtype=first.dtype)
    more = jnp.broadcast_to(more, (len(first), padding))
    return tuple(jnp.concatenate([a, more], axis=1) for a in (first, last))


def _block_lists(
    first: Int[Array, "B S"],
    last: Int[Array, "B S"],
    *,
    query_block: int,
    key_block: int,
    is_causal: bool,
) -> tuple[BlockPairs, BlockPairs]:
    """Lists of the pairs that see each other, blocks counted over all rows one after another."""
    padding = -first.shape[1] % max(query_block, key_block)
    first, last = padded_bounds(first, last, padding)
    B, S = first.shape
    query = np.arange(0, S, query_block)[:, None]
    # The queries that see a key block are one run, since those of neighbouring keys overlap.
    lowest = first.reshape(B, 1, -1, key_block).min(-1)
    highest = last.reshape(B, 1, -1, key_block).max(-1)
    is_seen = (lowest < query + query_block) & (highest >= query)  # [B, query, key blocks]
    size = is_seen.size
    if is_causal:
        size = B * int((np.arange(0, S, key_block) < query + query_block).sum())

    def listed(is_seen):
        batch, owner, other = jnp.nonzero(is_seen, size=size, fill_value=0)
        ends = jnp.cumsum(is_seen.sum(-1).reshape(-1))
        owner, other = batch * is_seen.shape[1] + owner, batch * is_seen.shape[2] + other
        return BlockPairs(*(a.astype(jnp.int32) for a in (jnp.pad(ends, (1, 0)), owner, other)))

    return listed(is_seen), listed(is_seen.swapaxes(1, 2))


def segment_spans(
    segments: Int[Array, "B S"],
) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """The first and the last token of every token's segment; padding (-1) is its own segment.

    A segment is a run of equal numbers, so two of the same number with others between are two.
    """
    tokens = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_start = (segments != jnp.roll(segments, 1, axis=1)) | (segments < 0) | (tokens == 0)
    is_end = jnp.roll(is_start, -1, axis=1)
    first = jax.lax.cummax(jnp.where(is_start, tokens, 0), axis=1)
    last = jax.lax.cummin(jnp.where(is_end, tokens, tokens[-1]), axis=1, reverse=True)
    return first, last


def causal_reach(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """`last` of causal rows: the end of every token's segment; padding (-1) sees itself."""
    return segment_spans(segments)[1]
