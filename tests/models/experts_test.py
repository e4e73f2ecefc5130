"""Sparse MLPs: the router's rule, output and gradients, replayed routes, parts of the experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sparse_layer import CONFIG, make_params

from models import experts


@pytest.fixture
def params():
    return make_params()


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 16)), jnp.float32)


def densely(params, x, config):
    """Every expert of every token, weighted."""
    p = params["experts"]
    probabilities = jax.nn.softmax(x @ params["router"]["kernel"])
    kth = jnp.sort(probabilities)[..., -config.num_experts_per_token, None]
    share = jnp.where(probabilities >= kth, probabilities, 0)
    share = share / share.sum(-1, keepdims=True)
    gate, up = jnp.split(jnp.einsum("btd,edf->btef", x, p["gate_up"]["kernel"]), 2, axis=-1)
    return jnp.einsum("btef,efd,bte->btd", jax.nn.silu(gate) * up, p["down"]["kernel"], share)


def test_the_router_keeps_the_largest_probabilities_and_renormalises_them():
    router = {"kernel": jnp.log(jnp.array([[1.0, 8.0, 2.0, 4.0, 0.5, 0.5]]))}
    share, chosen, _ = experts.route(router, jnp.ones((1, 1)), CONFIG)
    assert chosen[0].tolist() == [1, 3, 2]
    np.testing.assert_allclose(share[0], np.array([8, 4, 2]) / 14, rtol=1e-6)
    np.testing.assert_allclose(experts.route(router, 0 * jnp.ones((1, 1)), CONFIG)[0], 1 / 3)


def test_output_and_gradients_are_those_of_the_dense_sum(params, x):
    def loss(mlp, params, x):
        out = mlp(params, x, CONFIG)
        return (jnp.arange(16) * (out[0] if mlp is experts.sparse_mlp else out)).sum()

    ours, theirs = (
        jax.jit(jax.value_and_grad(functools.partial(loss, mlp), (0, 1)))(params, x)
        for mlp in (experts.sparse_mlp, densely)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
    jax.tree.map(close, ours, theirs)
    assert all(jnp.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(ours))


def test_a_replayed_token_uses_the_given_experts_at_the_routers_own_probabilities(params, x):
    """A token with -1 keeps its own; the experts' order does not matter."""
    own_share, own, _ = experts.route(params["router"], x, CONFIG)
    given = np.array(own)[..., ::-1].copy()
    given[0, 0], given[1, 1] = (own[0, 0] + 1) % CONFIG.num_experts, -1
    share, chosen, kept = experts.route(params["router"], x, CONFIG, jnp.asarray(given))
    np.testing.assert_array_equal(kept, own)
    np.testing.assert_array_equal(chosen[0, 0], given[0, 0])
    np.testing.assert_array_equal(chosen[1, 1], own[1, 1])
    probabilities = jax.nn.softmax(x[0, 0] @ params["router"]["kernel"])[given[0, 0]]
    np.testing.assert_allclose(share[0, 0], probabilities / probabilities.sum(), rtol=1e-5)
    np.testing.assert_allclose(share[0, 1], own_share[0, 1][::-1], rtol=1e-6)
    ours, theirs = (
        experts.sparse_mlp(params, x, CONFIG, routes)[0] for routes in (jnp.asarray(given), None)
    )
    is_same = np.abs(ours - theirs).max(-1) < 1e-3
    assert not is_same[0, 0] and is_same.sum() == is_same.size - 1


def test_rows_that_a_kernel_leaves_undefined_have_no_part_in_a_gradient(params, x, monkeypatch):
    """The kernels of TPUs and GPUs write the rows of their own experts only."""
    grouped = experts.grouped

    def with_undefined_rows(rows, kernel, sizes):
        is_written = jnp.arange(len(rows))[:, None] < sizes.sum()
        return jnp.where(is_written, grouped(rows, kernel, sizes), jnp.nan)

    def gradient(params, x, first, last):
        def loss(params, x):
            share, chosen, _ = experts.route(params["router"], x, CONFIG)
            kernels = [params["experts"][n]["kernel"][first:last] for n in ("gate_up", "down")]
            return (jnp.arange(16) * experts._computed((x, share, chosen), kernels, first)).sum()

        return jax.grad(loss, (0, 1))(params, x)

    whole = gradient(params, x, 0, 8)
    monkeypatch.setattr(experts, "grouped", with_undefined_rows)
    parts = gradient(params, x, 0, 2), gradient(params, x, 2, 8)
    jax.tree.map(
        lambda one, other, both: np.testing.assert_allclose(
            one + other, both, rtol=1e-4, atol=1e-4
        ),
        *parts,
        whole,
    )


def test_parts_of_the_experts_add_up_to_all(params, x):
    """As devices that hold two and six of the eight."""
    share, chosen, _ = experts.route(params["router"], x, CONFIG)
    kernels = [params["experts"][name]["kernel"] for name in ("gate_up", "down")]
    parts = [
        experts._computed((x, share, chosen), [k[first:last] for k in kernels], first)
        for first, last in ((0, 2), (2, 8))
    ]
    whole, _ = experts.sparse_mlp(params, x, CONFIG)
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-5)
