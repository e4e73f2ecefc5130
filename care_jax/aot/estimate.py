"""Estimated seconds of an RL step, beside the least: `python -m care_jax.aot --estimate`.

Every program of the step is compiled with 2 and with 4 decoder layers; `cycles` reads their texts,
and what a layer adds is extrapolated to all layers. The vision tower is a loop, so its text is that
of all its layers. Programs have the shapes of the largest batch. A smaller batch of the expected
step has less in proportion to its tokens, patches or slots:

    by tokens    compute and gathers of the decoder and of the logits
    by patches   compute and gathers of the tower
    by slots     compute of a decode step, down to the time in which its weights are read
    likewise     activations between chips, in prefill and decoding
    by blocks    attention kernels: the blocks that the drawn rows and responses see, on average
    not at all   weights and gradients between chips

Rows are packed as in a run, slots and calls are those of `schedule`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from care_jax.aot import compile, cycles, roofline, shapes, step_sizes, workload
from care_jax.aot.collectives import add
from care_jax.aot.compile import Program
from care_jax.aot.cycles import KINDS, Key, PriceKernel, Rates, Seconds
from care_jax.aot.gpu_kernels import Peaks, kernels_of
from care_jax.aot.kernel_prices import (
    BANDWIDTH_SHARE,
    DECODE_KERNEL,
    GPU_DECODE_SHARE,
    GPU_KERNEL_SHARE,
    KERNEL_SHARE,
    decode_attention,
    kernel_prices,
)
from care_jax.aot.roofline import Work
from care_jax.aot.step_sizes import StepSizes
from care_jax.aot.topology import GPUS, find_topology
from care_jax.devices.flops import Chip
from care_jax.devices.sharding import make_mesh
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.rl.step_metrics import update_flops
from care_jax.run.run import Run, open_run

PARTS = ("updates", "scoring", "decoding", "reflection", "prefill", "resharding", "host")
_COMPUTED = "compute", "gathers"
_DEPTHS = 2, 4  # decoder layers of the compiled programs
# By hand.
# FLOPs of a cycle: MXUs x rows x columns x 2. The clock is the one that gives the published peak.
_FLOPS_A_CYCLE = {
    "v5e": 4 * 128 * 128 * 2,
    "v5p": 8 * 128 * 128 * 2,
    "v6e": 4 * 256 * 256 * 2,
}
_LINK_SHARE = 0.9  # of the published bandwidth between the chips of a topology, on TPUs
_NVLINK_SHARE = 0.67  # the same on GPUs
_LATENCY = 5e-6  # seconds of a synchronous collective of no bytes
_GATHER_SHARE = 0.5  # of the bandwidth of HBM, on TPUs
# Measured on an H100 (docs/results/h100.md): what products reach of the peak, and what the
# smallest kernels of a decode step take.
_PRODUCT_SHARE = 0.75
_LAUNCH = 5e-6
_HOST_CALL = 4e-3  # seconds between two calls of a decode program
# Bytes per second between a chip and the memory of its host, each way; GPUs have PCIe 4 or 5.
_HOST_BANDWIDTH, _PCIE = 10e9, 25e9


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of an RL step by part, in the order of `PARTS`."""

    least: Mapping[str, float]
    seconds: Mapping[str, dict[str, float]]  # estimated, by kind; "host" is a kind of its own
    rates: Rates
    peaks: Peaks | None  # of a GPU
    mfu: float  # of the updates: model FLOPs, without padding and remat, by the peak
    step: StepSizes

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(sum(part.values()) for part in self.seconds.values())


def estimate(
    config: ConfigDict, topology: str, mean_response: float | None, num_slices: int = 1
) -> Estimate:
    """The estimated and the least time of a step of "rl" with drawn lengths.

    Args:
        topology: such as "v5e:4x4".
        mean_response: mean tokens of a response.

    Raises:
        ValueError: the topology is of several slices or nodes; the run has no stage "rl"; the mean
            is missing; the decoder is sparse; or a shallow program does not fit.
    """
    if "rl" not in config.stages:
        raise ValueError(f'--estimate is of a step of "rl", got stages {tuple(config.stages)}')
    if mean_response is None or mean_response <= 0:
        raise ValueError(
            f"--estimate is at a mean length: give --mean_response, in tokens, got {mean_response}"
        )
    policy = shapes.policy(config)
    if policy.config.text.num_experts:
        raise ValueError(
            f"--estimate does not price the grouped products of experts, got {policy.config.family}"
            "; leave it out for the least time"
        )
    chips = find_topology(topology, num_slices)
    if (count := len(set(chips.slices))) > 1:
        raise ValueError(
            f"--estimate does not price the network between slices or nodes, got {count} of them; "
            "estimate one"
        )
    kind, chip = topology.partition(":")[0], chips.chip
    mesh = make_mesh(**config.mesh, devices=chips.devices, slices=chips.slices)
    run = open_run(config, pathlib.Path(), mesh=mesh, policy=policy)
    expected = step_sizes.expected_step(run, mean_response)
    rates, peaks = _rates(kind, chip)
    shallow = [_read(run, depth, chip, expected, rates, peaks) for depth in _DEPTHS]
    costs = {
        name: _extrapolated(run, *(program[name] for program in shallow)) for name in shallow[0]
    }
    least: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    seconds: dict[str, dict[str, float]] = {part: {} for part in PARTS}
    for name, (works, cost) in costs.items():
        part = _part_of(name)
        least[part] += sum(work.seconds(chip, mesh.size) for work in works)
        add(seconds[part], _of_step(run, name, cost, expected, chip))
    num_calls = sum(len(s.calls) for s in (expected.decoding, expected.reflecting))
    moved = 0  # to host memory and back
    if "rollouts" in config.model.offload:
        moved = 2 * compile.carried_bytes(run, expected)
    bandwidth = _PCIE if peaks else _HOST_BANDWIDTH
    seconds["host"]["host"] = num_calls * _HOST_CALL + moved / bandwidth
    trees = (plan.sizes for plan, _ in expected.updates)
    model = sum(
        update_flops(run, np.stack([each.prompt, each.patches], 1), each.branches) for each in trees
    )
    mfu = model / (chip.flops * mesh.size * sum(seconds["updates"].values()))
    return Estimate(least, seconds, rates, peaks, mfu, expected)


def _rates(kind: str, chip: Chip) -> tuple[Rates, Peaks | None]:
    if kind in GPUS:
        peaks = Peaks(_PRODUCT_SHARE * chip.flops, BANDWIDTH_SHARE * chip.hbm_bandwidth, _LAUNCH)
        return Rates(_NVLINK_SHARE * chip.ici_bandwidth, _LATENCY), peaks
    clock, gather = chip.flops / _FLOPS_A_CYCLE[kind], _GATHER_SHARE * chip.hbm_bandwidth
    return Rates(_LINK_SHARE * chip.ici_bandwidth, _LATENCY, clock, gather), None


def _part_of(name: str) -> str:
    """The part of the step that a program belongs to, from its name such as "rl update"."""
    if name.endswith("prefill"):
        return "prefill"
    named = {"update": "updates", "score": "scoring", "decode": "decoding"}
    named |= {"reflect": "reflection", "reshard": "resharding"}
    return named[name.removeprefix("rl ")]


def _read(
    run: Run, depth: int, chip: Chip, expected: StepSizes, rates: Rates, peaks: Peaks | None
) -> dict[str, tuple[Program, Seconds]]:
    """The programs of a model of `depth` decoder layers, and their estimated seconds."""
    backbone = run.policy.config
    text = dataclasses.replace(backbone.text, num_layers=depth)
    backbone = dataclasses.replace(backbone, text=text)
    run = dataclasses.replace(run, policy=dataclasses.replace(run.policy, config=backbone))
    programs, _ = compile.rl_programs(run, chip, step_sizes.largest_step(run), expected)
    if refused := [program.name for program in programs if program.is_refused]:
        raise ValueError(
            f"with {depth} of its layers the model does not fit: the compiler refuses "
            f"{', '.join(refused)}; see --topology without --estimate"
        )
    pallas = kernel_prices(run, expected, chip)

    def kernels(hlo: str) -> PriceKernel:
        return kernels_of(hlo, peaks) if peaks else cycles.cycles_of(rates)

    return {
        program.name: (
            dataclasses.replace(program, hlo=""),
            cycles.seconds(program.hlo, rates, pallas[program.name], kernels(program.hlo)),
        )
        for program in programs
    }


def _extrapolated(
    run: Run, shallow: tuple[Program, Seconds], deeper: tuple[Program, Seconds]
) -> tuple[list[Work], Seconds]:
    """The works of all calls of the expected step and the seconds, at all layers."""
    low, high = _DEPTHS
    share = (run.policy.config.text.num_layers - low) / (high - low)

    def line(a: float, b: float) -> float:
        return a + (b - a) * share

    def works(a: Work, b: Work) -> Work:
        fields = {
            name: line(getattr(a, name), getattr(b, name))
            for name in ("flops", "hbm_bytes", "ici_bytes", "dcn_bytes")
        }
        return dataclasses.replace(a, **fields)

    def sums(a: dict[Key, float], b: dict[Key, float]) -> dict[Key, float]:
        return {key: max(line(a.get(key, 0.0), b.get(key, 0.0)), 0.0) for key in a | b}

    (few, at_few), (more, at_more) = shallow, deeper
    return (
        [works(*pair) for pair in zip(few.expected, more.expected, strict=True)],
        Seconds(sums(at_few.once, at_more.once), sums(at_few.each_pass, at_more.each_pass)),
    )


def _of_step(
    run: Run, name: str, cost: Seconds, expected: StepSizes, chip: Chip
) -> dict[str, float]:
    """Estimated seconds of all calls of a program in the expected step, by kind."""
    total: dict[str, float] = {}
    if name in ("rl update", "rl score"):
        num_scores = bool(run.objective.beta) + run.has_trainer_logp if name == "rl score" else 1
        for plan, _ in expected.updates:
            tokens = plan.row_tokens / run.config.rl.row_tokens
            patches = plan.row_patches / max(run.config.rl.row_patches, 1)
            for seconds, times in ((cost.once, 1), (cost.each_pass, plan.num_microbatches)):
                add(total, _scaled(seconds, tokens, patches), num_scores * times)
        return total
    if name == "rl reshard":
        return _scaled(cost.once, 1, 1)
    is_second = name.startswith("rl reflect")
    sizes = rollout_sizes(run)[is_second]
    schedule = expected.reflecting if is_second else expected.decoding
    if name.endswith("prefill"):
        longest, most = shapes.largest_bucket(run)
        for num_tokens, num_patches in schedule.prefills:
            tokens = num_tokens / (longest + sizes.num_context_tokens)
            patches = num_patches / max(most, 1)
            add(total, _scaled(cost.once, tokens, patches, (*_COMPUTED, "network")))
        return total
    once, each_step = (_scaled(seconds, 1, 1) for seconds in (cost.once, cost.each_pass))
    for call in schedule.calls:
        slots = call.num_slots / sizes.num_slots
        step = dict(each_step)
        step["compute"] = _decode_compute(run, cost.each_pass, slots, chip)
        step["gathers"] *= slots
        step["network"] *= slots
        step["kernels"] *= decode_attention(run, call, sizes, chip)
        add(total, once)
        add(total, step, call.num_steps)
    return total


def _decode_compute(run: Run, step: dict[Key, float], slots: float, chip: Chip) -> float:
    """Seconds of a decode step at this share of the compiled slots: compute or reading weights.

    Weights are prefetched beside the matmuls, which the compiler's cycles do not show.
    """
    text, layout = run.policy.config.text, workload.layout(run, is_decoding=True)
    unembedding = text.hidden_size * text.vocab_size
    layers = roofline.decoder_weights(text) - unembedding
    rate = chip.hbm_bandwidth * layout.product_parts / layout.itemsize  # weights per second
    return sum(
        max(slots * step.get((part, "compute"), 0.0), weights / rate)
        for part, weights in (("decoder", layers), ("logits", unembedding))
    )


def _scaled(
    seconds: dict[Key, float],
    tokens: float,
    patches: float,
    shrunk: tuple[str, ...] = _COMPUTED,
) -> dict[str, float]:
    """Seconds by kind of a batch with these shares of the compiled tokens and patches.

    The `shrunk` kinds have less of it.
    """
    total: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for (part, kind), value in seconds.items():
        share = patches if part == "tower" else tokens
        total[kind] += value * (share if kind in shrunk else 1)
    return total


def rows(result: Estimate) -> list[list[str]]:
    """A header and a row per part of the step, in seconds."""
    kinds = [*KINDS, "host"]
    table = [["part", "least", "estimated", *kinds]]
    for part in PARTS:
        seconds = result.seconds[part]
        cells = [result.least[part], sum(seconds.values())]
        cells += [seconds.get(kind, 0.0) for kind in kinds]
        table.append([part, *(f"{cell:.2f}" for cell in cells)])
    return table


def assumptions(result: Estimate) -> list[str]:
    """What the estimate is made of, for people."""
    rates, peaks = result.rates, result.peaks
    of_walks = (GPU_KERNEL_SHARE if peaks else KERNEL_SHARE).values()
    shares = ", ".join(f"{share:.0%}" for share in of_walks)
    kernels = f"  kernels: {shares} of the peak (forward, gradient of queries, of keys and values)"
    start = "An estimate, not a measurement. Compute is "
    depths = f"of a program of {_DEPTHS[0]} and {_DEPTHS[1]} decoder layers, extrapolated"
    lines = [
        f"  network: what compute does not cover, at {rates.link / 1e9:.0f} GB/s, and "
        f"{rates.latency * 1e6:g} µs for a synchronous collective",
        f"  host: {_HOST_CALL * 1e3:g} ms for a call of a decode program; offloaded rollouts move "
        f"at {(_PCIE if peaks else _HOST_BANDWIDTH) / 1e9:g} GB/s",
    ]
    if peaks:
        return [
            f"{start}the products at {peaks.flops / 1e12:.0f} TFLOP/s or the bytes at "
            f"{peaks.bandwidth / 1e9:.0f} GB/s, whichever takes longer, of every kernel {depths}. "
            "Priced by hand:",
            *lines,
            f"  latency: at least {peaks.launch * 1e6:g} µs for a kernel",
            f"{kernels}; in decoding {GPU_DECODE_SHARE:.0%} of the bandwidth",
        ]
    return [
        f"{start}the compiler's cycles {depths}, at {rates.clock / 1e9:.4g} GHz. Priced by hand:",
        *lines,
        f"{kernels}; in decoding {BANDWIDTH_SHARE:.0%} of the bandwidth for the blocks of the KV "
        f"caches, and {DECODE_KERNEL * 1e6:g} µs",
        f"  gathers: read and written at {rates.gather / 1e9:.0f} GB/s",
    ]
