"""A sparse layer compiled for a TPU that is not there computes the chosen experts alone.

This file is the program that a test runs with libtpu.
"""

import pytest
from compiling import output_with


@pytest.mark.exhaustive
def test_a_tpu_computes_the_chosen_experts_alone():
    """In the gradient too, where the grouped product of JAX needs 130 times as many FLOPs."""
    ratio, kernels = output_with("libtpu", __file__).splitlines()[-1].split()
    assert 1 <= float(ratio) < 1.1 and int(kernels) == 6


def main() -> None:
    """Prints the FLOPs of a gradient of a layer of Qwen3-VL-30B-A3B over those needed; kernels."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from care_jax.aot.topology import find_topology
    from models import experts
    from models.release.known import RELEASES

    placed = SingleDeviceSharding(find_topology("v5e:1x1").devices[0])
    text, num_tokens = RELEASES["Qwen/Qwen3-VL-30B-A3B-Instruct"].text, 1024
    text = dataclasses.replace(text, num_experts=32)  # as on one of four devices
    D, F, E, K = (
        *(text.hidden_size, text.intermediate_size),
        *(text.num_experts, text.num_experts_per_token),
    )

    def abstract(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed)

    kernels = {"gate_up": abstract(E, D, 2 * F), "down": abstract(E, F, D)}
    params = {"router": {"kernel": abstract(D, E)}, "experts": kernels}

    def loss(params, x):
        return (experts.sparse_mlp(params, x, text)[0].astype(jnp.float32) ** 2).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(params, abstract(1, num_tokens, D))
    compiled = lowered.compile()
    needed = 3 * 2 * num_tokens * K * 3 * D * F
    kernels = compiled.as_text().count("tpu_custom_call")
    print(compiled.cost_analysis()["flops"] / needed, kernels)


if __name__ == "__main__":
    main()
