"""Metrics of a sparse decoder's routers.

Letters: B rows, S tokens of a row, L layers, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LOAD = "experts/load"  # [L, E], replaced by the metrics of `of_load`


def load(
    chosen: Int[Array, "B S L K"], is_counted: Bool[Array, "B S"], num_experts: int
) -> tuple[Float[Array, "L E"], Float[Array, "L 1"]]:
    """Tokens per expert and, as the denominator, their mean over the experts."""
    tokens = jnp.where(is_counted[..., None, None], chosen, -1)
    counts = (tokens[..., None] == jnp.arange(num_experts)).sum((0, 1, 3)).astype(jnp.float32)
    return counts, counts.mean(-1, keepdims=True)


def of_load(load: Float[Array, "L E"]) -> dict[str, Float[Array, ""]]:
    """The load of the busiest expert and the share of experts without a token, means of layers."""
    return {"experts/busiest": load.max(-1).mean(), "experts/idle": (load == 0).mean()}


def differing(
    chosen: Int[Array, "B S L K"],
    routes: Int[Array, "B S L K"],
    is_fresh: Bool[Array, "B S"] | None = None,
) -> dict[str, tuple[Float[Array, ""], Float[Array, ""]]]:
    """How often sampler (`routes`) and trainer (`chosen`) route a token to different experts.

    The share of pairs of token and layer, and of tokens with such a layer, among those with a
    route, as numerators and denominators. The order of a token's experts does not matter. Tokens
    of `TrainBatch.is_fresh` alone count, since older weights may have routed the others.
    """
    has_route = routes[..., 0] >= 0
    if is_fresh is not None:
        has_route &= is_fresh[..., None]
    is_other = has_route & (jnp.sort(chosen, -1) != jnp.sort(routes, -1)).any(-1)
    pairs = {
        "routes/differ": (is_other, has_route),
        "routes/differ_anywhere": (is_other.any(-1), has_route.any(-1)),
    }
    return {
        name: (some.sum().astype(jnp.float32), all.sum().astype(jnp.float32))
        for name, (some, all) in pairs.items()
    }
