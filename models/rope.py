"""Rotary position embeddings with two or three position components per head.

Each frequency of a head rotates with one component of the position. Text M-RoPE is sectioned or
interleaved. Sectioned, consecutive frequencies rotate with time, height and width. Interleaved,
height and width take every third frequency each, up to their section sizes, and time the rest. In
the vision tower the first half rotates with rows and the second half with columns. Angles and
rotations are computed in float32.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import VISION_ROPE_THETA, TextConfig, VisionConfig


def _frequencies(dim: int, theta: float) -> np.ndarray:
    """θ^(-2i/dim) for i = 0..dim/2-1, in radians per position."""
    return (theta ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)


def _cos_sin(
    positions: Int[Array, "... A"], frequencies: np.ndarray, component: np.ndarray
) -> tuple[Array, Array]:
    angle = positions[..., component].astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def text_rotary(
    positions: Int[Array, "... 3"], config: TextConfig
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Cosine and sine of every frequency of a text head, sectioned or interleaved M-RoPE."""
    frequencies = _frequencies(config.head_dim, config.rope_theta)
    return _cos_sin(positions, frequencies, _mrope_component(config))


def _mrope_component(config: TextConfig) -> np.ndarray:
    """The component of each frequency: time (0), height (1) or width (2).

    Sections (3, 2, 2) give 0 0 0 1 1 2 2, or interleaved 0 1 2 0 1 2 0.
    """
    if not config.mrope_interleaved:
        return np.repeat(np.arange(3), config.mrope_section)
    component = np.zeros(config.head_dim // 2, int)
    for axis in (1, 2):
        component[axis : 3 * config.mrope_section[axis] : 3] = axis
    return component


def vision_rotary(
    coordinates: Int[Array, "... 2"], config: VisionConfig
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Cosine and sine of every frequency of a vision head: rows first, then columns."""
    frequencies = _frequencies(config.head_dim // 2, VISION_ROPE_THETA)
    component = np.repeat(np.arange(2), len(frequencies))
    return _cos_sin(coordinates, np.tile(frequencies, 2), component)


def rotate(
    x: Float[Array, "... heads H"],
    rotary: tuple[Float[Array, "... half"], Float[Array, "... half"]],
) -> Float[Array, "... heads H"]:
    """Rotates the pairs (x_i, x_{i + H/2}) by angles that all heads share."""
    cos, sin = (a[..., None, :] for a in rotary)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
