import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import output_with
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from care_jax.aot import collectives
from care_jax.devices import placement, sharding
from models import layers


def test_activations_are_laid_out_only_inside_a_placed_function():
    mesh = sharding.make_mesh(2, 2, 1, 2)

    def double(x):
        return layers.constrain(2 * x, "batch", "tokens", None)

    x = np.ones((4, 6, 3))
    rules = (("batch", ("data", "fsdp")), ("tokens", "sequence"))
    placed = jax.jit(placement.placed(double, rules, mesh))(x)
    assert placed.sharding.is_equivalent_to(
        NamedSharding(mesh, P(("data", "fsdp"), "sequence", None)), 3
    )
    assert jax.jit(double)(x).sharding.is_fully_replicated


WHOLE_MESH = ("data", "fsdp", "tensor", "sequence")
FSDP = (("batch", WHOLE_MESH), ("embed", ("fsdp", "tensor", "sequence")))


def weight_gradient(rules, mesh, axes, x, g):
    """Of a kernel between x [B, S, D] and g [B, S, F], jitted with shardings by `rules`."""
    rows = NamedSharding(mesh, P(sharding.mesh_axes("batch", rules)))
    kernel = np.zeros((x.shape[-1], g.shape[-1]), np.float32)

    def pulled_back(x, g):
        return jax.vjp(lambda kernel: layers.product(x, kernel, 1, axes), kernel)[1](g)[0]

    out = sharding.param_shardings({"kernel": axes}, {"kernel": kernel}, rules, mesh)["kernel"]
    placed = placement.placed(pulled_back, rules, mesh)
    return jax.jit(placed, in_shardings=rows, out_shardings=out), (x, g)


@pytest.mark.parametrize(
    ("rules", "axes", "size", "num_scatters"),
    [
        (FSDP, ("embed", "mlp"), 24, 2),
        (FSDP, ("mlp", "embed"), 24, 2),
        (FSDP, ("embed", "mlp"), 6, 1),  # indivisible by the axes after "tensor"
        (FSDP, ("embed", "mlp"), 3, 0),
        (FSDP, (None, None), 24, 0),
        ((("batch", "fsdp"), ("embed", "fsdp"), ("mlp", "tensor")), ("embed", "mlp"), 24, 0),
    ],
)
def test_gradients_of_kernels_are_scattered_in_groups_of_mesh_axes(rules, axes, size, num_scatters):
    x, g = np.random.default_rng(0).normal(size=(2, 8, 5, size)).astype(jnp.bfloat16)
    gradient, arguments = weight_gradient(rules, sharding.make_mesh(2, 2, 2, 1), axes, x, g)
    assert str(gradient.trace(*arguments).jaxpr).count("reduce_scatter[") == num_scatters
    exact = np.einsum("bsd,bsf->df", x.astype(float), g.astype(float))
    np.testing.assert_allclose(gradient(*arguments), exact, atol=1e-5)


@pytest.mark.exhaustive
def test_gradients_of_kernels_are_reduce_scattered_in_float32_on_a_tpu():
    """Over all 64 chips; an all-reduce would receive twice the bytes."""
    texts = output_with("libtpu", __file__).split("HloModule")[1:]

    def count(computation, line):
        found = collectives.collective_of(computation, line, 64)
        return {(found[0], re.search(r"= (\w+)\[", line)[1]): 1} if found else {}

    for text in texts:
        num, _ = collectives.walk(text, count)
        assert num.pop(("collective-permute", "f32"), 0) <= 2  # within the reduce-scatters
        assert num == {("reduce-scatter", "f32"): 2}
    assert len(texts) == 2


def main() -> None:
    """Prints the programs of both orders of a kernel's axes."""
    from care_jax.aot.topology import find_topology

    chips = find_topology("v5e:8x8")
    mesh = sharding.make_mesh(1, 16, 2, 2, devices=chips.devices, slices=chips.slices)
    x, g = (jax.ShapeDtypeStruct((64, 512, n), jnp.bfloat16) for n in (3584, 2048))
    for axes, pair in ((("embed", "mlp"), (x, g)), (("mlp", "embed"), (g, x))):
        gradient, arguments = weight_gradient(FSDP, mesh, axes, *pair)
        print(gradient.trace(*arguments).lower(lowering_platforms=("tpu",)).compile().as_text())


if __name__ == "__main__":
    main()
