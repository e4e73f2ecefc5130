"""AdamW behind a gradient-norm clip, with a warm-up.

As in the method's published code (torch's AdamW over one parameter group), weight decay applies
to every trained parameter, biases and norm scales included, and is scaled by the learning rate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SCHEDULES = ("constant", "cosine")


def make_schedule(
    *, learning_rate: float, warmup_steps: int, num_steps: int, schedule: str
) -> optax.Schedule:
    """The learning rate of each update, for the optimizer and for the log.

    Update n (from 0) has lr·(n+1)/warmup_steps while warming up, so that the first one moves,
    and after it lr, or for "cosine" lr·(1 + cos(π·(n - warmup)/(num_steps - warmup)))/2.

    Args:
        learning_rate: its peak.
        warmup_steps: optimizer updates until the peak.
        num_steps: optimizer updates of the whole stage.
        schedule: "constant" or "cosine".

    Returns:
        Update index, an int on the host or an array on the device, to learning rate.

    Raises:
        ValueError: an unknown schedule or a warm-up that the stage does not hold.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
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
    learning_rate_at: optax.Schedule,
    *,
    weight_decay: float,
    max_grad_norm: float,
    trainable_mask: Any = None,
) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW (0.9, 0.999, ε 1e-8).

    Args:
        learning_rate_at: see `make_schedule`.
        weight_decay: decoupled, per update: lr·weight_decay of the parameter.
        max_grad_norm: of the gradient over all trained parameters; infinity never clips.
        trainable_mask: bools over the parameters, or over the top of their tree
            (`{"vision": False, "text": True}`). A frozen parameter gets a zero update, has no
            optimizer state and does not count in the norm. None trains all.
    """
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive, not {max_grad_norm}; inf never clips")
    optimizer = optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(learning_rate_at, b1=0.9, b2=0.999, eps=1e-8, weight_decay=weight_decay),
    )
    if trainable_mask is None:
        return optimizer
    labels = jax.tree.map(lambda train: "trained" if train else "frozen", trainable_mask)
    return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)
