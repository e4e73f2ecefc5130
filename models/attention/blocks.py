"""Attention on one pair of blocks: a block of query rows and a block of keys.

An online softmax in float32, after FlashAttention (arXiv:2205.14135, 2307.08691). Three walks
iterate over the pairs: the output with its log-sum-exp, the gradient of q, the gradients of k and
v. A token may have G rows, one per query head of a kv head: row r belongs to token r // G and
attends to key k iff G·first[k] <= r < G·(last[k] + 1).

The side of a block is a letter for its kind and shape:
    "q" query rows [rows, H], "a" their transpose [H, rows], "l" a number per query row [1, rows],
    "k" keys [keys, H], "b" first and last + 1 of each key, [keys, 1] both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

MASKED = -1e30  # score of a masked entry; finite, so that rows masked in a whole block stay finite

INPUTS = "qkkbllq"  # sides of q, k, v, bounds, log-sum-exp, delta, gradient of the output
OF_KEYS = "kb"


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

    def block(self, side: str) -> tuple[int, int]:
        """The shape of a block of this side."""
        return {
            "q": (self.rows, self.head_dim),
            "a": (self.head_dim, self.rows),
            "l": (1, self.rows),
            "k": (self.keys, self.head_dim),
            "b": (self.keys, 1),
        }[side]


@dataclasses.dataclass(frozen=True)
class Walk:
    """A reduction over the pairs of every owner block.

    Attributes:
        num_inputs: it reads the first `num_inputs` of `INPUTS`.
        sums: the side of each accumulator; "a" and "l" are transposed if scores are not.
        initial: the initial value of each accumulator.
        outputs: the side of each output.
        visit: (sums, blocks, index of the query block, pair) -> the accumulators after a pair.
        finish: (sums, pair) -> the outputs.
        num_products: matmuls per pair.
    """

    num_inputs: int
    sums: str
    initial: tuple[float, ...]
    outputs: str
    visit: Callable
    finish: Callable
    num_products: int

    @property
    def by_key(self) -> bool:
        """Whether key blocks own the pairs."""
        return self.outputs[0] in OF_KEYS


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


def _as_summed(sums, pair: Pair):
    return sums


FORWARD = Walk(4, "all", (0.0, MASKED, 0.0), "ql", _visit_forward, _finish_forward, 2)
DQ = Walk(7, "q", (0.0,), "q", _visit_dq, _as_summed, 3)
DKV = Walk(7, "kk", (0.0, 0.0), "kk", _visit_dkv, _as_summed, 4)
