"""log π(target) with its gradient, and the entropy of π, by blocks of the vocabulary.

The logits of one block of ids exist at a time, for all tokens. A pass over the blocks keeps of each
token the maximum m so far, Z = Σ exp(l - m), Σ exp(l - m)·(l - m) and the target's logit (online
softmax, arXiv:1805.02867). The backward pass computes the logits of each block again, for

    ∂ log π_y / ∂ l_v = [v = y] - π_v

and adds the gradient of the hidden states in float32. That of a block of the table is complete
after its step. So each pass reads (under FSDP all-gathers) the table once, and the backward pass
reduces its gradient once over the devices, in float32.

Letters: B rows, S tokens of a row, D model, V vocab; W ids of a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.backbone import NEVER
from models.layers import constrain

# Float32 logits of a block take 18 KiB per token. 4608 divides 152064, the vocabulary of
# Qwen2.5-VL-7B, and leaves 0.1% of padding with 151936, that of the others.
BLOCK = 4608
# A block has ids of each of so many parts of the vocabulary, so that one block after another can be
# taken from a table whose vocabulary is sharded over up to so many devices.
_PARTS = 16
# Tokens are computed up to the last that is wanted, rounded up to half of the row or all of it.
# Each length is compiled.
_LENGTHS, _FEWEST = 2, 128

IsNever = Callable[[Array], Array]
Scored = tuple[Float[Array, "B S"], Float[Array, "B S"]]  # log π(target), entropy


def target_logprobs(
    table: Float[Array, "V D"],
    hidden: Float[Array, "B S D"],
    targets: Int[Array, "B S"],
    is_wanted: Bool[Array, "B S"],
    is_never: IsNever,
) -> Scored:
    """log π(target) and the entropy of π at each token, both in nats, for logits hidden · table.

    The entropy is a metric: it has no gradient.

    Args:
        table: the unembedding; read in the dtype of `hidden`.
        hidden: states that predict `targets`, after the final norm.
        is_wanted: tokens to score. The tokens after the last column with such a token may be
            skipped and give 0.
        is_never: for ids [W], which have probability 0.
    """
    num_columns = jnp.max(jnp.where(is_wanted.any(0), jnp.arange(1, targets.shape[1] + 1), 0))
    scored: Any = _scored(table, hidden, targets, num_columns, is_never)
    return scored[0], jax.lax.stop_gradient(scored[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scored(
    table: Array, hidden: Array, targets: Array, num_columns: Array, is_never: IsNever
) -> Scored:
    return _forward(table, hidden, targets, num_columns, is_never)[0]


def _scored_fwd(table: Any, hidden: Any, targets: Any, num_columns: Any, is_never: IsNever) -> Any:
    arguments = table.value, hidden.value, targets.value, num_columns.value
    scored, sums = _forward(*arguments, is_never)
    is_trained = () if table.perturbed else None  # a bool would become a tracer
    return scored, (arguments, sums, is_trained)


def _scored_bwd(is_never: IsNever, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    """The gradients of table and hidden states; none of a frozen table."""
    (table, hidden, targets, num_columns), (top, log_total), is_trained = saved
    of_logp, _ = cotangents

    def gradients(length: int) -> tuple[Array, Array | None]:
        beside = hidden, targets, top, log_total, of_logp
        x, y, m, log_z, g = (_columns(each, length) for each in beside)
        scale = g * jnp.exp(-log_z)

        def step(carry, block, ids, start):
            dx, dtable = carry
            weight = jnp.exp(_logits(x, block, ids, is_never) - m[..., None])
            dlogits = jnp.where(y[..., None] == ids, g[..., None], 0) - scale[..., None] * weight
            dlogits = dlogits.astype(x.dtype)
            dx += jnp.einsum("BSW,WD->BSD", dlogits, block, preferred_element_type=jnp.float32)
            if dtable is not None:
                new = jnp.einsum("BSW,BSD->WD", dlogits, x, preferred_element_type=jnp.float32)
                new = constrain(new, "vocab", "embed").reshape(len(dtable), -1, dtable.shape[-1])
                dtable = jax.lax.dynamic_update_slice(dtable, new, (0, start, 0))
            return constrain(dx, "batch", "tokens", None), dtable

        dx, dtable = jnp.zeros(x.shape, jnp.float32), None
        if is_trained is not None:
            dtable = jnp.zeros(_in_parts(table).shape, jnp.float32)
        # Three matmuls: a block that is gathered beside them takes VMEM from them on TPUs, which
        # costs more than it hides.
        dx, dtable = _over_blocks(table, x.dtype, step, (dx, dtable), is_prefetched=False)
        return _as_long(dx.astype(x.dtype), hidden), dtable

    dx, dtable = _at_length(num_columns, targets.shape[1], gradients)
    if dtable is not None:
        dtable = dtable.reshape(table.shape).astype(table.dtype)
    return dtable, dx, None, None


_scored.defvjp(_scored_fwd, _scored_bwd, symbolic_zeros=True)


def _forward(
    table: Array, hidden: Array, targets: Array, num_columns: Array, is_never: IsNever
) -> tuple[Scored, Scored]:
    """What `target_logprobs` returns, and for each token m and log Z."""

    def scores(length: int) -> tuple[Scored, Scored]:
        x, y = _columns(hidden, length), _columns(targets, length)

        def step(sums, block, ids, _):
            top, total, moment, target = sums
            logits = _logits(x, block, ids, is_never)
            new = jnp.maximum(top, logits.max(-1))
            shifted, fewer = logits - new[..., None], jnp.exp(top - new)
            weight = jnp.exp(shifted)
            moment = fewer * (moment + total * (top - new)) + (weight * shifted).sum(-1)
            target += jnp.where(y[..., None] == ids, logits, 0).sum(-1)
            return new, fewer * total + weight.sum(-1), moment, target

        zero = jnp.zeros(y.shape, jnp.float32)
        start = zero + NEVER, zero, zero, zero
        top, total, moment, target = _over_blocks(table, x.dtype, step, start, is_prefetched=True)
        log_total = jnp.log(total)
        found = (target - top - log_total, log_total - moment / total), (top, log_total)
        return jax.tree.map(lambda x: _as_long(x, targets), found)

    return _at_length(num_columns, targets.shape[1], scores)


def _at_length(num_columns: Array, num_tokens: int, function: Callable[[int], Any]) -> Any:
    """`function` of the smallest of a few lengths that has all the columns."""
    step = max(-(-num_tokens // _LENGTHS), _FEWEST)
    lengths = [*range(step, num_tokens, step), num_tokens]
    index = jnp.searchsorted(jnp.array(lengths), num_columns)
    return jax.lax.switch(index, [functools.partial(function, length) for length in lengths])


def _columns(x: Array, length: int) -> Array:
    axes = ("batch", "tokens") + (None,) * (x.ndim - 2)
    return constrain(x[:, :length], *axes)


def _as_long(x: Array, like: Array) -> Array:
    return jnp.pad(x, [(0, 0), (0, like.shape[1] - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _in_parts(table: Array) -> Array:
    """[V, D] to [parts, V / parts, D]."""
    return table.reshape(math.gcd(len(table), _PARTS), -1, table.shape[1])


def _over_blocks(
    table: Float[Array, "V D"],
    dtype: Any,
    step: Callable[..., Any],
    carry: Any,
    *,
    is_prefetched: bool,
) -> Any:
    """The last carry of `step`(carry, block [W, D], ids [W], start) over the blocks of a table.

    A block has rows `start`, `start` + 1, ... of each part. All blocks are of one size. The
    first one overlaps the second; the rows of the overlap have id -1 in the first.

    Args:
        is_prefetched: the next block is all-gathered beside the matmuls of this one.
    """
    parts, size, D = _in_parts(table).shape
    num_blocks = -(-len(table) // BLOCK)
    width = min(-(-size // (8 * num_blocks)) * 8, size)  # a multiple of 8, as memory is tiled

    def start_of(n):
        return jnp.maximum(size - (num_blocks - n) * width, 0)

    def block_of(n):
        rows = jax.lax.dynamic_slice(_in_parts(table), (0, start_of(n), 0), (parts, width, D))
        return constrain(rows.astype(dtype).reshape(-1, D), "vocab", None)

    def stepped(carry, n, block):
        row = start_of(n) + jnp.arange(width)
        ids = jnp.arange(parts)[:, None] * size + row
        ids = jnp.where(row < size - (num_blocks - 1 - n) * width, ids, -1).reshape(-1)
        return step(carry, block, ids, row[0])

    def gathered(carry, n):
        return stepped(carry, n, block_of(n)), None

    def prefetched(both, n):
        carry, block = both
        following = block_of((n + 1) % num_blocks)
        return (stepped(carry, n, block), following), None

    numbers = jnp.arange(num_blocks)
    if is_prefetched:
        return jax.lax.scan(prefetched, (carry, block_of(0)), numbers)[0][0]
    return jax.lax.scan(gathered, carry, numbers)[0]


def _logits(x: Array, block: Array, ids: Array, is_never: IsNever) -> Float[Array, "B S W"]:
    logits = jnp.einsum("BSD,WD->BSW", x, block, preferred_element_type=jnp.float32)
    logits = constrain(logits, "batch", "tokens", "vocab")
    return jnp.where(is_never(ids) | (ids < 0), NEVER, logits)
