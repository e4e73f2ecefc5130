"""Measured peak rates of a device: bfloat16 matmuls, and copies in device memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from care_jax.devices.flops import PEAK_FLOPS

REPEATS = 20  # inside one program, to exclude dispatch time


def measure(*, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """A row with the matmul rate, one with the copy bandwidth, of the first device."""
    device = jax.local_devices()[0]
    rate = matmul_rate(device, 256 if is_small else 8192)
    yield {"matmul_rate": rate, "peak_flops": PEAK_FLOPS.get(device.device_kind)}
    yield {"copy_bandwidth": copy_bandwidth(device, 1 if is_small else 1024)}


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
