"""Attention over one mask description: a prompt shared by rows that see it and themselves.

A row of tokens is `[prompt | branch 0 | branch 1 | ...]`. The prompt is causal; each branch sees
the prompt and, causally, itself. No score between two branches is ever computed, and the prompt's
keys are never repeated: the branches (and the query heads of a group) are extra query rows of one
matrix product per (prompt, kv head). Decoding is the same computation, with the branches' keys in
a cache; the prompt, or a row without branches, is `models.segments`' work. Scores and softmax are
float32. A query that sees nothing (an unused slot) stays finite.

On a TPU whole rows go through its splash kernel instead, which holds no score outside a block and
skips the blocks that the tree leaves empty; padding and segments are masked inside the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from models.segments import MASKED, attend_segments, matmul, same_segment

# Query tokens, over all branches, whose scores are held at a time.
_BRANCH_CHUNK = 1024
# Tokens per side of a splash block, by preference; the last is the least that the kernel takes.
_BLOCKS = (512, 256, 128)


@dataclasses.dataclass(frozen=True)
class Tree:
    """Layout of a row: `prefix` prompt tokens, then `branches` responses of `length` tokens.

    Tree(S, 0, 0) is a plain causal row of S tokens.
    """

    prefix: int
    branches: int
    length: int

    @property
    def size(self) -> int:
        """Tokens in the row."""
        return self.prefix + self.branches * self.length


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What computes attention over whole rows.

    Attributes:
        name: "xla", products of the compiler's own, or "splash", the TPU's kernel.
        mesh: the devices that rows and heads are split over, which the compiler cannot do to a
            kernel; None for one device. It means nothing to "xla".
        batch_axes: mesh axes that split the rows.
        head_axes: mesh axes that split the heads, as many of them, from the first on, as divide.
        interpret: runs the kernel step by step on any device, for tests.
    """

    name: str
    mesh: Mesh | None = None
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()
    interpret: bool = False


XLA = Kernel("xla")


def attend_tree(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segments: Int[Array, "B S"],
    tree: Tree,
    kernel: Kernel = XLA,
) -> Float[Array, "B S K G H"]:
    """Attention of one row per prompt under the tree mask.

    Args:
        q, k, v: rotated queries and keys, and values, of the whole row.
        segments: tokens see only tokens of their own segment; -1 is padding, which sees itself.
        tree: the layout; its size is S.
        kernel: what computes it.
    """
    if q.shape[1] != tree.size:
        raise ValueError(f"{tree} has {tree.size} tokens, got rows of {q.shape[1]}; match them")
    if kernel.name == "splash":
        return _attend_splash(q, k, v, segments, tree, kernel)
    start = tree.prefix
    out = attend_segments(*(a[:, :start] for a in (q, k, v, segments)), is_causal=True)
    if not tree.branches:
        return out
    prefix = k[:, :start], v[:, :start], segments[:, :start]
    rows = (q.shape[0], tree.branches, tree.length)
    own = (a[:, start:].reshape(rows + a.shape[2:]) for a in (q, k, v, segments))
    branches = _attend_branches(*own, prefix)
    return jnp.concatenate([out, branches.reshape(q[:, start:].shape)], axis=1)


def _attend_splash(q, k, v, segments, tree: Tree, kernel: Kernel):
    """`attend_tree` by the TPU's block-sparse kernel, on each device for its rows and heads."""
    size, num_kv_heads, group = q.shape[1:4]
    # The largest block that pads a row by an eighth at most.
    block = next((b for b in _BLOCKS if -size % b <= size // 8), _BLOCKS[-1])
    padding = -size % block
    scale = q.shape[-1] ** -0.5
    q = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(*q.shape[:2], -1, q.shape[-1])
    head_axes, copies = _split_heads(num_kv_heads, group, kernel)
    if copies > 1:  # a kv head for each of the devices that hold its query heads
        k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))

    def heads_first(a):
        return jnp.pad(a, ((0, 0), (0, padding), (0, 0), (0, 0))).swapaxes(1, 2)

    def attend(q, k, v, segments):
        splash = _splash_kernel(tree, size + padding, q.shape[1], block, kernel.interpret)
        ids = splash_attention_kernel.SegmentIds(segments, segments)
        return jax.vmap(splash)(q, k, v, ids)

    if kernel.mesh is not None:
        rows, heads = P(kernel.batch_axes), P(kernel.batch_axes, head_axes)
        attend = jax.shard_map(
            attend,
            mesh=kernel.mesh,
            in_specs=(heads, heads, heads, rows),
            out_specs=heads,
            check_vma=False,
        )
    segments = jnp.pad(segments, ((0, 0), (0, padding)), constant_values=-1)
    out = attend(heads_first(q), heads_first(k), heads_first(v), segments)
    out = out.swapaxes(1, 2)[:, :size]
    return out.reshape(*out.shape[:2], num_kv_heads, group, out.shape[-1])


def _split_heads(num_kv_heads: int, group: int, kernel: Kernel) -> tuple[tuple[str, ...], int]:
    """The mesh axes that heads are split over, and how many copies of a kv head that takes."""
    for num_axes in range(len(kernel.head_axes), 0, -1):
        axes = kernel.head_axes[:num_axes]
        parts = math.prod(kernel.mesh.shape[axis] for axis in axes)
        copies = parts // math.gcd(parts, num_kv_heads)
        if group % copies == 0:
            return axes, copies
    return (), 1


@dataclasses.dataclass(frozen=True)
class _TreeMask(splash_attention_mask.Mask):
    """The tree mask of a row padded to `padded` tokens, worked out block by block."""

    tree: Tree
    padded: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.padded, self.padded

    def __getitem__(self, slices: tuple[slice, slice]) -> np.ndarray:
        queries, keys = (np.arange(self.padded)[s] for s in slices)
        queries, keys = queries[:, None], keys[None]
        is_causal = keys <= queries
        if not self.tree.branches:
            return is_causal
        branch_of_query, branch_of_key = (
            (tokens - self.tree.prefix) // self.tree.length for tokens in (queries, keys)
        )
        return is_causal & ((keys < self.tree.prefix) | (branch_of_key == branch_of_query))


@functools.lru_cache
def _splash_kernel(tree: Tree, padded: int, num_heads: int, block: int, interpret: bool):
    """The kernel of one layout: (q [N, S, H], k, v [K, S, H], segments) -> [N, S, H].

    Gradients of q and of k, v are two kernels: the fused one holds as many copies of q's gradient
    as there are blocks of keys.
    """
    sizes = dict.fromkeys(
        (
            "block_q",
            "block_kv",
            "block_kv_compute",
            "block_q_dkv",
            "block_kv_dkv",
            "block_kv_dkv_compute",
            "block_q_dq",
            "block_kv_dq",
        ),
        block,
    )
    mask = splash_attention_mask.MultiHeadMask([_TreeMask(tree, padded)] * num_heads)
    with jax.ensure_compile_time_eval():
        kernel = splash_attention_kernel.make_splash_mha(
            mask,
            block_sizes=splash_attention_kernel.BlockSizes(**sizes),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
    # Kept on the host: the cache outlives any trace and any device.
    return jax.tree.map(np.asarray, kernel)


def _attend_branches(q, k, v, segments, prefix):
    """Branches [B, R, T, ...] see a prefix [B, P, ...] and, causally, themselves.

    Works through the queries in chunks, each against the keys that causality leaves it, and
    recomputes a chunk's scores in the backward pass.
    """
    num_branches, length = q.shape[1:3]
    size = max(_BRANCH_CHUNK // num_branches, 1)

    def chunk(q, k, v, segments, prefix, start, stop):
        is_causal = jnp.arange(stop) <= jnp.arange(start, stop)[:, None]
        is_visible = is_causal & same_segment(segments[:, :, start:stop], segments[:, :, :stop])
        k = k[:, :, :stop].transpose(0, 1, 3, 4, 2)
        v = v[:, :, :stop].swapaxes(2, 3)
        rows = segments[:, :, start:stop].reshape(segments.shape[0], -1)
        is_shared = same_segment(rows, prefix[2]).reshape(*is_visible.shape[:-1], -1)
        shared = (prefix[0].transpose(0, 2, 3, 1), prefix[1].swapaxes(1, 2), is_shared)
        return attend_cached(q[:, :, start:stop], shared, (k, v, is_visible))

    if length > size:
        chunk = jax.checkpoint(chunk, static_argnums=(5, 6))
    starts = range(0, length, size)
    outs = [chunk(q, k, v, segments, prefix, s, min(s + size, length)) for s in starts]
    return jnp.concatenate(outs, axis=2)


def attend_cached(
    q: Float[Array, "B R T K G H"],
    shared: tuple[Array, Array, Array],
    own: tuple[Array, Array, Array],
) -> Float[Array, "B R T K G H"]:
    """One softmax over keys shared by the R rows of a prompt and keys of each row's own.

    Keys come turned and every product puts its batch axes first, its contraction last and first:
    the two forms that a CPU multiplies several times faster than any other.

    Args:
        q: rotated queries.
        shared: keys [B, K, H, P], values [B, K, P, H] and which of them each query sees, bool
            broadcasting to [B, R, T, P].
        own: keys [B, R, K, H, S], values [B, R, K, S, H] and which of them each query sees, bool
            broadcasting to [B, R, T, S].
    """
    scale = q.shape[-1] ** -0.5
    k, v, is_visible = own
    scores = scale * matmul("BRKTGH,BRKHS->BRKTGS", q.transpose(0, 1, 3, 2, 4, 5), k)
    scores = jnp.where(is_visible[:, :, None, :, None], scores, MASKED)
    shared_k, shared_v, is_shared = shared
    shared_scores = scale * matmul("BKRTGH,BKHP->BKRTGP", q.transpose(0, 3, 1, 2, 4, 5), shared_k)
    shared_scores = jnp.where(is_shared[:, None, :, :, None], shared_scores, MASKED)
    top = jnp.maximum(scores.max(-1), shared_scores.max(-1).swapaxes(1, 2))
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top[..., None])
    shared_weights = jnp.exp(shared_scores - top.swapaxes(1, 2)[..., None])
    total = weights.sum(-1) + shared_weights.sum(-1).swapaxes(1, 2)
    out = matmul("BRKTGS,BRKSH->BRKTGH", weights.astype(v.dtype), v)
    shared_out = matmul("BKRTGP,BKPH->BKRTGH", shared_weights.astype(v.dtype), shared_v)
    out = out + shared_out.swapaxes(1, 2)
    return (out / total[..., None]).astype(q.dtype).swapaxes(2, 3)
