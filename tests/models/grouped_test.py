"""Grouped products and their gradients: JAX's, megablox and the Triton kernels, one by one."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from models import grouped

SIZES = {
    "all rows": [3, 0, 7, 1, 0, 9],
    "rows left": [0, 4, 0, 2, 0, 0],
    "no rows": [0, 0, 0, 0, 0, 0],
    "tiles": [130, 0, 1, 129, 0, 0],
}
NUM_INPUTS, NUM_OUTPUTS = 40, 136  # not multiples of a tile or of a step


def jax_transposed(g, kernels, sizes):
    return grouped._grouped_bwd((jnp.zeros((len(g), NUM_INPUTS)), kernels, sizes), g)[0]


def jax_by_group(lhs, g, sizes):
    kernels = jnp.zeros((len(sizes), lhs.shape[1], g.shape[1]))
    return grouped._grouped_bwd((lhs, kernels, sizes), g)[1]


IMPLEMENTATIONS = {"jax": (grouped.grouped, jax_transposed, jax_by_group)}
for name in ("megablox", "triton"):
    product, by_group = (getattr(grouped, f"_{name}{suffix}") for suffix in ("", "_by_group"))
    product = functools.partial(product, interpret=True)
    transposed = functools.partial(product, transpose_kernels=True)
    by_group = functools.partial(by_group, interpret=True)
    IMPLEMENTATIONS[name] = product, transposed, by_group


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_products_and_gradients_are_those_of_each_group_alone(name, sizes):
    """Rows of groups alone: the others are not defined."""
    rng = np.random.default_rng(2)
    num_rows = sum(sizes)
    lhs, g = (rng.normal(size=(num_rows + 4, n)) for n in (NUM_INPUTS, NUM_OUTPUTS))
    kernels = rng.normal(size=(len(sizes), NUM_INPUTS, NUM_OUTPUTS))
    forward, transposed, by_group = IMPLEMENTATIONS[name]
    arrays = [jnp.asarray(a, jnp.float32) for a in (lhs, g, kernels)]
    expert = np.repeat(np.arange(len(sizes)), sizes)
    is_of = expert == np.arange(len(sizes))[:, None]
    expected = (
        np.einsum("mc,mcf->mf", lhs[:num_rows], kernels[expert]),
        np.einsum("mf,mcf->mc", g[:num_rows], kernels[expert]),
        np.einsum("em,mc,mf->ecf", is_of, lhs[:num_rows], g[:num_rows]),
    )
    sizes = jnp.array(sizes, jnp.int32)
    found = (
        forward(arrays[0], arrays[2], sizes)[:num_rows],
        transposed(arrays[1], arrays[2], sizes)[:num_rows],
        by_group(arrays[0], arrays[1], sizes),
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_rows_of_no_group_have_no_gradient():
    rng = np.random.default_rng(3)
    lhs, g, kernels = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((9, 4), (9, 5), (2, 4, 5))
    )
    d_lhs, _, none = grouped._grouped_bwd((lhs, kernels, jnp.array([3, 2], jnp.int32)), g)
    assert none is None and d_lhs[:5].all() and not d_lhs[5:].any()
