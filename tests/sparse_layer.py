"""A small sparse MLP: its part of a configuration, and random weights."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from small_backbones import qwen3_vl_moe

CONFIG = dataclasses.replace(qwen3_vl_moe().text, hidden_size=16, intermediate_size=12)


def make_params(num_experts=CONFIG.num_experts):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    kernels = {
        "gate_up": {"kernel": draw(num_experts, 16, 24)},
        "down": {"kernel": draw(num_experts, 12, 16)},
    }
    return {"router": {"kernel": draw(16, num_experts)}, "experts": kernels}
