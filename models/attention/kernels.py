"""Attention over the listed block pairs: the same walks in XLA, Pallas TPU and Pallas Triton.

The rows of a batch are concatenated into one long row. On XLA and TPU the G query heads per kv head
are folded into the query rows, [K, rows, H], so that one matmul serves all of them. GPU programs
process one query head at a time, since GPU blocks must be powers of two and G need not be. They
read [tokens, heads, H] with strides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from models.attention.blocks import DKV, DQ, FORWARD, INPUTS, OF_KEYS, Pair, Walk
from models.attention.mask import BlockMask, BlockPairs, padded_bounds


def forward(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: BlockMask,
) -> tuple[Float[Array, "B S K G H"], Float[Array, "K _ _"]]:
    """The output, and the log-sum-exps in the layout that `backward` reads."""
    assert mask.by_query is not None  # dense attention has no kernel
    arrays, pair = _arrays(mask, q, k, v)
    out, lse = _RUN[mask.impl.name]((FORWARD,), arrays, mask.by_query, pair, mask.impl.interpret)
    return _unfold(out, q, mask), lse.reshape(q.shape[2], -1, lse.shape[-1])


def backward(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: BlockMask,
    out: Float[Array, "B S K G H"],
    lse: Float[Array, "K _ _"],
    g: Float[Array, "B S K G H"],
) -> tuple[Float[Array, "B S K G H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """The gradients of q, k and v, from the results of `forward` and the output's gradient g."""
    arrays, pair = _arrays(mask, q, k, v)
    delta = jnp.einsum("...H,...H->...", g, out, preferred_element_type=jnp.float32)
    delta = _fold(delta[..., None], mask)
    if mask.impl.name == "gpu":
        delta, lse = delta[..., 0].T, lse.reshape(-1, lse.shape[-1])  # [heads, tokens]
    else:
        delta = delta.swapaxes(1, 2)  # [K, 1, rows], as lse
    settings = dict(arrays=(*arrays, lse, delta, _fold(g, mask)), pair=pair)
    run = functools.partial(_RUN[mask.impl.name], **settings, interpret=mask.impl.interpret)
    if mask.impl.name == "xla":  # one loop, so that the compiler computes the softmax weights once
        grads = run((DQ, DKV), pairs=mask.by_key)
    else:
        grads = *run((DQ,), pairs=mask.by_query), *run((DKV,), pairs=mask.by_key)
    dq, dk, dv = (_unfold(grad, a, mask) for grad, a in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _arrays(mask: BlockMask, q: Array, k: Array, v: Array) -> tuple[tuple[Array, ...], Pair]:
    """q, k, v and bounds with the rows of the batch concatenated, and the sizes of a pair."""
    first, last = padded_bounds(mask.first, mask.last, _padding(mask))
    start = first.shape[1] * jnp.arange(len(first), dtype=first.dtype)[:, None]
    bounds = jnp.stack([first + start, last + start + 1], axis=-1).reshape(-1, 2)
    assert mask.blocks is not None
    query_block, key_block = mask.blocks
    G, H = q.shape[3:]
    rows_per_token = 1 if mask.impl.name == "gpu" else G
    pair = Pair(query_block * rows_per_token, key_block, H, rows_per_token, H**-0.5)
    return (*(_fold(a, mask) for a in (q, k, v)), bounds), pair


def _padding(mask: BlockMask) -> int:
    assert mask.blocks is not None
    return -mask.first.shape[1] % max(mask.blocks)


def _fold(a: Float[Array, "B S K ..."], mask: BlockMask) -> Array:
    """[K, rows, H]; for a GPU, which reads with strides, [tokens, heads, H]."""
    a = jnp.pad(a, [(0, 0), (0, _padding(mask))] + [(0, 0)] * (a.ndim - 2))
    if mask.impl.name == "gpu":
        return a.reshape(a.shape[0] * a.shape[1], -1, a.shape[-1])
    return jnp.moveaxis(a, 2, 0).reshape(a.shape[2], -1, a.shape[-1])


def _unfold(a: Array, like: Float[Array, "B S K ..."], mask: BlockMask) -> Array:
    B, S, K, *rest = like.shape
    a = a.astype(like.dtype)
    if mask.impl.name == "gpu":
        return a.reshape(B, -1, K, *rest)[:, :S]
    return jnp.moveaxis(a.reshape(K, B, -1, *rest), 0, 2)[:, :S]


# The backends: (walks over the same pairs, arrays, pairs, sizes, interpret) -> the walks' outputs.

# The axis along which a folded array is split into blocks, by side.
_AXIS = {"q": 1, "a": 2, "l": 2, "k": 1, "b": 0}


def _bounds(block: Array) -> tuple[Array, Array]:
    return block[:, :1], block[:, 1:]


def _run_xla(
    walks: Sequence[Walk], arrays: Sequence[Array], pairs: BlockPairs, pair: Pair, interpret: bool
) -> Sequence[Array]:
    """One loop over all pairs, vmapped over kv heads, that updates the accumulators in place."""
    by_key = any(walk.by_key for walk in walks)
    sides = INPUTS[: len(arrays)]
    heads = [None if side == "b" else 0 for side in sides]
    num_heads, num_rows, _ = arrays[0].shape
    num_keys = arrays[1].shape[1]
    whole = dataclasses.replace(pair, rows=num_rows, keys=num_keys)
    size = {side: pair.keys if side in OF_KEYS else pair.rows for side in _AXIS}

    def initial(side, value):
        return jnp.full((num_heads, *whole.block(side)), value, jnp.float32)

    def step(n, totals):
        owner, other = pairs.owners[n], pairs.others[n]
        i, j = (other, owner) if by_key else (owner, other)

        def start(side):
            return (j if side in OF_KEYS else i) * size[side]

        def block_of(side, a):
            block = lax.dynamic_slice_in_dim(a, start(side), size[side], _AXIS[side])
            return _bounds(block) if side == "b" else block

        def add(walk, sums):
            visit = functools.partial(walk.visit, i=i, pair=pair)
            parts = tuple(block_of(*a) for a in zip(walk.sums, sums, strict=True))
            new = jax.vmap(visit, (0, heads))(parts, blocks)
            return tuple(
                lax.dynamic_update_slice_in_dim(a, part, start(side), _AXIS[side])
                for side, a, part in zip(walk.sums, sums, new, strict=True)
            )

        blocks = [block_of(*a) for a in zip(sides, arrays, strict=True)]
        return [add(*a) for a in zip(walks, totals, strict=True)]

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
    sides, num_heads = INPUTS[: walk.num_inputs], len(arrays[0])
    arrays = arrays[: walk.num_inputs]

    def body(starts, owners, others, *refs):
        inputs, outputs = refs[: len(sides)], refs[len(sides) : -len(walk.sums)]
        sums, n = refs[-len(walk.sums) :], pl.program_id(1)
        owner = owners[n]

        @pl.when(n == starts[owner])
        def _():
            for ref, value in zip(sums, walk.initial, strict=True):
                ref[...] = jnp.full_like(ref, value)

        blocks = [
            _bounds(ref[...]) if side == "b" else ref[...]
            for side, ref in zip(sides, inputs, strict=True)
        ]
        i = others[n] if walk.by_key else owner
        new = walk.visit(tuple(ref[...] for ref in sums), blocks, i, pair)
        for ref, a in zip(sums, new, strict=True):
            ref[...] = a

        @pl.when(n + 1 == starts[owner + 1])
        def _():
            for ref, a in zip(outputs, walk.finish(new, pair), strict=True):
                ref[...] = a.astype(ref.dtype)

    def spec(side):
        def index(head, n, starts, owners, others):
            block = (owners if (side in OF_KEYS) == walk.by_key else others)[n]
            return {"b": (block, 0), "l": (head, 0, block)}.get(side, (head, block, 0))

        return pl.BlockSpec((pair.keys, 2) if side == "b" else (None, *pair.block(side)), index)

    num_scores = pair.rows * pair.keys * pairs.others.size * num_heads
    outputs = _output_shapes(walk, arrays, (num_heads, 1, arrays[0].shape[1]))
    return pl.pallas_call(
        body,
        outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_heads, pairs.starts[-1]),
            in_specs=[spec(side) for side in sides],
            out_specs=[spec(side) for side in walk.outputs],
            scratch_shapes=[pltpu.VMEM(pair.block(side), jnp.float32) for side in walk.sums],
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

    If key blocks are the owners, one program per owner and kv head. If query blocks are, scores are
    [rows, keys], which moves less data between threads. Head dims are padded to a power of two on
    load.
    """
    (walk,) = walks
    sides, arrays = INPUTS[: walk.num_inputs], arrays[: walk.num_inputs]
    num_tokens, num_heads, head_dim = arrays[0].shape
    num_kv_heads = arrays[1].shape[1]
    G = num_heads // num_kv_heads
    group = G if walk.by_key else 1  # query heads per program
    pair = dataclasses.replace(pair, head_dim=pl.next_power_of_2(head_dim), transposed=walk.by_key)
    size = {"q": pair.rows, "l": pair.rows, "k": pair.keys, "b": pair.keys}

    def body(starts, others, *refs):
        owner = pl.program_id(0)
        inputs, outputs = refs[: len(sides)], refs[len(sides) :]
        is_head = jnp.arange(pair.head_dim)[None] < head_dim

        def load(side, ref, block, g):
            tokens = pl.ds(block * size[side], size[side])
            if side == "b":
                return tuple(ref[tokens, jnp.int32(n)][:, None] for n in range(2))
            if side == "l":
                return ref[g, tokens][None]
            head = ref.at[tokens, g if side == "q" else jnp.int32(0)]
            return plgpu.load(head, mask=is_head, other=0.0)

        def step(n, sums):
            other, g = others[n // group], n % group
            blocks = [
                fixed[m] if m in fixed else load(side, inputs[m], other, g)
                for m, side in enumerate(sides)
            ]
            return tuple(walk.visit(sums, blocks, other if walk.by_key else owner, pair))

        owned = ((m, side) for m, side in enumerate(sides) if (side in OF_KEYS) == walk.by_key)
        fixed = {m: load(side, inputs[m], owner, jnp.int32(0)) for m, side in owned}
        order = {side: 1 if pair.transposed or side in "qk" else -1 for side in walk.sums}
        shapes = [pair.block(side)[:: order[side]] for side in walk.sums]
        sums = tuple(map(jnp.full, shapes, walk.initial))
        sums = lax.fori_loop(group * starts[owner], group * starts[owner + 1], step, sums)
        for side, ref, a in zip(walk.outputs, outputs, walk.finish(sums, pair), strict=True):
            if side == "l":
                ref[...] = a[0]
            else:
                plgpu.store(ref, a.astype(ref.dtype), mask=is_head)

    def whole(side):
        if side == "b":
            return pl.BlockSpec((num_tokens, 2), lambda owner, head: (0, 0))
        if side == "l":
            return pl.BlockSpec((group, num_tokens), lambda owner, head: (head, 0))
        if side == "q":
            return pl.BlockSpec(
                (num_tokens, group, pair.head_dim), lambda owner, head: (0, head, 0)
            )
        kv_head = (lambda head: head) if walk.by_key else (lambda head: head // G)
        return pl.BlockSpec(
            (num_tokens, 1, pair.head_dim), lambda owner, head: (0, kv_head(head), 0)
        )

    def owned_block(side):
        if side == "l":
            return pl.BlockSpec((None, pair.rows), lambda owner, head: (head, owner))
        return pl.BlockSpec((size[side], None, pair.head_dim), lambda owner, head: (owner, head, 0))

    lists = [pl.BlockSpec(a.shape, lambda owner, head: (0,)) for a in (pairs.starts, pairs.others)]
    return pl.pallas_call(
        body,
        _output_shapes(walk, arrays, (num_heads, num_tokens)),
        grid=(len(pairs.starts) - 1, num_kv_heads if walk.by_key else num_heads),
        in_specs=[*lists, *map(whole, sides)],
        out_specs=[*map(owned_block, walk.outputs)],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(pairs.starts, pairs.others, *arrays)


def _output_shapes(walk: Walk, arrays: Sequence[Array], lse_shape: tuple[int, ...]):
    shapes = {
        "q": jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
        "k": jax.ShapeDtypeStruct(arrays[1].shape, arrays[1].dtype),
        "l": jax.ShapeDtypeStruct(lse_shape, jnp.float32),
    }
    return [shapes[side] for side in walk.outputs]


_RUN = {"xla": _run_xla, "tpu": _run_tpu, "gpu": _run_gpu}
