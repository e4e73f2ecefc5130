"""A decode step as compiled for a TPU and a GPU that are not there, for what it writes to memory.

The layouts of `models.decoder` and the blocks of `sampling` were chosen on a CPU as well; here they
must not cost an accelerator copies. This file is the program that a test runs with libtpu or the
CUDA compiler.
"""

import math
import pathlib
import re
import sys

import pytest
from compiling import output_with

SLOTS, ROWS, PROMPT, RING = 64, 4, 1003, 512  # a prompt in no whole number of blocks
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
BODY = re.compile(r"while\(.*body=%?([\w.-]+)")
RESULT = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\w+)\[([\d,]*)\](\S*) ([\w-]+)\(")
ON_CHIP = "S(1)"  # the memory space of a TPU's VMEM
OPERANDS = re.compile(r"%?([\w.-]+) = .+? ([\w-]+)\((.*?)\)")
MLP = {"11008", "22016"}  # width of gate and up, and of both
VOCAB = "151936"
RENAMES = "bitcast", "get-tuple-element", "tuple"
MOVES = "copy", "transpose", "reshape", "pad"


@pytest.mark.exhaustive
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("compiler", "topology", "num_reads"),
    [("libtpu", "v5e:2x2", 3), ("cuda", "h100:4", 3)],
    ids=["tpu", "gpu"],
)
def test_a_call_moves_no_array_of_a_weight_s_the_logits_or_a_cache_s_size(
    compiler, topology, num_reads
):
    lines = output_with(compiler, __file__, topology).splitlines()
    written = [line.split("\t") for line in lines if "\t" in line]
    assert len(written) > 20
    moved = [line for line in written if line[1] in MOVES and int(line[-1]) >= 2**20]
    assert not moved
    # The MLP's activations are written in their own dtype, not in that of the sums.
    wide = [line for line in written if line[2] == "f32" and MLP & set(line[3].split(","))]
    assert not wide
    # The sampler reads the logits for the largest one, for the sums of blocks, and for one block.
    reads = [line for line in lines if line.startswith("reads ")]
    assert 0 < len(reads) <= num_reads, reads
    if compiler == "libtpu":  # a token's keys are a row of their array, not a column of its tiles
        rings = [line[3] for line in written if line[1] == "dynamic-update-slice"]
        assert any(ring.endswith(f",{RING},128") for ring in rings)
        assert not any(ring.endswith(f",128,{RING}") for ring in rings)


def main(topology: str) -> None:
    """Prints name, opcode, dtype, shape and bytes of what a decode call and its loop write.

    And "reads" before the name of an instruction that reads a float32 array of the logits' size.
    """
    import dataclasses

    import jax
    import jax.numpy as jnp

    from care_jax.aot import shapes
    from care_jax.aot.topology import find_topology
    from care_jax.decoding.schedule import Scheduler, Sizes
    from care_jax.devices.sharding import make_mesh
    from care_jax.rl.rollout_programs import compile_decoder
    from care_jax.run.policy import decode_shardings
    from care_jax.run.run import Run
    from configs import qwen25vl_3b
    from models import backbone
    from models.release.known import RELEASES

    config = qwen25vl_3b.get_config()
    config.rl.max_response_tokens = RING
    # In four shards the vocabulary is not a multiple of 128, and a TPU pads and copies the logits.
    config.mesh.tensor = config.mesh.sequence = 1
    devices = find_topology(topology).devices
    mesh = make_mesh(**config.mesh, devices=devices)
    release = RELEASES[config.model.path]
    one_layer = dataclasses.replace(release.text, num_layers=1)
    policy = dataclasses.replace(
        shapes.policy(config), config=dataclasses.replace(release, text=one_layer)
    )
    run = Run(config, policy, mesh, pathlib.Path())
    sizes = Sizes(
        num_slots=SLOTS,
        num_rows=ROWS,
        num_rollouts=8,
        max_tokens=RING,
        num_context_tokens=0,
        num_shards=mesh.size,
        period=SLOTS,
    )
    params = jax.eval_shape(
        lambda key: backbone.to_decode_layout(
            backbone.init(policy.config, key), policy.config, jnp.bfloat16
        ),
        jax.random.key(0),
    )
    places = decode_shardings(policy, mesh, config.decode_sharding_rules)
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places
    )
    advance = compile_decoder(run, temperature=1.0, top_p=1.0).advance
    refill = jax.eval_shape(lambda: Scheduler(sizes).refill)
    traced = advance.trace(params, shapes.slots(run, sizes, PROMPT), refill)
    platform = "tpu" if topology.startswith("v") else "cuda"
    text = traced.lower(lowering_platforms=(platform,)).compile().as_text()
    bodies, inside, logits = set(BODY.findall(text)), "", set()
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            inside = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
            bodies |= {inside} if line.startswith("ENTRY") else set()
        found = RESULT.match(line)
        if found and inside in bodies:
            name, dtype, shape, layout, opcode = found.groups()
            num_bytes = BYTES.get(dtype, 8) * math.prod(map(int, filter(None, shape.split(","))))
            if ON_CHIP not in layout:
                print(name, opcode, dtype, shape, num_bytes, sep="\t")
            if dtype == "f32" and VOCAB in shape.split(","):
                logits.add(name)
        other = OPERANDS.search(line)
        if other and inside in bodies and other[2] not in RENAMES:
            operands = other[3].replace("%", "").split(", ")
            if not logits.isdisjoint(operands):
                print("reads", other[1], other[2])


if __name__ == "__main__":
    main(sys.argv[1])
