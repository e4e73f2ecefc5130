"""A sparse MLP: a router chooses K of E experts for each token, which is computed by them alone.

Probabilities are a softmax over all experts in float32; the K largest are kept and renormalised to
sum 1 (Qwen3-MoE with `norm_topk_prob`). The K copies of every token are sorted by expert and
multiplied in groups: no token is dropped, and no capacity is reserved.

Logical axes of the experts' kernels are "expert" and, for the model width, "expert_embed". A device
computes, with the experts that it holds, the tokens of all devices that hold others.

Letters: E experts, K of them for a token, F their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models import layers
from models.config import TextConfig
from models.grouped import grouped
from models.layers import Axes, Linear, Params, normal

ROUTER = ("embed", None)
UP, DOWN = ("expert", "expert_embed", None), ("expert", None, "expert_embed")


class Kernels(nnx.Module):
    """A kernel of every expert."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int, int], axes: Axes, dtype: Any):
        self.kernel = normal(rngs, shape, axes, dtype, fan_in=shape[1])


class Experts(nnx.Module):
    """E gated MLPs of width F."""

    def __init__(self, rngs: nnx.Rngs, config: TextConfig, dtype: Any):
        E, D, F = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up = Kernels(rngs, (E, D, 2 * F), UP, dtype)
        self.down = Kernels(rngs, (E, F, D), DOWN, dtype)


class SparseMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: TextConfig, dtype: Any):
        D, E = config.hidden_size, config.num_experts
        self.router = Linear(rngs, (D,), (E,), ROUTER, dtype, bias=False)
        self.experts = Experts(rngs, config, dtype)


def sparse_mlp(
    p: Params,
    x: Float[Array, "B ... D"],
    config: TextConfig,
    routes: Int[Array, "B ... K"] | None = None,
) -> tuple[Float[Array, "B ... D"], Int[Array, "B ... K"]]:
    """The weighted sum of each token's experts, down(silu(gate(x)) * up(x)).

    Also returns the router's own choice. `routes` are the experts to use in its place, -1 for none.
    """
    share, chosen, own = route(p["router"], x, config, routes)
    up, down = (
        _with_adapter(p["experts"][name], axes) for name, axes in (("gate_up", UP), ("down", DOWN))
    )
    arrays, axes = zip(*up, *down, strict=True)
    return layers.over_experts(_computed, axes)((x, share, chosen), arrays), own


def _with_adapter(p: Params, axes: Axes) -> list[tuple[Array, Axes]]:
    """The kernels, with the A and the scaled B of an adapter (`models.lora`), and their axes."""
    parts = [(p["kernel"], axes)]
    if "lora_a" in p:
        b = p["lora_scale"].astype(p["lora_b"].dtype) * p["lora_b"]
        parts += [(p["lora_a"], (*axes[:2], None)), (b, (axes[0], None, axes[2]))]
    return parts


def route(
    router: Params,
    x: Float[Array, "B ... D"],
    config: TextConfig,
    routes: Int[Array, "B ... K"] | None = None,
) -> tuple[Float[Array, "B ... K"], Int[Array, "B ... K"], Int[Array, "B ... K"]]:
    """Shares (float32, sum 1) and indices of the K experts of each token, and its own choice.

    The own choice is by decreasing share. `routes` replace it, not the probabilities that the
    shares are made of; tokens with -1 keep their own.
    """
    logits = layers.linear(router, x, ROUTER).astype(jnp.float32)
    probabilities = jax.nn.softmax(logits)
    share, own = jax.lax.top_k(probabilities, config.num_experts_per_token)
    chosen = own
    if routes is not None:
        chosen = jnp.where(routes >= 0, routes, own)
        share = jnp.take_along_axis(probabilities, chosen, axis=-1)
    return share / share.sum(-1, keepdims=True), chosen, own


def _computed(
    tokens: tuple[Array, Array, Array], experts: Sequence[Array], first: int | Array
) -> Array:
    """What experts first, first + 1, ... add to the tokens' output; 0 for tokens of other experts.

    Args:
        tokens: x [B, ..., D], and share and chosen [B, ..., K] of `route`.
        experts: gate_up [E, D, 2F] and down [E, F, D], cast to the dtype of x, or each of them
            followed by the A and the scaled B of its adapter.
    """
    x, share, chosen = tokens
    gate_up, down = experts[: len(experts) // 2], experts[len(experts) // 2 :]
    (E, D), K = gate_up[0].shape[:2], chosen.shape[-1]
    expert = (chosen - first).reshape(-1)
    is_ours = (expert >= 0) & (expert < E)
    expert = jnp.where(is_ours, expert, E)  # copies for other experts come last
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=E + 1)[:E].astype(jnp.int32)
    copies = jnp.repeat(x.reshape(-1, D), K, axis=0)
    copies = copies.at[order].get(unique_indices=True)
    gate, up = jnp.split(_adapted(copies, gate_up, sizes), 2, axis=-1)
    y = _adapted(jax.nn.silu(gate) * up, down, sizes)
    y = y.at[jnp.argsort(order)].get(unique_indices=True)
    # `grouped` leaves what is not ours undefined: a NaN there must not be multiplied.
    y = jnp.where(is_ours[:, None], y, 0).astype(jnp.float32) * share.reshape(-1, 1)
    return y.reshape(-1, K, D).sum(1).astype(x.dtype).reshape(x.shape)


def _adapted(rows: Array, kernels: Sequence[Array], sizes: Array) -> Array:
    """Grouped products with kernels, plus those with A and then B where there is an adapter."""
    kernel, *adapter = kernels
    y = grouped(rows, kernel, sizes)
    if not adapter:
        return y
    a, b = adapter
    return y + grouped(grouped(rows, a, sizes), b, sizes)
