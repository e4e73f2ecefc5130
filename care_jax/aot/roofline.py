"""Roofline of a program: its FLOPs and bytes, and its least time at the peak rates of a chip.

FLOPs are counted by `devices.flops`. The bytes of activations are left out.

Letters: P prompt tokens, N image patches, R rows per prompt, T response tokens.
"""

from __future__ import annotations

import dataclasses
import math

from care_jax.devices import flops
from care_jax.devices.flops import Chip, Packed
from models.config import BackboneConfig, TextConfig


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs and bytes of a program."""

    flops: float = 0  # of all chips together
    hbm_bytes: float = 0  # read and written by one chip
    ici_bytes: float = 0  # received by one chip; an estimate until the program is compiled
    dcn_bytes: float = 0  # received from other slices or nodes; 0 until the program is compiled
    tokens: int = 0  # sampled or trained on; 0 if the program does neither
    num_passes: int = 0  # iterations of the loop of unknown length: microbatches or decode steps

    def bounds(self, chip: Chip, num_chips: int) -> dict[str, float]:
        """Seconds for compute, memory traffic and both networks, each at its peak rate."""
        return {
            "compute": self.flops / (num_chips * chip.flops),
            "memory": self.hbm_bytes / chip.hbm_bandwidth,
            "network": self.ici_bytes / chip.ici_bandwidth,
            "slices": self.dcn_bytes / chip.dcn_bandwidth,
        }

    def seconds(self, chip: Chip, num_chips: int) -> float:
        """The least time: the maximum of `bounds`."""
        return max(self.bounds(chip, num_chips).values())


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """Prompts of P tokens and N patches, each with R rows of T cache slots."""

    prompts: int
    prompt_tokens: int
    patches: int
    rows: int
    row_tokens: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a program is sharded."""

    batch_parts: int  # shards of a batch
    weight_parts: int  # FSDP shards of the weights, all-gathered for use
    product_parts: int  # tensor-parallel shards of every matmul
    itemsize: int  # bytes of a weight or activation in the compute dtype


def train_work(
    config: BackboneConfig,
    packed: Packed,
    layout: Layout,
    *,
    num_microbatches: int,
    remat: str,
    freeze_vision: bool = False,
    has_adapters: bool = False,
) -> Work:
    """An update: per microbatch, an all-gather in every pass and a reduce-scatter of gradients."""
    num_weights = decoder_weights(config.text)
    gathered = num_weights * layout.itemsize / layout.product_parts
    num_passes = 2 + (remat != "none")
    # Weights, two Adam moments and the gradient in float32, each read and written.
    state = (not has_adapters) * 32 * num_weights / layout.weight_parts / layout.product_parts
    frozen = {"freeze_vision": freeze_vision, "has_adapters": has_adapters}
    return Work(
        flops=flops.train_flops(config, packed, remat=remat, **frozen),
        hbm_bytes=num_microbatches * num_passes * gathered + state,
        ici_bytes=num_microbatches * (num_passes + 1) * gathered * (1 - 1 / layout.weight_parts),
        tokens=packed.scored,
        num_passes=num_microbatches,
    )


def score_work(
    config: BackboneConfig, packed: Packed, layout: Layout, *, num_microbatches: int
) -> Work:
    """The log-probabilities of all responses: one forward."""
    gathered = decoder_weights(config.text) * layout.itemsize / layout.product_parts
    return Work(
        flops=sum(flops.forward_flops(config, packed)),
        hbm_bytes=num_microbatches * gathered,
        ici_bytes=num_microbatches * gathered * (1 - 1 / layout.weight_parts),
        tokens=packed.scored,
        num_passes=num_microbatches,
    )


def prefill_work(config: BackboneConfig, batch: DecodeBatch, layout: Layout) -> Work:
    """Prefill: a forward of each prompt and its images."""
    tower = batch.prompts * flops.tower_flops(config.vision, batch.patches)
    num_tokens = batch.prompts * batch.prompt_tokens
    num_pairs = batch.prompts * flops.causal_pairs(batch.prompt_tokens)
    return Work(
        flops=tower + flops.decoder_flops(config.text, num_tokens, num_pairs, 0),
        hbm_bytes=decoder_weights(config.text) * layout.itemsize / layout.product_parts,
    )


def decode_work(
    config: BackboneConfig,
    batch: DecodeBatch,
    layout: Layout,
    *,
    num_steps: int,
    num_tokens: int,
    num_read: tuple[int, int] | None = None,
) -> Work:
    """Decode steps of all rows, including idle ones.

    Every step reads the weights and the KV cache. `batch` has the allocated cache slots; all rows
    together sample `num_tokens`. `num_read` has the cache slots read of prompts and of rows, summed
    over the steps; None: all.
    """
    text = config.text
    num_rows = batch.prompts * batch.rows
    allocated = batch.prompts * batch.prompt_tokens, num_rows * batch.row_tokens
    of_prompts, of_rows = num_read or (num_steps * allocated[0], num_steps * allocated[1])
    cache = 2 * text.num_layers * text.num_kv_heads * text.head_dim * (of_prompts + of_rows)
    cache *= layout.itemsize
    cache /= layout.batch_parts * math.gcd(text.num_kv_heads, layout.product_parts)
    weights = decoder_weights(text) * layout.itemsize / layout.product_parts
    num_computed, num_pairs = num_rows * num_steps, batch.rows * of_prompts + of_rows
    return Work(
        flops=flops.decoder_flops(text, num_computed, num_pairs, num_computed),
        hbm_bytes=num_steps * weights + cache,
        tokens=num_tokens,
        num_passes=num_steps,
    )


def decoder_weights(text: TextConfig) -> int:
    """Number of weights in the matmuls of the decoder layers, all experts, and the unembedding."""
    D, H, E = text.hidden_size, text.head_dim, text.num_experts
    heads = 2 * text.num_heads + 2 * text.num_kv_heads
    layer = D * H * heads + D * E + 3 * D * text.intermediate_size * (E or 1)
    return text.num_layers * layer + D * text.vocab_size
