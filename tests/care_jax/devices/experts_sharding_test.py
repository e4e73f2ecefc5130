"""A sparse MLP over a mesh computes what one device does, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sparse_layer import CONFIG, make_params

from care_jax.devices import placement, sharding
from configs import common
from models import experts

DEFAULTS = common.get_config()
AXES = {
    "router": {"kernel": experts.ROUTER},
    "experts": {"gate_up": experts.UP, "down": experts.DOWN},
}


def loss(params, x):
    return (jnp.sin(jnp.arange(16)) * experts.sparse_mlp(params, x, CONFIG)[0]).sum()


def on_mesh(sizes, rules, params, x):
    """Value and gradients, with everything placed as the rules say."""
    mesh = sharding.make_mesh(*sizes)
    params = jax.device_put(params, sharding.param_shardings(AXES, params, rules, mesh))
    x = jax.device_put(x, sharding.batch_sharding(mesh, rules))
    return jax.jit(jax.value_and_grad(placement.placed(loss, rules, mesh), (0, 1)))(params, x)


@pytest.mark.parametrize(
    ("rules", "shape"),
    [(DEFAULTS.sharding_rules, (8, 5, 16)), (DEFAULTS.decode_sharding_rules, (8, 2, 1, 16))],
    ids=["training", "decoding"],
)
@pytest.mark.parametrize("sizes", [(1, 2, 2, 2), (2, 2, 1, 2), (1, 1, 8, 1), (2, 4, 1, 1)])
def test_outputs_and_gradients_are_those_of_one_device(sizes, rules, shape):
    params = make_params()
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    one = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)
    many = on_mesh(sizes, rules, params, x)
    for expected, found in zip(*map(jax.tree.leaves, (one, many)), strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_that_do_not_divide_are_refused():
    x = jnp.ones((8, 5, 16))
    with pytest.raises(ValueError, match="6 experts must be divisible by the 4 devices of mesh ax"):
        on_mesh((1, 2, 2, 2), DEFAULTS.sharding_rules, make_params(6), x)
