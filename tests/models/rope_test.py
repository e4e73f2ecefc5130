"""Which component of a position turns which frequency, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import rotate, text_rotary, vision_rotary


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_sections_give_consecutive_frequencies_to_time_height_and_width(config):
    cos, sin = text_rotary(jnp.array([[2, 3, 5]]), config.text)
    frequencies = 10000.0 ** -(np.arange(0, 8, 2) / 8)  # head of 8, sections 1, 1, 2
    angles = np.array([2, 3, 5, 5]) * frequencies
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_height_and_width_take_turns_with_time(config):
    cos, sin = text_rotary(jnp.array([[2, 3, 5]]), config.text)
    frequencies = 10000.0 ** -(np.arange(0, 16, 2) / 16)  # head of 16, sections 4, 2, 2
    angles = np.array([2, 3, 5, 2, 3, 5, 2, 2]) * frequencies
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-6)


def test_vision_halves_turn_with_row_then_column(config):
    cos, _ = vision_rotary(jnp.array([[3, 7]]), config.vision)
    frequencies = 10000.0 ** -(np.arange(0, 8, 2) / 8)  # head of 16, half for each axis
    angles = np.concatenate([3 * frequencies, 7 * frequencies])
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-6)


def test_rotation_turns_pairs_half_a_head_apart():
    x = jnp.array([[[1.0, 0.0, 0.0, 2.0]]])
    angles = jnp.array([[np.pi / 2, np.pi]])
    turned = rotate(x, (jnp.cos(angles), jnp.sin(angles)))
    np.testing.assert_allclose(turned, [[[0.0, 0.0, 1.0, -2.0]]], atol=1e-6)


def test_products_of_rotated_vectors_depend_on_distance_alone(config):
    rng = np.random.default_rng(0)
    q, k = jnp.asarray(rng.normal(size=(2, 1, 1, config.text.head_dim)), jnp.float32)

    def product(query, key):
        at = [text_rotary(jnp.full((1, 3), position), config.text) for position in (query, key)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum()

    np.testing.assert_allclose(product(9, 4), product(105, 100), atol=1e-5)
