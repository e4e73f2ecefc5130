"""Grouped products and their gradients: JAX's, megablox and the Triton kernels, one by one."""

import functools
import math

import jax
import jax.extend
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


def products_of(jaxpr):
    """The equations of matrix products and kernels in a jaxpr, through calls and branches."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "dot_general"):
            yield equation
        else:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from products_of(inner)


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "at_most"),
    [(2048, 1536, 1), (768, 2048, 1), (2048, 16, 8), (16, 768, 8), (300, 700, 1.5)],
)
@pytest.mark.parametrize("place", range(3))
def test_tiles_of_megablox_multiply_little_more_than_is_needed(
    num_inputs, num_outputs, at_most, place
):
    """Of Qwen3-VL-30B-A3B and of adapters of rank 16, which fill 16 of 128 lanes."""
    num_rows, num_experts = 2048, 4
    lhs, g = (jax.ShapeDtypeStruct((num_rows, n), "bfloat16") for n in (num_inputs, num_outputs))
    kernels = jax.ShapeDtypeStruct((num_experts, num_inputs, num_outputs), "bfloat16")
    arrays = ((lhs, kernels), (g, kernels), (lhs, g))[place]
    sizes = jax.ShapeDtypeStruct((num_experts,), "int32")
    jaxpr = jax.make_jaxpr(IMPLEMENTATIONS["megablox"][place])(*arrays, sizes)
    (kernel,) = products_of(jaxpr.jaxpr)
    dot = next(products_of(kernel.params["jaxpr"]))
    a, b = (x.aval.shape for x in dot.invars)
    (contracted,), _ = dot.params["dimension_numbers"][0]
    tile = math.prod(a) * math.prod(b) // a[contracted]  # rows x inputs x outputs
    grid = [size for size in kernel.params["grid_mapping"].grid if isinstance(size, int)]
    assert len(grid) == 2  # the number of tiles of rows depends on the groups
    row_tile = grouped._row_tile(num_rows)
    ratio = math.prod(grid) * tile / row_tile / (num_inputs * num_outputs)
    assert 1 <= ratio <= at_most
