"""Measured peak rates of a device: bfloat16 matmuls, and copies in device memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

REPEATS = 20  # inside one program, to exclude dispatch time


def best_seconds(function: Callable[[], jax.Array], repeats: int = 3) -> float:
    """The minimum time of a call, after a first one that compiles."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return min(times)


def matmul_rate(device: jax.Device, size: int = 8192) -> float:
    """FLOPs per second of bfloat16 matmuls of two square matrices of this size."""
    x, kernel = (jax.device_put(jnp.full((size, size), 1e-2, jnp.bfloat16), device) for _ in "ab")

    @jax.jit
    def products(x, kernel):
        return jax.lax.fori_loop(0, REPEATS, lambda _, x: x @ kernel, x)

    return REPEATS * 2 * size**3 / best_seconds(lambda: products(x, kernel))


def copy_bandwidth(device: jax.Device, megabytes: int = 1024) -> float:
    """Bytes per second read and written by a pass over an array of this many MiB."""
    x = jax.device_put(jnp.zeros((megabytes, 2**18), jnp.float32), device)

    @jax.jit
    def passes(x):
        return jax.lax.fori_loop(0, REPEATS, lambda _, x: x + 1, x)

    return REPEATS * 2 * x.nbytes / best_seconds(lambda: passes(x))
