"""Attention over full rows: training, prefill, vision tower. For decoding see `cached`.

`attend` serves packed rows of token trees and the images of a vision tower. Only the mask differs,
see `models.attention.mask`. Scores and softmax are float32. Memory is O(S), and time is
proportional to the number of unmasked block pairs. Rows of at most `AttentionImpl.dense_tokens`
tokens have nothing to skip and use dense attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from models.attention import kernels
from models.attention.blocks import MASKED
from models.attention.mask import AttentionImpl, BlockMask, block_mask
from models.layers import ATTENDED


def attend(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: BlockMask,
) -> Float[Array, "B S K G H"]:
    """softmax(q·k / √H)·v of every query over the keys it attends to.

    Args:
        q, k, v: rotated queries and keys, and values, of full rows.
        mask: the mask of these rows, from `block_mask`; it also selects the implementation.
    """
    if mask.last.shape != q.shape[:2]:
        raise ValueError(
            f"the mask of rows {mask.last.shape} must match q {q.shape}; build it anew"
        )
    if mask.blocks is None:
        return _attend_dense(q, k, v, mask)
    head_axes, copies = _split_heads(q.shape[2], q.shape[3], mask.impl)
    if copies == 1:
        return _attend_blocks(q, k, v, mask, head_axes)
    # Repeat kv heads, so that every device has the kv head of each of its query heads.
    k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
    spread = q.reshape(*k.shape[:3], -1, q.shape[-1])
    out = _attend_blocks(spread, k, v, mask, head_axes)
    return out.reshape(q.shape)  # pyright: ignore[reportAttributeAccessIssue]  # as in `linear`


def _attend_dense(q, k, v, mask: BlockMask):
    """Dense masked attention; under a mesh the compiler shards it.

    Both matmuls have leading batch axes and contract adjacent axes; XLA:CPU is several times slower
    otherwise.
    """
    B, S, K, G, H = q.shape
    tokens = jnp.arange(S)[:, None]
    is_seen = (mask.first[:, None] <= tokens) & (tokens <= mask.last[:, None])  # [B, query, key]
    rows = q.swapaxes(1, 2).reshape(B, K, S * G, H)
    scores = H**-0.5 * matmul("BKTH,BKHS->BKTS", rows, k.transpose(0, 2, 3, 1))
    scores = jnp.where(jnp.repeat(is_seen, G, axis=1)[:, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = matmul("BKTS,BKSH->BKTH", weights, v.swapaxes(1, 2)).astype(q.dtype)
    return out.reshape(B, K, S, G, H).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_blocks(q, k, v, mask: BlockMask, head_axes: tuple[str, ...]):
    return _attend_blocks_fwd(q, k, v, mask, head_axes)[0]


def _attend_blocks_fwd(q, k, v, mask, head_axes):
    attended = _sharded(kernels.forward, mask, head_axes, "hhhm", "hl")(q, k, v, mask)
    out, lse = checkpoint_name(attended, ATTENDED)
    return out, (q, k, v, mask, out, lse)


def _attend_blocks_bwd(head_axes, saved, g):
    mask = saved[3]
    backward = _sharded(kernels.backward, mask, head_axes, "hhhmhlh", "hhh")
    return *backward(*saved, g), None


_attend_blocks.defvjp(_attend_blocks_fwd, _attend_blocks_bwd)


def _sharded(
    function: Callable, mask: BlockMask, head_axes: tuple[str, ...], inputs: str, outputs: str
) -> Callable:
    """`function` under `shard_map`, with rows and heads sharded.

    The custom VJP calls this for the backward pass too. Differentiating through `shard_map` would
    sum the gradients of replicated inputs, which every device already has in full.

    Args:
        inputs, outputs: "h" for [B, S, heads, ...], "l" for log-sum-exps, "m" for the mask.
    """
    if mask.impl.mesh is None:
        return function
    rows = mask.impl.batch_axes
    specs = {
        "h": P(rows, None, head_axes),
        "l": P(head_axes, None, rows),
        "m": jax.tree.map(lambda a: P(rows), mask),
    }
    return jax.shard_map(
        function,
        mesh=mask.impl.mesh,
        in_specs=tuple(specs[kind] for kind in inputs),
        out_specs=tuple(specs[kind] for kind in outputs),
        check_vma=False,
    )


def _split_heads(num_kv_heads: int, group: int, impl: AttentionImpl) -> tuple[tuple[str, ...], int]:
    """The mesh axes that shard the heads, and the copies of each kv head that this needs."""
    if impl.mesh is None:
        return (), 1
    for num_axes in range(len(impl.head_axes), 0, -1):
        axes = impl.head_axes[:num_axes]
        parts = math.prod(impl.mesh.shape[axis] for axis in axes)
        copies = parts // math.gcd(parts, num_kv_heads)
        if group % copies == 0:
            return axes, copies
    return (), 1


def largest_difference(
    first: Int[Array, "B S"] | None,
    last: Int[Array, "B S"],
    heads: tuple[int, int, int],
    impl: AttentionImpl,
    dtype=jnp.bfloat16,
) -> Float[Array, ""]:
    """Largest difference of `impl` from "xla" on random queries, keys and values; jit it.

    Args:
        first, last: as in `block_mask`.
        heads: kv heads, query heads per kv head, and head dim.
        impl: the implementation compared with "xla" on the same mesh.
        dtype: of q, k and v.

    Returns:
        The maximum over the output and the gradients of q, k and v of the largest difference
        relative to the largest entry: about 1e-2 in bfloat16, 1e-5 in float32 at full matmul
        precision.
    """
    K, G, H = heads
    keys = jax.random.split(jax.random.key(0), 4)
    q, g = (jax.random.normal(key, (*last.shape, K, G, H), dtype) for key in keys[:2])
    k, v = (jax.random.normal(key, (*last.shape, K, H), dtype) for key in keys[2:])

    def results(impl):
        mask = block_mask(first, last, G, impl)
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
        return [a.astype(jnp.float32) for a in (out, *pull_back(g))]

    xla = AttentionImpl("xla", impl.mesh, impl.batch_axes, impl.head_axes)
    pairs = zip(results(impl), results(xla), strict=True)
    return jnp.max(jnp.stack([jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs]))


def matmul(equation: str, a: Array, b: Array) -> Array:
    """The einsum, accumulated in float32."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
