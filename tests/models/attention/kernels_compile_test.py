"""The kernels compile for TPUs and GPUs that are not there, in memory that grows with S.

This file is the program that a test runs with libtpu or the CUDA compiler.
"""

import sys

import pytest
from compiling import output_with

# (rows, tokens, kv heads, query heads of each, head size), dtype, is it text
DECODER = 2, 8192, 4, 7, 128
CASES = {
    "decoder of 7B": (DECODER, "bfloat16", True),
    "tower of Qwen2.5-VL": ((2, 4096, 16, 1, 80), "bfloat16", False),
    "tower of Qwen3-VL": ((2, 4096, 16, 1, 72), "bfloat16", False),
}
OF_EVERY_CHIP = {
    "decoder of 7B": CASES["decoder of 7B"],
    "decoder of 7B in float32": (DECODER, "float32", True),
}
# Prompts, rows of each, kv heads, query heads of each, head size, slots of a prompt and of a row.
STEP = "decode step of 7B"
STEP_SIZES = 64, 4, 4, 7, 128, 2048, 2048
KERNEL = {
    "tpu": 'custom_call_target="tpu_custom_call"',
    "cuda": 'custom_call_target="__gpu$xla.gpu.triton"',
}


@pytest.mark.exhaustive
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("compiler", "topologies"),
    [
        ("libtpu", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]),
        ("cuda", ["h100:4", "h200:4", "a100:4", "a10g:4", "l4:4", "l40s:4", "rtx4090:4"]),
    ],
    ids=["tpu", "gpu"],
)
def test_kernels_compile_in_memory_of_a_few_copies_of_their_inputs(compiler, topologies):
    """One head's scores of 8192 x 8192 would be more than the decoder's bound."""
    output = output_with(compiler, __file__, compiler, *topologies)
    sizes = [line.split("\t") for line in output.splitlines() if "\t" in line]
    names = [*CASES, STEP, *[name for _ in topologies[1:] for name in (*OF_EVERY_CHIP, STEP)]]
    assert [name for name, *_ in sizes] == names
    for name, *numbers in sizes:
        num_kernels, arguments, temporaries = map(int, numbers)
        num_of_step = 1 if compiler == "libtpu" else 2  # GPUs: prefix and suffix
        assert num_kernels == (num_of_step if name == STEP else 3), name
        # A decode step copies nothing of the cache's size.
        assert temporaries < (arguments / 20 if name == STEP else 3 * arguments), name


def main(compiler: str, *topologies: str) -> None:
    compile_for(compiler, topologies[0], CASES)
    for topology in topologies[1:]:
        compile_for(compiler, topology, OF_EVERY_CHIP)


def compile_for(compiler: str, topology: str, cases: dict) -> None:
    """Prints kernels, bytes of arguments and of temporaries of every case, on a 2 x 2 mesh."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from care_jax.aot.topology import find_topology
    from models.attention.cached import attend_cached, cache_mask, keys_axis
    from models.attention.packed import AttentionImpl, attend, block_mask

    platform = "tpu" if compiler == "libtpu" else "cuda"
    devices = np.array(find_topology(topology).devices).reshape(2, 2)
    mesh = Mesh(devices, ("data", "tensor"))
    impl = AttentionImpl("tpu" if platform == "tpu" else "gpu", mesh, ("data",), ("tensor",))

    def abstract(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    def report(name, function, *arguments):
        traced = jax.jit(function).trace(*arguments)
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
        num_kernels = compiled.as_text().count(KERNEL[platform])
        memory = compiled.memory_analysis()
        sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        print(name, num_kernels, *sizes, sep="\t")

    for name, ((B, S, K, G, H), dtype, is_text) in cases.items():
        span = abstract((B, S), jnp.int32, "data")
        q, k = (
            abstract(shape, dtype, "data", None, "tensor")
            for shape in ((B, S, K, G, H), (B, S, K, H))
        )

        def values_and_gradients(q, k, v, g, first, last, G=G, is_text=is_text):
            mask = block_mask(None if is_text else first, last, G, impl)
            out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
            return out, pull_back(g)

        report(name, values_and_gradients, q, k, k, q, span, span)

    def step(q, prefix, suffix, on_prefix, on_suffix):
        return attend_cached(q, prefix, suffix, cache_mask(on_prefix, on_suffix, impl))

    B, R, K, G, H, P_, S = STEP_SIZES
    on_rows = "data", None, "tensor"

    def stored(S, H):
        return (S, H) if keys_axis(impl) == -2 else (H, S), (S, H)

    report(
        STEP,
        step,
        abstract((B, R, 1, K, G, H), jnp.bfloat16, "data", None, None, "tensor"),
        [abstract((B, K, *size), jnp.bfloat16, "data", "tensor") for size in stored(P_, H)],
        [abstract((B, R, K, *size), jnp.bfloat16, *on_rows) for size in stored(S, H)],
        abstract((B, P_), bool, "data"),
        abstract((B, R, 1, S), bool, "data"),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
