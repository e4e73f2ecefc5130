"""Attention within the segments of a row: causal for text, in both directions for images.

A row holds several examples or images one after another, and a token sees its own segment alone.
Queries are worked through in chunks, each against a window of keys: from the first that any token
of the chunk sees to the last, in any row of the batch. So what costs time is how far segments
reach, not how long a row is, and the scores that are held at a time fit into a processor's cache.
Windows are found when the program runs, while shapes are static: a chunk takes one of a few
branches, each for one length. Segments may stand in any order; where they are contiguous and
ascending, windows are short. Scores and softmax are float32, and every product puts its batch axes
first, its contraction last and first: a CPU multiplies that several times faster than any other.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # a score; finite, so that a token without any visible key stays finite

_CHUNK = 128  # query tokens whose scores are held at a time
_WHOLE = 512  # tokens up to which a row seen in both directions is not cut: it has little to skip


def attend_segments(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segments: Int[Array, "B S"],
    *,
    is_causal: bool,
) -> Float[Array, "B S K G H"]:
    """Attention among tokens of equal segment.

    Args:
        q, k, v: rotated queries and keys, and values.
        segments: -1 is padding, whose output is finite and means nothing.
        is_causal: tokens see their segment up to themselves, else all of it.
    """
    num_tokens = q.shape[1]
    is_short = num_tokens <= (_CHUNK if is_causal else _WHOLE)
    num_chunks = 1 if is_short else -(-num_tokens // _CHUNK)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens
    if padding:
        q, k, v = (jnp.pad(a, [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2)) for a in (q, k, v))
        segments = jnp.pad(segments, ((0, 0), (0, padding)), constant_values=-1)
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
    if is_short:
        return _attend(*_cut(q, k, v, segments, 0, 0, size, size, is_causal))
    return _attend_chunks(q, k, v, segments, size, is_causal)[:, :num_tokens]


def same_segment(queries: Int[Array, "... T"], keys: Int[Array, "... S"]) -> Bool[Array, "... T S"]:
    """Which of the keys each query shares its segment with."""
    return queries[..., :, None] == keys[..., None, :]


def matmul(equation: str, a: Array, b: Array) -> Array:
    """The einsum, summed in float32."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _attend(q, k, v, is_visible):
    """Queries [B, T, K, G, H] against keys [B, K, H, S] and values [B, K, S, H]."""
    B, T, K, G, H = q.shape
    rows = q.swapaxes(1, 2).reshape(B, K, T * G, H)
    scores = H**-0.5 * matmul("BKTH,BKHS->BKTS", rows, k)
    scores = jnp.where(jnp.repeat(is_visible, G, axis=1)[:, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = matmul("BKTS,BKSH->BKTH", weights, v).astype(q.dtype)
    return out.reshape(B, K, T, G, H).swapaxes(1, 2)


def _cut(q, k, v, segments, start, first, size: int, length: int, is_causal: bool):
    """`size` queries from `start` on, `length` keys and values from `first` on, who sees whom."""
    cut = jax.lax.dynamic_slice_in_dim
    is_visible = same_segment(cut(segments, start, size, 1), cut(segments, first, length, 1))
    if is_causal:
        is_visible &= first + jnp.arange(length) <= start + jnp.arange(size)[:, None]
    return cut(q, start, size, 1), cut(k, first, length, 3), cut(v, first, length, 2), is_visible


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend_chunks(q, k, v, segments, size: int, is_causal: bool):
    """`attend_segments` in chunks of `size` queries; keys and values are turned.

    The backward pass computes a chunk's scores again, in a loop of its own: differentiated, the
    branches would keep what each of them needs, taken or not.
    """
    return _attend_chunks_fwd(q, k, v, segments, size, is_causal)[0]


def _attend_chunks_fwd(q, k, v, segments, size, is_causal):
    windows = _key_windows(segments, size, is_causal)

    def chunk(start, first, length):
        return _attend(*_cut(q, k, v, segments, start, first, size, length, is_causal))

    lengths = _window_lengths(q.shape[1], size)
    branches = [functools.partial(chunk, length=length) for length in lengths]
    outs = jax.lax.map(lambda window: jax.lax.switch(window[2], branches, *window[:2]), windows)
    return jnp.moveaxis(outs, 0, 1).reshape(q.shape), (q, k, v, segments, windows)


def _attend_chunks_bwd(size, is_causal, saved, g):
    q, k, v, segments, windows = saved

    def add(total, part, first, axis):
        old = jax.lax.dynamic_slice_in_dim(total, first, part.shape[axis], axis)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, first, axis)

    def chunk(dk, dv, start, first, length):
        *qkv, is_visible = _cut(q, k, v, segments, start, first, size, length, is_causal)
        _, pull_back = jax.vjp(lambda *qkv: _attend(*qkv, is_visible), *qkv)
        own = pull_back(jax.lax.dynamic_slice_in_dim(g, start, size, 1))
        return (add(dk, own[1], first, 3), add(dv, own[2], first, 2)), own[0]

    lengths = _window_lengths(q.shape[1], size)
    branches = [functools.partial(chunk, length=length) for length in lengths]

    def step(totals, window):
        return jax.lax.switch(window[2], branches, *totals, *window[:2])

    totals = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(step, totals, windows)
    dq = jnp.moveaxis(dq, 0, 1).reshape(q.shape)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_attend_chunks.defvjp(_attend_chunks_fwd, _attend_chunks_bwd)


def _window_lengths(num_tokens: int, size: int) -> list[int]:
    """The lengths of windows, each a half or a third more than the last, up to the whole row."""
    lengths = [size]
    while lengths[-1] < num_tokens:
        i = len(lengths)
        lengths.append(min(2 ** (i // 2) * size * (2 + i % 2) // 2, num_tokens))
    return lengths


def _key_windows(segments: Int[Array, "B S"], size: int, is_causal: bool):
    """Each chunk's first query, its window's first key and which of the lengths the window has."""
    num_tokens = segments.shape[1]
    tokens, starts = jnp.arange(num_tokens), jnp.arange(0, num_tokens, size)
    own = segments.reshape(len(segments), -1, size)
    lowest = jnp.where(own < 0, jnp.iinfo(own.dtype).max, own).min(-1, keepdims=True)
    highest = own.max(-1, keepdims=True)
    is_needed = (lowest <= segments[:, None]) & (segments[:, None] <= highest)  # [B, chunks, S]
    if is_causal:
        is_needed &= tokens < starts[:, None] + size
    firsts = jnp.where(is_needed, tokens, num_tokens).min((0, 2))
    stops = jnp.where(is_needed, tokens + 1, 0).max((0, 2))
    lengths = jnp.array(_window_lengths(num_tokens, size))
    kinds = jnp.searchsorted(lengths, stops - firsts)
    return starts, jnp.minimum(firsts, num_tokens - lengths[kinds]), kinds
