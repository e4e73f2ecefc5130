"""AdamW with a global-norm clip and warm-up; trainable parameters; rounding to storage dtypes.

As in the method's published code (torch's AdamW over one parameter group), weight decay applies
to every trained parameter, biases and norm scales included, and is scaled by the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PRNGKeyArray

from models import layers, lora
from models.backbone import Params

SCHEDULES = ("constant", "cosine")


def make_schedule(
    *, learning_rate: float, warmup_steps: int, num_steps: int, schedule: str
) -> optax.Schedule:
    """The learning rate of each update, for the optimizer and for the log.

    Update n (from 0) has lr·(n+1)/warmup_steps during warm-up, so that the first is not 0.
    After it: lr, or for "cosine" lr·(1 + cos(π·(n - warmup)/(num_steps - warmup)))/2.

    n is an int on the host or an array on a device; `warmup_steps` and `num_steps` count updates.

    Raises:
        ValueError: unknown schedule, or a warm-up that is not shorter than the stage.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(
            f"warmup_steps {warmup_steps} must be from 0 to below the {num_steps} updates of the "
            "stage; set warmup_steps lower or num_steps higher"
        )

    def learning_rate_at(step):
        xp = jnp if isinstance(step, jax.Array) else np
        rate = learning_rate * xp.minimum(1.0, (step + 1) / max(warmup_steps, 1))
        if schedule == "cosine":
            progress = xp.clip((step - warmup_steps) / (num_steps - warmup_steps), 0.0, 1.0)
            rate = rate * 0.5 * (1.0 + xp.cos(xp.pi * progress))
        return rate

    return learning_rate_at


def make_optimizer(
    learning_rate_at: optax.Schedule, *, weight_decay: float, max_grad_norm: float
) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW (β₁ 0.9, β₂ 0.999, ε 1e-8).

    The decay is decoupled: each update subtracts lr·weight_decay times the parameter. The norm is
    that of the gradient over all trained parameters; infinity never clips.
    """
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive, got {max_grad_norm}; inf never clips")
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(learning_rate_at, b1=0.9, b2=0.999, eps=1e-8, weight_decay=weight_decay),
    )


def partition(params: Params, *, freeze_vision: bool = False) -> tuple[Params, Params]:
    """(trained, frozen) parameters. Frozen ones have no gradient, optimizer state or part in norms.

    With adapters (`models.lora`) only the adapters are trained. Otherwise `freeze_vision` freezes
    the vision tower with its merger.
    """
    flat = flatten_dict(params)
    has_adapters = any(map(lora.is_adapter, flat))

    def is_trained(path):
        if has_adapters:
            return lora.is_adapter(path)
        return not (freeze_vision and path[0] == "vision")

    parts = {True: {}, False: {}}
    for path, array in flat.items():
        parts[is_trained(path)][path] = array
    return unflatten_dict(parts[True]), unflatten_dict(parts[False])


def combine(trained: Params, frozen: Params) -> Params:
    """Merges the two results of `partition`."""
    return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen))


def differentiable(params: Params) -> tuple[Params, Callable[[Params], Params]]:
    """Arrays whose gradients, in float32, are those of the parameters; and (arrays) -> parameters.

    A bfloat16 parameter is copied to float32, 4 bytes each. A kernel of `layers.linear`, which the
    largest parameters are, has zeros in place of the copy, which the compiler need not store.
    """
    flat: dict[Any, Any] = flatten_dict(params)
    kept = {
        path: x for path, x in flat.items() if x.dtype == jnp.bfloat16 and layers.is_linear(path)
    }

    def with_gradients(arrays: Params) -> Params:
        arrays = flatten_dict(arrays)
        gradients = {(*path[:-1], layers.GRADIENT): arrays[path] for path in kept}
        return unflatten_dict(arrays | kept | gradients)

    zeros = {path: jnp.zeros(x.shape, jnp.float32) for path, x in kept.items()}
    return unflatten_dict(widen(flat | zeros)), with_gradients


def round_like(new: Any, old: Any, rng: PRNGKeyArray) -> Any:
    """Casts `new` to the dtypes of `old`, float32 to bfloat16 by stochastic rounding.

    Rounding to nearest would lose every change below 2^-9 of a value: nearly every change of a
    weight, and of a second moment (1 - β₂ = 0.001). Rounding away from zero with a probability
    equal to the dropped fraction is unbiased.
    """
    leaves, structure = jax.tree.flatten(new)

    def rounded(number, new, old):
        if old.dtype != jnp.bfloat16 or new.dtype != jnp.float32:
            return new.astype(old.dtype)
        bits = jax.lax.bitcast_convert_type(new, jnp.uint32)
        noise = jax.random.bits(jax.random.fold_in(rng, number), new.shape, jnp.uint16)
        bits = (bits + noise) & jnp.uint32(0xFFFF0000)
        drawn = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
        # Infinities and NaN, which the noise would corrupt, are cast.
        return jnp.where(jnp.isfinite(new), drawn, new.astype(jnp.bfloat16))

    pairs = enumerate(zip(leaves, jax.tree.leaves(old), strict=True))
    return jax.tree.unflatten(structure, [rounded(number, *pair) for number, pair in pairs])


def widen(tree: Any) -> Any:
    """Casts bfloat16 to float32, the dtype updates are computed in; other dtypes are unchanged."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)
