"""One token from logits: temperature, nucleus, and a draw that needs one random number.

The vocabulary may be sharded. Nothing here gathers it: ids are looked for by sums over all of it,
which a mesh computes as partial sums and an all-reduce of one number, or one block, per row.

V is the vocabulary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK = 128  # most ids searched at a time
_FEWEST = 32  # a block of fewer is not worth keeping shards whole
_VOCAB_SHARDS = 4  # that each hold whole blocks


def sample_token(
    logits: Float[Array, "*B V"], u: Float[Array, "*B"], *, temperature: float, top_p: float
) -> Int[Array, "*B"]:
    """One token id per row of logits.

    Args:
        logits: float32.
        u: uniform in [0, 1), what the choice depends on.
        temperature: 0 takes the most likely token.
        top_p: the least set of most likely tokens with at least this probability is kept.
    """
    if temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    weights = _weights(logits / temperature)
    if top_p < 1:
        weights = jnp.where(weights >= _threshold(weights, top_p), weights, 0.0)
    return _invert(weights, u)


def log_probability(logits: Float[Array, "*B V"], token: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """log softmax(logits) at one id per row."""
    is_token = jnp.arange(logits.shape[-1]) == token[..., None]
    return jnp.where(is_token, logits, 0.0).sum(-1) - jax.nn.logsumexp(logits, -1)


def is_nucleus(logits: Float[Array, "*B V"], *, top_p: float) -> Bool[Array, "*B V"]:
    """The least set of most likely tokens whose probability reaches `top_p`; never empty.

    Tokens as likely as its least likely one belong to it.
    """
    weights = _weights(logits)
    return weights >= _threshold(weights, top_p)


def _weights(logits: Array) -> Array:
    """exp(logits), the largest of each row scaled to 1."""
    return jnp.exp(logits - logits.max(-1, keepdims=True))


def _threshold(weights: Float[Array, "*B V"], top_p: float) -> Float[Array, "*B 1"]:
    """The largest weight such that those from it on sum to `top_p` of all.

    Numbers that are not negative are ordered as their bits, so halving the range of bits ends with
    the threshold itself, in as many sums over the vocabulary as a number has bits. Sorting 152064
    ids takes longer, and needs all of them on one device.
    """
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    wanted = top_p * weights.sum(-1, keepdims=True)

    def halve(_, bounds):
        reaches, misses = (
            bounds  # the set from `reaches` on is large enough, that from `misses` not
        )
        middle = reaches + (misses - reaches) // 2
        total = jnp.where(bits >= middle, weights, 0.0).sum(-1, keepdims=True)
        is_enough = total >= wanted
        return jnp.where(is_enough, middle, reaches), jnp.where(is_enough, misses, middle)

    top = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)  # the weight of the most likely
    start = jnp.zeros_like(wanted, jnp.int32), jnp.full_like(wanted, top + 1, jnp.int32)
    reaches, _ = jax.lax.fori_loop(0, 31, halve, start)
    return jax.lax.bitcast_convert_type(jnp.minimum(reaches, top), jnp.float32)


def _invert(weights: Float[Array, "*B V"], u: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The id at the share u of the summed weights: first a block of ids, then one in it.

    The usual Gumbel noise takes a random number and two logarithms for each of V ids, which on a
    CPU is a fifth of the time of decoding. Blocks divide the shards of the vocabulary.
    """
    size = math.gcd(weights.shape[-1] // _VOCAB_SHARDS, _BLOCK)
    size = size if size >= _FEWEST else _BLOCK
    padding = -weights.shape[-1] % size
    weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, padding)])
    blocks = weights.reshape(*weights.shape[:-1], -1, size)
    sums = blocks.sum(-1)
    upto_block = jnp.cumsum(sums, -1)
    u = u * upto_block[..., -1]
    block = jnp.argmax(upto_block > u[..., None], -1)[..., None]
    is_block = jnp.arange(sums.shape[-1]) == block
    before = jnp.where(is_block, upto_block - sums, 0.0).sum(-1)
    inside = jnp.where(is_block[..., None], blocks, 0.0).sum(-2)
    # Rounding may leave u beyond the block's sum: its last possible id is taken then, never one
    # whose weight is 0.
    upto = jnp.where(inside > 0, jnp.cumsum(inside, -1), -jnp.inf)
    is_beyond = upto > (u - before)[..., None]
    last = jnp.argmax(jnp.where(inside > 0, jnp.arange(size), -1), -1)
    place = jnp.where(is_beyond.any(-1), jnp.argmax(is_beyond, -1), last)
    return (block[..., 0] * size + place).astype(jnp.int32)
