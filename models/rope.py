"""Rotary position embeddings: one, two or three position components share the head's frequencies.

Each frequency of a head turns with one component of the position. Which one is data: text M-RoPE
gives consecutive sections of the frequencies to time, height and width, or lets height and width
take every third one each; the vision tower gives the first half to rows and the second to columns.
Angles and the rotation itself are float32.
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
    """Which of time (0), height (1) and width (2) each frequency turns with.

    Sections (3, 2, 2) are 0 0 0 1 1 2 2, and interleaved 0 1 2 0 1 2 0.
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
    """Turns the pairs (x_i, x_{i + H/2}) by the angles; the same for all heads."""
    cos, sin = (a[..., None, :] for a in rotary)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
