"""Compile-only devices of a named topology.

TPUs: "v5e:8x8", the shape of a slice in chips, in libtpu's notation. GPUs: "h100:8" or "h100:2x8",
nodes x GPUs; "rtx4090:1" is one GPU. Both compilers run without a device.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from care_jax.devices.flops import CHIPS, Chip

# libtpu otherwise queries these over the network, on a host without TPUs.
_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may load libtpu at once
}
# GpuTargetConfigProto fields that depend on the architecture, from NVIDIA's data sheets and CUDA's
# tables.
_AMPERE = """shared_memory_per_core: 167936 core_count: 108 fpus_per_core: 64
  l2_cache_size: 41943040 clock_rate_ghz: 1.41 shared_memory_per_block_optin: 166912
  threads_per_core_limit: 2048
  cuda_compute_capability { major: 8 } device_interconnect_info { active_links: 12 }"""
_HOPPER = """shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_interconnect_info { active_links: 18 }"""
# Compute capabilities 8.6 and 8.9 have 99 KiB of shared memory for a block, and no NVLink.
_PCIE = """shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376
  fpus_per_core: 128 threads_per_core_limit: 1536 """
_A10G = f"""{_PCIE} core_count: 80 l2_cache_size: 6291456 clock_rate_ghz: 1.71
  cuda_compute_capability {{ major: 8 minor: 6 }}"""
_ADA = _PCIE + "cuda_compute_capability { major: 8 minor: 9 }"
_L4 = f"{_ADA} core_count: 58 l2_cache_size: 50331648 clock_rate_ghz: 2.04"
_L40S = f"{_ADA} core_count: 142 l2_cache_size: 100663296 clock_rate_ghz: 2.52"
_RTX_4090 = f"{_ADA} core_count: 128 l2_cache_size: 75497472 clock_rate_ghz: 2.52"
_TARGET = """gpu_device_info {{ {architecture}
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64 name: "{name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}" """


# (name, bytes of memory, architecture) of each GPU. From JAX 0.11.2 on, Pallas looks up the compute
# capability by the name, and fails for A10G and L40S, so they get those of A10 and L40, whose
# capability is theirs. The memory is what CUDA reports, which varies by 2% with the driver; for the
# first four it is the least reported.
GPUS = {
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24_081 * 2**20, _RTX_4090),
    "l4": ("NVIDIA L4", 22_563 * 2**20, _L4),
    "a10g": ("NVIDIA A10", 22_563 * 2**20, _A10G),
    "l40s": ("NVIDIA L40", 45_404 * 2**20, _L40S),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 42_298_834_944, _AMPERE),
    "a100": ("NVIDIA A100-SXM4-80GB", 85_094_170_624, _AMPERE),
    "h100": ("NVIDIA H100 80GB HBM3", 84_942_979_072, _HOPPER),
    "h200": ("NVIDIA H200", 150_001_732_813, _HOPPER),
}
_NODE = {"a100-40": 16}  # the most GPUs of a node, if not 8


@dataclasses.dataclass(frozen=True)
class Topology:
    """Compile-only devices, all of one kind of chip."""

    chip: Chip  # `ici_bandwidth` is that of the topology's links, see `link_share`
    devices: Sequence[jax.Device]

    @property
    def slices(self) -> list[int]:
        """TPU slice or GPU node of each device."""
        return [slice_of(device) for device in self.devices]


def slice_of(device: jax.Device) -> int:
    """TPU slice or GPU node of a compile-only device; a GPU's node is its process index."""
    is_gpu = device.platform == "gpu"
    return device.process_index if is_gpu else getattr(device, "slice_index", None) or 0


def find_topology(name: str, num_slices: int = 1) -> Topology:
    """The chips of a topology such as "v5e:4x4" or "h100:2x8"; on TPUs, of `num_slices` slices.

    Raises:
        ValueError: the topology is unknown, or its compiler is not installed.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise ValueError(
            f"--topology must be one of {', '.join(CHIPS)} and its shape, such as v5e:4x4 or "
            f"h100:8, got {name!r}"
        )
    is_gpu = kind in GPUS
    if num_slices < 1 or (is_gpu and num_slices > 1):
        raise ValueError(
            f"--slices must be at least 1, and 1 for GPUs, whose nodes are part of --topology, as "
            f"in {kind}:2x8; got {num_slices} for {name!r}"
        )
    find, extra = (_gpus, "cuda") if is_gpu else (_tpus, "tpu")
    try:
        found = find(kind, shape, num_slices)
    except Exception as error:
        reason = " ".join(str(error).split())
        if "not installed" in reason or "not implemented" in reason:
            reason = f"its compiler is not there; run: pip install 'care_jax[{extra}]'"
        raise ValueError(f"--topology {name!r} cannot be compiled for: {reason}") from error
    chip = CHIPS[kind]
    bandwidth = chip.ici_bandwidth * link_share(kind, shape)
    return Topology(dataclasses.replace(chip, ici_bandwidth=bandwidth), found.devices)


def link_share(kind: str, shape: str) -> float:
    """Share of the chips' links that a collective over all chips of a TPU topology uses.

    Along an axis with wraparound links a ring runs in both directions. Along another one a ring has
    to return over the same links, which leaves one direction. An axis has wraparound links from 16
    chips on; of a v5p, if it is a multiple of 4.
    """
    axes = [int(size) for size in re.findall(r"\d+", shape)]
    if kind in GPUS or max(axes, default=1) == 1:
        return 1.0
    is_ring = [size % 4 == 0 if kind == "v5p" else size >= 16 for size in axes]
    used = [1 if ring else 1 / 2 for ring, size in zip(is_ring, axes, strict=True) if size > 1]
    return sum(used) / len(axes)


def _tpus(kind: str, shape: str, num_slices: int) -> topologies.TopologyDescription:
    for question, answer in _HOST.items():
        os.environ.setdefault(question, answer)
    sizes = [int(size) for size in re.findall(r"\d+", shape)]
    options: dict[str, Any] = {"num_slices": num_slices} if num_slices > 1 else {}
    if math.prod(sizes) < 4:  # fewer than the four chips of a host
        options["chips_per_host_bounds"] = [*sizes, 1, 1, 1][:3]
    return topologies.get_topology_desc(
        platform="tpu", topology_name=f"{kind}:{shape}" if shape else kind, **options
    )


def _gpus(kind: str, shape: str, _: int) -> topologies.TopologyDescription:
    if not (sizes := re.fullmatch(r"(?:(\d+)x)?(\d+)", shape)):
        raise ValueError(f"its shape must be GPUs or nodes x GPUs, such as 8 or 2x8, got {shape!r}")
    if int(sizes[2]) > (most := _NODE.get(kind, 8)):
        raise ValueError(
            f"a node has at most {most} GPUs, got {sizes[2]}; write nodes x GPUs, such as 2x8"
        )
    fields = dict(zip(("name", "memory", "architecture"), GPUS[kind], strict=True))
    target = _TARGET.format(bandwidth=CHIPS[kind].hbm_bandwidth, **fields)
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x{sizes[1] or 1}x{sizes[2]}"
    )
