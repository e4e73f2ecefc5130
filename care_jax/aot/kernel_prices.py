"""Seconds of the Pallas attention kernels of a run, of which its compiled text says nothing.

Training and prefill compute the blocks that a row sees, as `packed.block_mask` lists them, at a
share of the peak. In decoding the blocks of the KV caches are read at a share of the bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from care_jax.aot import workload
from care_jax.aot.step_sizes import StepSizes
from care_jax.decoding.schedule import Sizes
from care_jax.decoding.simulation import Call
from care_jax.devices.flops import Chip
from care_jax.packing.plan import RowPlan
from care_jax.packing.trees import Part
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.run.run import Run
from models.attention.kernels import DKV, DQ, FORWARD
from models.attention.packed import AttentionImpl, block_mask

Spans = tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"]]  # first and last query of each key
# In decoding, by hand. For one kv head the compiler schedules 91 cycles for a row's block of 128
# slots and 175 for a prompt's of 256 with 4 rows, 260 with 8: 61, 116 and 173 ns of a v5e. Copies
# of the two take 81 and 161 ns at the full bandwidth; those in flight hide 0.96 µs of latency.
DECODE_KERNEL = 2e-6  # seconds of a TPU before the first block arrives, and after the last
# Share of the peak of an attention kernel, from the bundles that the compiler schedules for a pair
# of blocks of 896 query rows and 512 keys with head dim 128: 3040, 3000 and 3930 cycles.
KERNEL_SHARE = {FORWARD: 0.59, DQ: 0.90, DKV: 0.91}
# Measured on an H100 (docs/results/h100.md), the last by hand: as the walk before it.
GPU_KERNEL_SHARE = {FORWARD: 0.24, DQ: 0.34, DKV: 0.34}
BANDWIDTH_SHARE = 0.85  # of any chip's, by hand: what kernels reach that wait for memory
GPU_DECODE_SHARE = 0.4  # of a GPU's bandwidth, in decoding: measured while others used the GPU too
_LANES = 128  # a head dim is padded to a multiple
_ARRAY = re.compile(r"\b[a-z]+\d+\[([\d,]+)\]")


def kernel_prices(
    run: Run, expected: StepSizes, chip: Chip
) -> dict[str, Callable[[str, str], float]]:
    """Of each program, the price of a Pallas kernel: (part of the model, results) -> seconds.

    That of a decode step is 1 for all kernels of a layer: see `decode_attention`.
    """
    text = run.policy.config.text
    group = text.num_heads // text.num_kv_heads
    vision = run.policy.config.vision
    windowed = 0.0  # share of the tower's layers
    if vision is not None and vision.window_size:
        windowed = 1 - len(vision.full_attention_layers) / vision.num_layers

    def of_pairs(
        impl: AttentionImpl, num_rows: int, tokens: list[Spans], patches: list[Spans]
    ) -> Callable[[str, str], float]:
        """The price at the average scores of these rows, of which a chip has `num_rows`.

        A kernel of the tower costs the average of its windowed and other layers.
        """
        is_gpu = impl.name == "gpu"
        windows = []
        if vision is not None and windowed:
            windows = [_windows(*each, vision.window_side**2) for each in patches]
        whole = (1 - windowed) * _num_scores(patches, 1, impl)
        pairs = {
            "decoder": _num_scores(tokens, group, impl),
            "tower": whole + windowed * _num_scores(windows, 1, impl),
        }

        def price(part: str, results: str) -> float:
            first, *others = ([int(n) for n in each.split(",")] for each in _ARRAY.findall(results))
            walk = DQ if not others else DKV if others == [first] else FORWARD
            head_dim = math.ceil(first[-1] / _LANES) * _LANES
            # [kv heads, query rows or keys, head dim], on GPUs [tokens, query heads, head dim].
            heads = first[1] if is_gpu else first[0] * (group if part == "decoder" else 1)
            flops = 2 * walk.num_products * pairs.get(part, 0.0) * head_dim * heads * num_rows
            return flops / ((GPU_KERNEL_SHARE if is_gpu else KERNEL_SHARE)[walk] * chip.flops)

        return price

    planned = [(plan, row) for plan, _ in expected.updates for row in plan.rows if row]
    update = of_pairs(
        implementation(run),
        run.config.rl.microbatch_size // workload.layout(run).batch_parts,
        [_reach(*each) for each in planned],
        [_images(*each) for each in planned],
    )
    prices = {"rl reshard": update, "rl score": update, "rl update": update}
    schedules = expected.decoding, expected.reflecting
    for name, sizes, schedule in zip(
        ("rl decode", "rl reflect"), rollout_sizes(run), schedules, strict=True
    ):
        prices[f"{name} prefill"] = of_pairs(
            implementation(run, is_decoding=True),
            sizes.num_new // workload.layout(run, is_decoding=True).batch_parts,
            [_whole(num_tokens, is_causal=True) for num_tokens, _ in schedule.prefills],
            [_whole(num_patches) for _, num_patches in schedule.prefills],
        )
        num_kernels = 2 if implementation(run, is_decoding=True).name == "gpu" else 1
        prices[name] = lambda part, results, n=num_kernels: 1 / n
    return prices


def _num_scores(rows: list[Spans], group: int, impl: AttentionImpl) -> float:
    """Scores of a query head in the blocks that a row's attention computes, on average."""
    numbers = []
    for first, last in rows:
        mask = block_mask(first[None], last[None], group, impl) if len(first) else None
        if mask is not None and mask.by_query is not None and mask.blocks is not None:
            numbers.append(int(mask.by_query.starts[-1]) * math.prod(mask.blocks))
    return float(np.mean(numbers)) if numbers else 0.0


def _whole(size: int, is_causal: bool = False) -> Spans:
    """A row that one prompt or image fills."""
    tokens = np.arange(size)
    return tokens if is_causal else np.zeros_like(tokens), np.full_like(tokens, size - 1)


def _reach(plan: RowPlan, row: tuple[Part, ...]) -> Spans:
    """Of the tokens of a planned row of trees."""
    last, start = np.arange(plan.row_tokens), 0
    for part in row:
        prompt = start
        start += int(plan.sizes.prompt[part.tree])
        for branch in part.branches:
            stop = start + int(plan.sizes.branches[part.tree, branch])
            last[start:stop], start = stop - 1, stop
        last[prompt : prompt + int(plan.sizes.prompt[part.tree])] = start - 1
    return np.arange(plan.row_tokens), last


def _images(plan: RowPlan, row: tuple[Part, ...]) -> Spans:
    """Of the patches of a planned row, with one image per prompt."""
    first, last = np.tile(np.arange(plan.row_patches), (2, 1))
    start = 0
    for part in row:
        stop = start + int(plan.sizes.patches[part.tree])
        first[start:stop], last[start:stop], start = start, stop - 1, stop
    return first, last


def _windows(first: np.ndarray, last: np.ndarray, size: int) -> Spans:
    """Of the patches of such images in windows of `size` patches."""
    start = np.arange(len(first))
    start -= (start - first) % size
    return start, np.minimum(last, start + size - 1)


def implementation(run: Run, is_decoding: bool = False) -> AttentionImpl:
    """The attention of a run, on one shard."""
    impl = run.attention(is_decoding=is_decoding)
    return dataclasses.replace(impl, mesh=None, batch_axes=(), head_axes=())


def decode_attention(run: Run, call: Call, sizes: Sizes, chip: Chip) -> float:
    """Seconds of a decode step of this call in the attention kernels of a layer."""
    text, layout = run.policy.config.text, workload.layout(run, is_decoding=True)
    impl = implementation(run, is_decoding=True)
    positions = sum(workload.positions_read(call, sizes, impl))
    kv_heads = max(text.num_kv_heads / layout.product_parts, 1)
    num_bytes = positions * 2 * kv_heads * text.head_dim * layout.itemsize / layout.batch_parts
    share = GPU_DECODE_SHARE if impl.name == "gpu" else BANDWIDTH_SHARE
    reading = num_bytes / max(call.num_steps, 1) / (share * chip.hbm_bandwidth)
    return reading + (DECODE_KERNEL if impl.name == "tpu" else 0.0)
