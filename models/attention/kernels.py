"""Block-sparse attention over lists of block pairs, in XLA, Pallas TPU and Pallas Triton.

An online softmax in float32, after FlashAttention (arXiv:2205.14135, 2307.08691). A pair is a block
of query rows and a block of keys. There are three reductions over the pairs (`Walk`): the output
with its log-sum-exp, the gradient of q, and the gradients of k and v.

XLA and TPU fold the G query heads of a kv head into the query rows, [K, rows, H], so that one
matmul serves all of them: row r belongs to token r // G and attends to key k iff
G·first[k] <= r < G·(last[k] + 1). GPU programs process one query head at a time, since GPU blocks
must be powers of two and G need not be. They read [tokens, heads, H] with strides.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int, Shaped

MASKED = -1e30  # score of a masked entry; finite, so that rows masked in a whole block stay finite


class Kind(enum.Enum):
    """What a block holds, and its shape."""

    QUERIES = "query rows [rows, H]"
    QUERIES_T = "transposed query rows [H, rows]"
    PER_QUERY = "a number per query row [1, rows]"
    KEYS = "keys or values [keys, H]"
    BOUNDS = "first and last + 1 of each key, [keys, 1] both"

    @property
    def is_of_keys(self) -> bool:
        """Whether it is blocked by keys, not by query rows."""
        return self in (Kind.KEYS, Kind.BOUNDS)


# The blocked axis of folded arrays.
_AXIS = {Kind.QUERIES: 1, Kind.QUERIES_T: 2, Kind.PER_QUERY: 2, Kind.KEYS: 1, Kind.BOUNDS: 0}


@typing.no_type_check  # `shard_map` puts specs in the fields
@flax.struct.dataclass
class BlockPairs:
    """The pairs of blocks to compute, grouped by one of the two blocks, the owner."""

    starts: Int[Array, " blocks+1"]  # the pairs of owner i are starts[i] to starts[i + 1] - 1
    owners: Int[Array, " n"]  # the owner of each pair; 0 after the last pair
    others: Int[Array, " n"]  # the other block of each pair


def block_pairs(is_seen: Bool[Array, "B O N"], size: int) -> BlockPairs:
    """The unmasked pairs, at most `size`; blocks are numbered consecutively over all rows."""
    batch, owner, other = jnp.nonzero(is_seen, size=size, fill_value=0)
    ends = jnp.cumsum(is_seen.sum(-1).reshape(-1))
    owner, other = batch * is_seen.shape[1] + owner, batch * is_seen.shape[2] + other
    return BlockPairs(*(a.astype(jnp.int32) for a in (jnp.pad(ends, (1, 0)), owner, other)))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Sizes of a pair of blocks: query rows, keys, head dim, rows per token; and the scale.

    If `transposed`, scores are [keys, rows], which puts rows along the vector lanes.
    """

    rows: int
    keys: int
    head_dim: int
    group: int
    scale: float
    transposed: bool = True

    def size(self, kind: Kind) -> int:
        """Keys or query rows in a block."""
        return self.keys if kind.is_of_keys else self.rows

    def block(self, kind: Kind) -> tuple[int, int]:
        """The shape of a block."""
        if kind is Kind.QUERIES_T:
            return self.head_dim, self.rows
        if kind is Kind.PER_QUERY:
            return 1, self.rows
        return self.size(kind), 1 if kind is Kind.BOUNDS else self.head_dim


@dataclasses.dataclass(frozen=True)
class Walk:
    """A reduction over the pairs of every owner block."""

    inputs: tuple[Kind, ...]  # q, k, v, bounds; then log-sum-exp, delta, gradient of the output
    sums: tuple[Kind, ...]  # the accumulators, QUERIES_T and PER_QUERY transposed if scores are not
    initial: tuple[float, ...]  # values of the accumulators
    outputs: tuple[Kind, ...]
    num_products: int  # matmuls per pair
    visit: Callable  # (sums, blocks, query block, pair) -> the accumulators after a pair
    finish: Callable = lambda sums, pair: sums  # -> the outputs

    @property
    def by_key(self) -> bool:
        """Whether key blocks own the pairs."""
        return self.outputs[0].is_of_keys


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    axes = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _product(rows: Array, keys: Array, pair: Pair) -> Array:
    return _dot(keys, rows, 1, 1) if pair.transposed else _dot(rows, keys, 1, 1)


def _line(line: Shaped[Array, "1 rows"], pair: Pair) -> Array:
    return line if pair.transposed else line.T


def _scores(q, k, bounds, i, pair: Pair) -> Array:
    """Scaled scores of query block i and a block of keys; `MASKED` if masked."""
    row = i * pair.rows + lax.broadcasted_iota(jnp.int32, (1, pair.rows), 1)
    row = _line(row, pair)
    first, stop = (pair.group * (a if pair.transposed else a.T) for a in bounds)
    return jnp.where((first <= row) & (row < stop), _product(q, k, pair) * pair.scale, MASKED)


def _visit_forward(sums, blocks, i, pair: Pair):
    q, k, v, bounds = blocks
    acc, top, total = sums
    keys = 0 if pair.transposed else 1
    scores = _scores(q, k, bounds, i, pair)
    new = jnp.maximum(top, scores.max(keys, keepdims=True))
    weights, decay = jnp.exp(scores - new), jnp.exp(top - new)
    low = weights.astype(v.dtype)
    part = _dot(v, low, 0, 0) if pair.transposed else _dot(low, v, 1, 0)
    return decay * acc + part, new, decay * total + weights.sum(keys, keepdims=True)


def _finish_forward(sums, pair: Pair):
    acc, top, total = sums
    out, lse = acc / total, top + jnp.log(total)
    return (out.T, lse) if pair.transposed else (out, lse.T)


def _weights(blocks, i, pair: Pair) -> tuple[Array, Array]:
    """The softmax weights, and the gradient of the unscaled scores q·k."""
    q, k, v, bounds, lse, delta, g = blocks
    weights = jnp.exp(_scores(q, k, bounds, i, pair) - _line(lse, pair))
    ds = weights * (_product(g, v, pair) - _line(delta, pair)) * pair.scale
    return weights.astype(g.dtype), ds.astype(q.dtype)


def _visit_dq(sums, blocks, i, pair: Pair):
    _, ds = _weights(blocks, i, pair)
    return (sums[0] + _dot(ds, blocks[1], 0 if pair.transposed else 1, 0),)


def _visit_dkv(sums, blocks, i, pair: Pair):
    weights, ds = _weights(blocks, i, pair)
    rows = 1 if pair.transposed else 0
    return sums[0] + _dot(ds, blocks[0], rows, 0), sums[1] + _dot(weights, blocks[-1], rows, 0)


_INPUTS = Kind.QUERIES, Kind.KEYS, Kind.KEYS, Kind.BOUNDS
_OF_BACKWARD = *_INPUTS, Kind.PER_QUERY, Kind.PER_QUERY, Kind.QUERIES
FORWARD = Walk(
    inputs=_INPUTS,
    sums=(Kind.QUERIES_T, Kind.PER_QUERY, Kind.PER_QUERY),
    initial=(0.0, MASKED, 0.0),
    outputs=(Kind.QUERIES, Kind.PER_QUERY),
    num_products=2,
    visit=_visit_forward,
    finish=_finish_forward,
)
DQ = Walk(
    inputs=_OF_BACKWARD,
    sums=(Kind.QUERIES,),
    initial=(0.0,),
    outputs=(Kind.QUERIES,),
    num_products=3,
    visit=_visit_dq,
)
DKV = Walk(
    inputs=_OF_BACKWARD,
    sums=(Kind.KEYS, Kind.KEYS),
    initial=(0.0, 0.0),
    outputs=(Kind.KEYS, Kind.KEYS),
    num_products=4,
    visit=_visit_dkv,
)


def _bounds(block: Array) -> tuple[Array, Array]:
    return block[:, :1], block[:, 1:]


def _run_xla(
    walks: Sequence[Walk], arrays: Sequence[Array], pairs: BlockPairs, pair: Pair, interpret: bool
) -> Sequence[Array]:
    """One loop over all pairs, vmapped over kv heads, that updates the accumulators in place."""
    by_key, inputs = any(walk.by_key for walk in walks), walks[0].inputs
    heads = [None if kind is Kind.BOUNDS else 0 for kind in inputs]
    num_heads, num_rows, _ = arrays[0].shape
    whole = dataclasses.replace(pair, rows=num_rows, keys=arrays[1].shape[1])

    def initial(kind, value):
        return jnp.full((num_heads, *whole.block(kind)), value, jnp.float32)

    def step(n, totals):
        owner, other = pairs.owners[n], pairs.others[n]
        i, j = (other, owner) if by_key else (owner, other)

        def start(kind):
            return (j if kind.is_of_keys else i) * pair.size(kind)

        def block_of(kind, a):
            block = lax.dynamic_slice_in_dim(a, start(kind), pair.size(kind), _AXIS[kind])
            return _bounds(block) if kind is Kind.BOUNDS else block

        def add(walk, sums):
            visit = functools.partial(walk.visit, i=i, pair=pair)
            new = jax.vmap(visit, (0, heads))(tuple(map(block_of, walk.sums, sums)), blocks)
            return tuple(
                lax.dynamic_update_slice_in_dim(a, part, start(kind), _AXIS[kind])
                for kind, a, part in zip(walk.sums, sums, new, strict=True)
            )

        blocks = list(map(block_of, inputs, arrays))
        return list(map(add, walks, totals))

    totals = [tuple(map(initial, walk.sums, walk.initial)) for walk in walks]
    totals = lax.fori_loop(0, pairs.starts[-1], step, totals)
    finished = (
        jax.vmap(functools.partial(walk.finish, pair=whole))(sums)
        for walk, sums in zip(walks, totals, strict=True)
    )
    return [out for outs in finished for out in outs]


def _run_tpu(
    walks: Sequence[Walk], arrays: Sequence[Array], pairs: BlockPairs, pair: Pair, interpret: bool
) -> Sequence[Array]:
    """A grid over kv heads and a dynamic number of pairs, with the pair lists prefetched.

    The accumulators of an owner stay in VMEM while the grid iterates over its pairs.
    """
    (walk,) = walks
    num_inputs, num_heads = len(walk.inputs), len(arrays[0])

    def body(starts, owners, others, *refs):
        inputs, outputs = refs[:num_inputs], refs[num_inputs : -len(walk.sums)]
        sums, n = refs[-len(walk.sums) :], pl.program_id(1)
        owner = owners[n]

        @pl.when(n == starts[owner])
        def _():
            for ref, value in zip(sums, walk.initial, strict=True):
                ref[...] = jnp.full_like(ref, value)

        blocks = [
            _bounds(ref[...]) if kind is Kind.BOUNDS else ref[...]
            for kind, ref in zip(walk.inputs, inputs, strict=True)
        ]
        i = others[n] if walk.by_key else owner
        new = walk.visit(tuple(ref[...] for ref in sums), blocks, i, pair)
        for ref, a in zip(sums, new, strict=True):
            ref[...] = a

        @pl.when(n + 1 == starts[owner + 1])
        def _():
            for ref, a in zip(outputs, walk.finish(new, pair), strict=True):
                ref[...] = a.astype(ref.dtype)

    def spec(kind):
        def index(head, n, starts, owners, others):
            block = (owners if kind.is_of_keys == walk.by_key else others)[n]
            by_kind = {Kind.BOUNDS: (block, 0), Kind.PER_QUERY: (head, 0, block)}
            return by_kind.get(kind, (head, block, 0))

        is_bounds = kind is Kind.BOUNDS
        return pl.BlockSpec((pair.keys, 2) if is_bounds else (None, *pair.block(kind)), index)

    num_scores = pair.rows * pair.keys * pairs.others.size * num_heads
    outputs = _output_shapes(walk, arrays, (num_heads, 1, arrays[0].shape[1]))
    return pl.pallas_call(
        body,
        outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_heads, pairs.starts[-1]),
            in_specs=list(map(spec, walk.inputs)),
            out_specs=list(map(spec, walk.outputs)),
            scratch_shapes=[pltpu.VMEM(pair.block(kind), jnp.float32) for kind in walk.sums],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(  # upper bound, for full pair lists
            flops=2 * walk.num_products * num_scores * pair.head_dim,
            transcendentals=num_scores,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*arrays, *outputs)),
        ),
        interpret=interpret,
    )(pairs.starts, pairs.owners, pairs.others, *arrays)


def _run_gpu(
    walks: Sequence[Walk], arrays: Sequence[Array], pairs: BlockPairs, pair: Pair, interpret: bool
) -> Sequence[Array]:
    """One program per owner and query head, which loops over the owner's pairs.

    Gradients of keys and values are summed over a kv head's query heads afterwards: all responses
    see a prompt's keys, and a program that visited every head would outlast the others. If query
    blocks are the owners, scores are [rows, keys], which moves less data between threads. Head dims
    are padded to a power of two on load.
    """
    (walk,) = walks
    num_inputs = len(walk.inputs)
    num_tokens, num_heads, head_dim = arrays[0].shape
    G = num_heads // arrays[1].shape[1]
    pair = dataclasses.replace(pair, head_dim=pl.next_power_of_2(head_dim), transposed=walk.by_key)

    def body(starts, others, *refs):
        owner = pl.program_id(0)
        inputs, outputs = refs[:num_inputs], refs[num_inputs:]
        is_head = jnp.arange(pair.head_dim)[None] < head_dim

        def load(kind, ref, block):
            tokens = pl.ds(block * pair.size(kind), pair.size(kind))
            if kind is Kind.BOUNDS:
                return tuple(ref[tokens, jnp.int32(n)][:, None] for n in range(2))
            if kind is Kind.PER_QUERY:
                return ref[tokens][None]
            return plgpu.load(ref.at[tokens], mask=is_head, other=0.0)

        def step(n, sums):
            other = others[n]
            blocks = [
                fixed[m] if m in fixed else load(kind, inputs[m], other)
                for m, kind in enumerate(walk.inputs)
            ]
            return tuple(walk.visit(sums, blocks, other if walk.by_key else owner, pair))

        def initial(kind, value):
            is_turned = kind in (Kind.QUERIES_T, Kind.PER_QUERY) and not pair.transposed
            return jnp.full(pair.block(kind)[:: -1 if is_turned else 1], value)

        fixed = {
            m: load(kind, inputs[m], owner)
            for m, kind in enumerate(walk.inputs)
            if kind.is_of_keys == walk.by_key
        }
        sums = tuple(map(initial, walk.sums, walk.initial))
        sums = lax.fori_loop(starts[owner], starts[owner + 1], step, sums)
        for kind, ref, a in zip(walk.outputs, outputs, walk.finish(sums, pair), strict=True):
            if kind is Kind.PER_QUERY:
                ref[...] = a[0]
            else:
                plgpu.store(ref, a.astype(ref.dtype), mask=is_head)

    def whole(kind):
        if kind is Kind.BOUNDS:
            return pl.BlockSpec((num_tokens, 2), lambda owner, head: (0, 0))
        if kind is Kind.PER_QUERY:
            return pl.BlockSpec((None, num_tokens), lambda owner, head: (head, 0))
        shape, per_head = (num_tokens, None, pair.head_dim), G if kind.is_of_keys else 1
        return pl.BlockSpec(shape, lambda owner, head: (0, head // per_head, 0))

    def owned_block(kind):
        if kind is Kind.PER_QUERY:
            return pl.BlockSpec((None, pair.rows), lambda owner, head: (head, owner))
        shape = pair.size(kind), None, pair.head_dim
        return pl.BlockSpec(shape, lambda owner, head: (owner, head, 0))

    # Two stages of float32 exceed the 99 KiB of shared memory of compute capability 8.6 and 8.9.
    num_stages = 1 if arrays[0].dtype.itemsize > 2 else 2
    lists = [pl.BlockSpec(a.shape, lambda owner, head: (0,)) for a in (pairs.starts, pairs.others)]
    shapes = _output_shapes(walk, arrays, (num_heads, num_tokens))
    is_summed = walk.by_key and G > 1
    outputs = pl.pallas_call(
        body,
        [jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)] * 2 if is_summed else shapes,
        grid=(len(pairs.starts) - 1, num_heads),
        in_specs=[*lists, *map(whole, walk.inputs)],
        out_specs=list(map(owned_block, walk.outputs)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=num_stages),
        interpret=interpret,
    )(pairs.starts, pairs.others, *arrays)
    if not is_summed:
        return outputs
    return [
        a.reshape(num_tokens, -1, G, head_dim).sum(2).astype(shape.dtype)
        for a, shape in zip(outputs, shapes, strict=True)
    ]


def _output_shapes(walk: Walk, arrays: Sequence[Array], lse_shape: tuple[int, ...]):
    shapes = {
        Kind.QUERIES: jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
        Kind.KEYS: jax.ShapeDtypeStruct(arrays[1].shape, arrays[1].dtype),
        Kind.PER_QUERY: jax.ShapeDtypeStruct(lse_shape, jnp.float32),
    }
    return [shapes[kind] for kind in walk.outputs]


# (walks over the same pairs, arrays, pairs, sizes of a pair, interpret) -> the walks' outputs.
RUN = {"xla": _run_xla, "tpu": _run_tpu, "gpu": _run_gpu}
