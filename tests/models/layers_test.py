"""Products: their gradients, and what they are summed in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers import product


def operands(num_inputs, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    inputs, outputs = (4, 3)[:num_inputs], (2, 6)[: 3 - num_inputs]
    x = jax.random.normal(keys[0], (5, 7, *inputs), dtype)
    kernel = jax.random.normal(keys[1], (*inputs, *outputs), dtype)
    return x, kernel, jax.random.normal(keys[2], (5, 7, *outputs), dtype)


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_values_and_gradients_are_those_of_a_tensor_product(num_inputs):
    x, kernel, g = operands(num_inputs)
    ours, pull = jax.vjp(lambda x, kernel: product(x, kernel, num_inputs), x, kernel)
    theirs, expected = jax.vjp(lambda x, kernel: jnp.tensordot(x, kernel, num_inputs), x, kernel)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for got, want in zip(pull(g), expected(g), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_bfloat16_is_summed_in_float32_forward_and_backward():
    x, kernel, g = operands(1, jnp.bfloat16)

    def forward_and_backward(x, kernel, g):
        y, pull = jax.vjp(lambda x, kernel: product(x, kernel, 1), x, kernel)
        return y, *pull(g)

    results = forward_and_backward(x, kernel, g)
    assert {result.dtype for result in results} == {jnp.dtype(jnp.bfloat16)}
    dots = [
        line
        for line in str(jax.make_jaxpr(forward_and_backward)(x, kernel, g)).splitlines()
        if "dot_general" in line
    ]
    assert len(dots) == 3 and all(":f32[" in line for line in dots)
    wide = forward_and_backward(*(a.astype(jnp.float32) for a in (x, kernel, g)))
    for got, want in zip(results, wide, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-7, atol=1e-2)
