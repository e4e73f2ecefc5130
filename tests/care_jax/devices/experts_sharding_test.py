"""A sparse MLP over a mesh computes what one device does, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sparse_layer import CONFIG, make_params

from care_jax.devices import placement, sharding
from configs import common
from models import experts, lora

DEFAULTS = common.get_config()
AXES = {
    "router": {"kernel": experts.ROUTER},
    "experts": {"gate_up": {"kernel": experts.UP}, "down": {"kernel": experts.DOWN}},
}
ADAPTED = {
    name: {
        **AXES["experts"][name],
        "lora_a": (*axes[:2], None),
        "lora_b": (axes[0], None, axes[2]),
        "lora_scale": (),
    }
    for name, axes in (("gate_up", experts.UP), ("down", experts.DOWN))
}
ADAPTED_AXES = {**AXES, "experts": ADAPTED}


def loss(params, x):
    return (jnp.sin(jnp.arange(16)) * experts.sparse_mlp(params, x, CONFIG)[0]).sum()


def on_mesh(sizes, rules, params, x):
    """Value and gradients, with everything placed as the rules say."""
    mesh = sharding.make_mesh(*sizes)
    has_adapters = "lora_a" in params["experts"]["down"]
    axes = ADAPTED_AXES if has_adapters else AXES
    params = jax.device_put(params, sharding.param_shardings(axes, params, rules, mesh))
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


def test_adapters_of_experts_are_sharded_with_them():
    rules = DEFAULTS.sharding_rules
    experts_of = {"text": {"layers": {"mlp": jax.tree.map(lambda a: a[None], make_params())}}}
    params = lora.add(experts_of, jax.random.key(0), rank=3, alpha=6.0, experts=True)
    params = jax.tree.map(lambda a: a[0], params["text"]["layers"]["mlp"])
    for name in ("gate_up", "down"):
        b = params["experts"][name]["lora_b"]
        params["experts"][name]["lora_b"] = jax.random.normal(jax.random.key(1), b.shape)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 5, 16)), jnp.float32)
    one = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)
    many = on_mesh((1, 2, 2, 2), rules, params, x)
    for expected, found in zip(*map(jax.tree.leaves, (one, many)), strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)


def test_experts_that_do_not_divide_are_refused():
    x = jnp.ones((8, 5, 16))
    with pytest.raises(ValueError, match="6 experts must be divisible by the 4 devices of mesh ax"):
        on_mesh((1, 2, 2, 2), DEFAULTS.sharding_rules, make_params(6), x)
