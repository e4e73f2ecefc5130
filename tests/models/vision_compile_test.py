"""A tower with windows compiles for a TPU that is not there, with one kernel for both layer kinds.

This file is the program that a test runs with libtpu.
"""

import pytest
from compiling import output_with


@pytest.mark.exhaustive
def test_both_kinds_of_layers_run_the_same_kernels_without_branches_or_gathers():
    counts = output_with("libtpu", __file__).splitlines()[-1]
    # Forward, its repetition in the backward pass, dq, and dk with dv; the rotary angles are
    # gathered once.
    assert counts == "kernels 4, conditionals 0, gathers 1"


def main() -> None:
    """Prints how many kernels, conditionals and gathers the rematerialised gradient has."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from care_jax.aot.topology import find_topology
    from models import backbone
    from models.attention.packed import AttentionImpl
    from models.positions import pack_images
    from models.release.known import RELEASES

    placed = SingleDeviceSharding(find_topology("v5e:1x1").devices[0])

    def abstract(a):
        dtype = jnp.bfloat16 if a.dtype == np.float32 else a.dtype
        return jax.ShapeDtypeStruct(a.shape, dtype, sharding=placed)

    vision = dataclasses.replace(
        RELEASES["Qwen/Qwen2.5-VL-7B-Instruct"].vision,
        num_layers=4,
        hidden_size=320,
        num_heads=4,
        intermediate_size=640,
        full_attention_layers=(1,),
    )
    config = dataclasses.replace(RELEASES["Qwen/Qwen2.5-VL-7B-Instruct"], vision=vision)

    def loss(p, images):
        options = {"dtype": jnp.bfloat16, "remat": "layer", "attention": AttentionImpl("tpu")}
        features = backbone.encode_images({"vision": p}, images, config, **options)
        return jnp.square(features.merged.astype(jnp.float32)).mean()

    shapes = jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))
    patches, grids = np.zeros((0, vision.patch_dim), np.float32), np.zeros((0, 3), np.int32)
    images = pack_images([patches], [grids], vision, 1024)
    arguments = jax.tree.map(abstract, (shapes["vision"], images))
    traced = jax.jit(jax.grad(loss)).trace(*arguments)
    text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    kernels = text.count('custom_call_target="tpu_custom_call"')
    conditionals, gathers = text.count(" conditional("), text.count(" gather(")
    print(f"kernels {kernels}, conditionals {conditionals}, gathers {gathers}")


if __name__ == "__main__":
    main()
