"""Topologies by name, and what is said where there is none, or no compiler for it."""

import os
import pathlib
import subprocess
import sys

import pytest

from care_jax.aot import topology
from care_jax.aot.topology import GPUS, find_topology
from care_jax.devices.flops import CHIPS, GIB, PEAK_FLOPS

CUDA = pathlib.Path(sys.prefix, "cuda")
needs_cuda = pytest.mark.skipif(not CUDA.is_dir(), reason=f"needs the CUDA compiler in {CUDA}")
PROGRAM = """
import sys
import jax
from care_jax.devices.sharding import attention_impl, make_mesh
from care_jax.aot.topology import find_topology
from configs import common

jax.config.update("jax_platforms", "cpu")
for name in sys.argv[1:]:
    chips = find_topology(name)
    rules, devices = common.get_config().sharding_rules, chips.devices
    mesh = make_mesh(0, -1, 1, devices=devices, slices=chips.slices)
    kernel = attention_impl("auto", rules, mesh).name
    kind = mesh.abstract_mesh.abstract_device.device_kind
    capability = devices[0].compute_capability
    print(name, len(devices), mesh.shape["data"], devices[0].platform, kernel, capability, kind)
"""


def test_a_topology_that_is_not_known_names_those_that_are():
    gpus = "rtx4090, l4, a10g, l40s, a100-40, a100, h100, h200"
    with pytest.raises(ValueError, match=f"one of v5e, v5p, v6e, {gpus} and its shape, such"):
        find_topology("b200:8")


@pytest.mark.parametrize(
    ("kind", "shape", "share"),
    [
        ("v5e", "16x16", 1),
        ("v5e", "8x8", 1 / 2),
        ("v6e", "8x16", 3 / 4),
        ("v5e", "1x4", 1 / 4),
        ("v5p", "4x4x8", 1),
        ("v5p", "2x2x4", 2 / 3),
        ("v5p", "2x2x1", 1 / 3),
        ("v5e", "1x1", 1),
        ("h100", "2x8", 1),
    ],
)
def test_axes_without_wraparound_links_have_one_direction(kind, shape, share):
    assert topology.link_share(kind, shape) == pytest.approx(share)


@pytest.mark.parametrize(("name", "number"), [("h100:8", 2), ("v5e:2x2", 0)])
def test_slices_are_of_tpus_and_nodes_are_part_of_the_name(name, number):
    with pytest.raises(ValueError, match=rf"GPUs, whose nodes are part of .*; got {number} for "):
        find_topology(name, number)


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x2", "tpu"), ("h100:8", "cuda")])
def test_a_missing_compiler_says_what_to_install(name, extra):
    with pytest.raises(ValueError, match=rf"is not there; run: pip install 'care_jax\[{extra}\]'$"):
        find_topology(name)


@pytest.mark.parametrize(("name", "most"), [("h100:16", 8), ("a100-40:2x32", 16)])
def test_a_node_has_no_more_gpus_than_there_are(name, most):
    """16 GPUs of two nodes, taken for one node, would be sharded as no real run is."""
    with pytest.raises(
        ValueError, match=rf"a node has at most {most} GPUs, got \d+; write nodes x"
    ):
        find_topology(name)


@pytest.mark.parametrize("shape", ["", "x8", "8x", "2x2x2", "eight"])
def test_gpus_are_counted_by_nodes(shape):
    with pytest.raises(ValueError, match="its shape must be GPUs or nodes x GPUs, such as 8 or 2x"):
        find_topology(f"h100:{shape}")


def test_a_gpu_leaves_a_tenth_of_its_memory_to_others():
    kinds = {"a10g": "NVIDIA A10G", "l40s": "NVIDIA L40S"}  # JAX's `device_kind` of the device
    for kind, (name, memory, _) in GPUS.items():
        assert CHIPS[kind].flops == PEAK_FLOPS[kinds.get(kind, name)]
        assert CHIPS[kind].hbm == pytest.approx(0.9 * memory, rel=1e-3)
    assert CHIPS["h100"].hbm / GIB == pytest.approx(71.2, abs=0.1)


# Topology; devices, nodes, platform, attention kernel, compute capability.
ABSTRACT = (
    ("h100:8", "8 1 gpu gpu 9.0"),
    ("h200:2x4", "8 2 gpu gpu 9.0"),
    ("a100:1", "1 1 gpu gpu 8.0"),
    ("a100-40:1", "1 1 gpu gpu 8.0"),
    ("a10g:1", "1 1 gpu gpu 8.6"),
    ("l4:1", "1 1 gpu gpu 8.9"),
    ("l40s:1", "1 1 gpu gpu 8.9"),
    ("rtx4090:1", "1 1 gpu gpu 8.9"),
)


@needs_cuda
@pytest.mark.exhaustive
def test_abstract_gpus_attend_by_the_kernel_of_gpus_and_say_their_kind():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(name for name, _ in ABSTRACT)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{CUDA}:{os.getcwd()}", "JAX_PLATFORMS": "cpu"},
    )
    lines = [f"{name} {rest} {GPUS[name.partition(':')[0]][0]}" for name, rest in ABSTRACT]
    assert result.stdout.splitlines() == lines, result.stderr[-2000:]
