"""A sparse layer compiled for a TPU or GPU that is not there computes the chosen experts alone.

This file is the program that a test runs with libtpu or the CUDA compiler.
"""

import sys

import pytest
from compiling import output_with


@pytest.mark.exhaustive
def test_a_tpu_computes_the_chosen_experts_alone():
    """In the gradient too, where the grouped product of JAX needs 130 times as many FLOPs.

    The compiler counts megablox as if its tiles fitted: `grouped_test` counts the tiles.
    """
    output = output_with("libtpu", __file__, "v5e:1x1", "tpu_custom_call")
    kernels, _, ratio = output.splitlines()[-1].split()
    assert 1 <= float(ratio) < 1.1 and int(kernels) == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["h100:1", "rtx4090:1"])
def test_a_gpu_computes_the_chosen_experts_alone(topology):
    """The compiler counts no FLOPs; the product of JAX would copy every row for every expert."""
    output = output_with("cuda", __file__, topology, "gpu.triton")
    kernels, temporaries, _ = output.splitlines()[-1].split()
    assert float(temporaries) < 8 and int(kernels) == 6


def main(topology: str, call: str) -> None:
    """Of a gradient of a layer of Qwen3-VL-30B-A3B, compiled.

    Prints its calls of kernels, its temporaries over the size of its widest activation, the gates
    of all chosen experts, and its FLOPs over those needed.
    """
    import dataclasses
    import math

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from care_jax.aot.topology import find_topology
    from care_jax.devices.sharding import make_mesh
    from models import experts
    from models.release.known import RELEASES

    mesh = make_mesh(1, 1, 1, devices=find_topology(topology).devices[:1])
    placed = NamedSharding(mesh, PartitionSpec())
    text, num_tokens = RELEASES["Qwen/Qwen3-VL-30B-A3B-Instruct"].text, 1024
    text = dataclasses.replace(text, num_experts=32)  # as on one of four devices
    D, F, E, K = (
        *(text.hidden_size, text.intermediate_size),
        *(text.num_experts, text.num_experts_per_token),
    )

    def abstract(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed)

    kernels = {"gate_up": {"kernel": abstract(E, D, 2 * F)}, "down": {"kernel": abstract(E, F, D)}}
    params = {"router": {"kernel": abstract(D, E)}, "experts": kernels}

    def loss(params, x):
        return (experts.sparse_mlp(params, x, text)[0].astype(jnp.float32) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    platform = "tpu" if call.startswith("tpu") else "cuda"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = gradient.trace(params, abstract(1, num_tokens, D))
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    needed = 3 * 2 * num_tokens * K * 3 * D * F
    flops = (compiled.cost_analysis() or {"flops": math.nan})["flops"]
    temporaries = compiled.memory_analysis().temp_size_in_bytes / (2 * num_tokens * K * 2 * F)
    print(compiled.as_text().count(call), temporaries, flops / needed)


if __name__ == "__main__":
    main(*sys.argv[1:])
