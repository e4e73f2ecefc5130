"""Samples one token from logits: temperature, nucleus (top-p), one uniform number per row.

The vocabulary may be sharded and is never gathered. Ids are found by sums over the vocabulary; on a
mesh these are partial sums and an all-reduce of one number, or one block, per row.

V is the vocabulary, N its blocks of I ids.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 128  # ids of a block; a TPU would pad narrower arrays to 128


def sample_token(
    logits: Float[Array, "*B V"],
    u: Float[Array, "*B"],
    *,
    temperature: float,
    top_p: float,
    vocab_shards: int = 1,
) -> tuple[Int[Array, "*B"], Float[Array, "*B"], Float[Array, "*B"] | None]:
    """One token id per row of float32 logits, and its log-probabilities in nats.

    Args:
        u: uniform in [0, 1); determines the sample.
        temperature: 0 takes the most likely token. At most 100: the error of the log-probability
            grows with it.
        top_p: keeps the smallest set of most likely tokens with at least this probability.
        vocab_shards: number of shards of the vocabulary axis.

    Returns:
        the ids, log softmax(logits) at them, and the log-probability of having drawn them, at this
        temperature and renormalised over the nucleus: None if both are 1, where the two are equal;
        0 at temperature 0.
    """
    top = logits.max(-1, keepdims=True)
    if temperature == 0:
        logp = -jnp.log(jnp.exp(logits - top).sum(-1))
        return logits.argmax(-1).astype(jnp.int32), logp, jnp.zeros_like(logp)
    # A device takes what is below the least normal float32 for 0.
    least = float(jnp.finfo(jnp.float32).tiny)
    weights = jnp.exp((logits - top) / max(temperature, least))
    kept = nucleus(weights, top_p) if top_p < 1 else weights
    token, weight, total = _invert(kept, u, vocab_shards)
    drawn_logp = jnp.log(weight) - jnp.log(total)
    if is_drawn_by_softmax(temperature, top_p):
        return token, drawn_logp, None
    total = jnp.exp(logits - top).sum(-1)
    return token, temperature * jnp.log(weight) - jnp.log(total), drawn_logp


def is_drawn_by_softmax(temperature: float, top_p: float) -> bool:
    """Whether tokens are drawn with their probability under softmax(logits)."""
    return temperature == 1 and top_p == 1


def nucleus(weights: Float[Array, "*B V"], top_p: float) -> Float[Array, "*B V"]:
    """Keeps the smallest set of largest weights that sum to at least `top_p` of all; the rest is 0.

    Ties with the smallest kept weight are kept. The largest weight must be 1. Non-negative floats
    are ordered like their bits, so bisection over the bits finds the smallest kept weight exactly,
    in 31 sums over the vocabulary. Sorting 152064 ids is slower and needs them on one device.
    """
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    wanted = top_p * weights.sum(-1, keepdims=True)

    def halve(_, bounds):
        reaches, misses = bounds  # weights from `reaches` on suffice, those from `misses` do not
        middle = reaches + (misses - reaches) // 2
        total = jnp.where(bits >= middle, weights, 0.0).sum(-1, keepdims=True)
        is_enough = total >= wanted
        return jnp.where(is_enough, middle, reaches), jnp.where(is_enough, misses, middle)

    top = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)  # the largest weight
    start = jnp.zeros_like(wanted, jnp.int32), jnp.full_like(wanted, top + 1, jnp.int32)
    reaches, _ = jax.lax.fori_loop(0, 31, halve, start)
    least = jax.lax.bitcast_convert_type(jnp.minimum(reaches, top), jnp.float32)
    return jnp.where(weights >= least, weights, 0.0)


def _invert(
    weights: Float[Array, "*B V"], u: Float[Array, "*B"], vocab_shards: int
) -> tuple[Int[Array, "*B"], Float[Array, "*B"], Float[Array, "*B"]]:
    """Inverts the cumulative distribution at u: finds a block of ids, then an id in the block.

    Returns the ids, their weights, and the sums of all weights.

    Gumbel noise needs a random number and two logarithms for each of V ids, a fifth of the decoding
    time on a CPU. No block crosses a shard: each shard is padded to whole blocks.
    """
    *rows, size = weights.shape
    size //= math.gcd(size, vocab_shards)  # ids of a shard
    padding = -size % _BLOCK
    shards = jnp.pad(weights.reshape(*rows, -1, size), [(0, 0)] * (len(rows) + 1) + [(0, padding)])
    blocks = shards.reshape(*rows, -1, _BLOCK)
    sums = blocks.sum(-1)
    # A parallel sum may grow by an ulp over blocks of zeros, of which none must be found.
    upto_block = jnp.where(sums > 0, jnp.cumsum(sums, -1), -jnp.inf)
    total = upto_block.max(-1)
    # A draw is a multiple of 2^-23. At 0 the first id would win whatever its probability.
    u = jnp.maximum(u, 2.0**-24) * total
    block = jnp.argmax(upto_block > u[..., None], -1)[..., None]
    is_block = jnp.arange(sums.shape[-1]) == block
    before = jnp.where(is_block, upto_block - sums, 0.0).sum(-1)
    inside = jax.lax.platform_dependent(block, blocks, tpu=_multiplied, default=_gathered)
    # Rounding may leave u beyond the block's sum. Then take the last id with a non-zero weight.
    upto = jnp.where(inside > 0, jnp.cumsum(inside, -1), -jnp.inf)
    is_beyond = upto > (u - before)[..., None]
    last = jnp.argmax(jnp.where(inside > 0, jnp.arange(_BLOCK), -1), -1)
    place = jnp.where(is_beyond.any(-1), jnp.argmax(is_beyond, -1), last)
    weight = jnp.where(jnp.arange(_BLOCK) == place[..., None], inside, 0.0).sum(-1)
    padded = block[..., 0] * _BLOCK + place
    token = padded - padded // (size + padding) * padding
    return token.astype(jnp.int32), weight, total


def _gathered(block: Int[Array, "*B 1"], blocks: Float[Array, "*B N I"]) -> Float[Array, "*B I"]:
    """One block of each row, of which alone a GPU and a CPU then read the ids."""
    return jnp.take_along_axis(blocks, block[..., None], -2)[..., 0, :]


def _multiplied(block: Int[Array, "*B 1"], blocks: Float[Array, "*B N I"]) -> Float[Array, "*B I"]:
    """One block of each row, by a product; a TPU would copy all blocks for a gather."""
    is_block = (jnp.arange(blocks.shape[-2]) == block).astype(jnp.float32)
    return jnp.einsum("...N,...NI->...I", is_block, blocks, precision="highest")
