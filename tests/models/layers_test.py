"""Products, norms and remat; which component of a position turns which frequency, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import output_with

from models.layers import (
    GRADIENT,
    checkpointed,
    linear,
    product,
    rms_norm,
    rotate,
    text_rotary,
    vision_rotary,
)


def operands(num_inputs, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    inputs, outputs = (4, 3)[:num_inputs], (2, 6)[: 3 - num_inputs]
    x = jax.random.normal(keys[0], (5, 7, *inputs), dtype)
    kernel = jax.random.normal(keys[1], (*inputs, *outputs), dtype)
    return x, kernel, jax.random.normal(keys[2], (5, 7, *outputs), dtype)


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_values_and_gradients_are_those_of_a_tensor_product(num_inputs):
    x, kernel, g = operands(num_inputs)
    axes = (None,) * kernel.ndim
    ours, pull = jax.vjp(lambda x, kernel: product(x, kernel, num_inputs, axes), x, kernel)
    theirs, expected = jax.vjp(lambda x, kernel: jnp.tensordot(x, kernel, num_inputs), x, kernel)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for got, want in zip(pull(g), expected(g), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_bfloat16_is_summed_in_float32_forward_and_backward():
    """A sum of 512 numbers of about 1/4 would not grow beyond 64 in bfloat16."""
    x, kernel, g = jax.random.uniform(jax.random.key(0), (3, 512, 512), jnp.bfloat16)

    def forward_and_backward(x, kernel, g):
        y, pull = jax.vjp(lambda x, kernel: product(x, kernel, 1, (None, None)), x, kernel)
        return y, *pull(g)

    results = forward_and_backward(x, kernel, g)
    assert {result.dtype for result in results} == {jnp.dtype(jnp.bfloat16)}
    wide = forward_and_backward(*(a.astype(jnp.float32) for a in (x, kernel, g)))
    for got, want in zip(results, wide, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8)


def test_zeros_receive_the_gradient_of_a_bfloat16_kernel_unrounded():
    x, kernel, g = operands(1, jnp.bfloat16)
    p = {"kernel": kernel, GRADIENT: jnp.zeros(kernel.shape)}
    axes = (None,) * kernel.ndim
    ours, pull = jax.vjp(lambda x, p: linear(p, x, axes), x, p)
    theirs, expected = jax.vjp(lambda x, kernel: product(x, kernel, 1, axes), x, kernel)
    (dx, dp), (expected_dx, rounded) = pull(g), expected(g)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(dx, expected_dx)
    assert not dp["kernel"].any()
    exact = jnp.einsum("bcx,bcyz->xyz", x, g, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(dp[GRADIENT], exact, rtol=1e-6)
    np.testing.assert_array_equal(dp[GRADIENT].astype(jnp.bfloat16), rounded)
    assert (dp[GRADIENT] != rounded).any()


@pytest.mark.parametrize(("remat", "num_products"), [("none", 3), ("dots", 3), ("layer", 4)])
def test_remat_computes_products_again_only_where_it_says_so(remat, num_products):
    """The forward product, its two gradients, and the recomputed one."""
    kernel, x = jnp.ones((4, 4)), jnp.ones((3, 4))

    def loss(kernel, x):
        def layer(x, _):
            return jnp.sin(product(x, kernel, 1, (None, None))), None

        return jax.lax.scan(checkpointed(layer, remat), x, None, length=2)[0].sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(kernel, x))
    assert jaxpr.count("dot_general") == num_products


def test_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat must be one of none, dots, layer, got 'full'"):
        checkpointed(lambda x, _: (x, None), "full")


def test_gradient_of_rms_norm_is_that_of_its_formula():
    def formula(scale, x):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3) * scale

    keys = jax.random.split(jax.random.key(0), 3)
    scale, x, g = (
        jax.random.normal(k, s) for k, s in zip(keys, [(5,), (2, 3, 5), (2, 3, 5)], strict=True)
    )
    ours = jax.vjp(lambda s, x: rms_norm({"scale": s}, x, 1e-3), scale, x)[1](g)
    for gradient, expected in zip(ours, jax.vjp(formula, scale, x)[1](g), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


SCRIPT = """
import re, jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from care_jax.aot.topology import find_topology
from models import layers
chip = SingleDeviceSharding(find_topology("v5e:1x1").devices[0])
shapes = {"gate": (2048, 8192), "up": (2048, 8192), "down": (8192, 2048)}
p = {name: {"kernel": jax.ShapeDtypeStruct(s, jnp.float32)} for name, s in shapes.items()}
x = jax.ShapeDtypeStruct((1, 4096, 2048), jnp.bfloat16)
def cycles():
    layer = layers.checkpointed(lambda p, x: x + layers.mlp(p, x), "layer")
    loss = lambda p, x: jnp.square(layer(p, x).astype(jnp.float32)).sum()
    gradient = jax.jit(jax.grad(loss, (0, 1)), in_shardings=chip, out_shardings=chip)
    text = gradient.trace(p, x).lower(lowering_platforms=("tpu",)).compile().as_text()
    return sum(map(int, re.findall(r'"estimated_cycles":"(\\d+)"', text)))
print(cycles())
jax.lax.optimization_barrier = lambda x: x
print(cycles())
"""


@pytest.mark.exhaustive
def test_barriers_save_a_tpu_cycles():
    """By the compiler's estimate 13% of an MLP's forward and backward."""
    with_barriers, without = map(int, output_with("libtpu", "-c", SCRIPT).split())
    assert 0 < with_barriers < 0.95 * without


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
