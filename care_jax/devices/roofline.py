"""What a chip can do, and what a program asks of it: FLOPs, bytes and the least time they take.

Counted from shapes, since the compiler's own count takes a scanned layer once. A product of
[m, k] with [k, n] is 2mkn FLOPs; norms, rotations, softmax and sampling are left out, and so are
the bytes of activations. Padding counts as computed. Attention counts the pairs that the masks
leave visible.

Letters: P prompt tokens, N image patches, R rows per prompt, T response tokens.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Int

from models.config import BackboneConfig, TextConfig, VisionConfig

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip.

    Attributes:
        flops: bfloat16 FLOPs per second, without sparsity.
        hbm: bytes of memory that programs can use.
        hbm_bandwidth: bytes per second to and from it.
        ici_bandwidth: bytes per second from the other chips, over all links.
    """

    flops: float
    hbm: float
    hbm_bandwidth: float
    ici_bandwidth: float


_TOWER_MLPS = {"qwen2_5_vl": 3, "qwen3_vl": 2}  # matrices of a tower's MLP: gated, or not

# Of a TPU's 16, 95 and 32 GiB the compiler keeps some to itself. Of a GPU's 79.1 and 141 GiB, 90%:
# CUDA and NCCL take theirs beside what XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 reserves for programs.
# Its network is NVLink, one way; between nodes it is slower.
CHIPS = {
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 200e9),
    "v5p": Chip(459e12, 95.74 * GIB, 2765e9, 600e9),
    "v6e": Chip(918e12, 31.25 * GIB, 1640e9, 448e9),
    "h100": Chip(989e12, 0.9 * 79.1 * GIB, 3350e9, 450e9),
    "h200": Chip(989e12, 0.9 * 141.0 * GIB, 4800e9, 450e9),
}


# bfloat16 FLOPs per second of what jax calls `device_kind`, without sparsity.
PEAK_FLOPS = {
    "TPU v5 lite": CHIPS["v5e"].flops,
    "TPU v5": CHIPS["v5p"].flops,
    "TPU v5p": CHIPS["v5p"].flops,
    "TPU v6 lite": CHIPS["v6e"].flops,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What a program does.

    Attributes:
        flops: of all chips together.
        hbm_bytes: that one chip reads and writes.
        ici_bytes: that one chip receives from others; estimated until its program is compiled.
        tokens: sampled, or learned from; 0 where that is not what it is for.
        num_passes: of the program's loop of unknown length: microbatches, or sampled tokens.
    """

    flops: float = 0
    hbm_bytes: float = 0
    ici_bytes: float = 0
    tokens: int = 0
    num_passes: int = 0

    def bounds(self, chip: Chip, num_chips: int) -> dict[str, float]:
        """Seconds of computing, memory and network, each at its peak."""
        return {
            "compute": self.flops / (num_chips * chip.flops),
            "memory": self.hbm_bytes / chip.hbm_bandwidth,
            "network": self.ici_bytes / chip.ici_bandwidth,
        }

    def seconds(self, chip: Chip, num_chips: int) -> float:
        """The least time: the longest of the three."""
        return max(self.bounds(chip, num_chips).values())


@dataclasses.dataclass(frozen=True)
class Packed:
    """What one forward over packed trees computes.

    Attributes:
        tokens, patches: that pass the layers, padding included.
        pairs: (query, visible key) pairs of tokens.
        patch_pairs: pairs of patches of the same image.
        scored: response tokens, whose logits are computed.
    """

    tokens: int
    patches: int
    pairs: int
    patch_pairs: int
    scored: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is decoded: prompts of P tokens and N patches, each with R rows of room for T tokens."""

    prompts: int
    prompt_tokens: int
    patches: int
    rows: int
    row_tokens: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a program is spread out.

    Attributes:
        batch_parts: shards of a batch.
        weight_parts: shards of the weights, which are all-gathered where they are used.
        product_parts: shards of every product (tensor parallel).
        itemsize: bytes of a weight or activation that is computed with.
    """

    batch_parts: int
    weight_parts: int
    product_parts: int
    itemsize: int


def tree_pairs(
    prompt: Int[np.ndarray, " N"], responses: Int[np.ndarray, "N R"]
) -> Int[np.ndarray, " N"]:
    """(query, visible key) pairs of each tree: a prompt and the responses that see it.

    Args:
        prompt: tokens of each prompt.
        responses: tokens of each of its responses.
    """
    prompt, responses = prompt.astype(np.int64), responses.astype(np.int64)
    return _causal(prompt) + (responses * prompt[:, None] + _causal(responses)).sum(-1)


def _causal(num_tokens):
    return num_tokens * (num_tokens + 1) // 2


def decoder_flops(text: TextConfig, num_tokens: int, num_pairs: int, num_scored: int) -> float:
    """Forward of the decoder.

    Args:
        text: its configuration.
        num_tokens: that pass its layers.
        num_pairs: (query, visible key) pairs.
        num_scored: tokens whose logits are computed.
    """
    D, F, H = text.hidden_size, text.intermediate_size, text.head_dim
    heads = 2 * text.num_heads + 2 * text.num_kv_heads  # q, out; k, v
    layer = 2 * num_tokens * (D * H * heads + 3 * D * F) + 4 * text.num_heads * H * num_pairs
    return text.num_layers * layer + 2 * D * text.vocab_size * num_scored


def tower_flops(
    vision: VisionConfig, family: str, num_patches: int, num_pairs: int | None = None
) -> float:
    """Forward of the vision tower, in whole windows.

    Args:
        vision: its configuration.
        family: of the backbone.
        num_patches: that pass its layers.
        num_pairs: of patches of the same image; None where they are all of one.
    """
    D, F, N = vision.hidden_size, vision.intermediate_size, num_patches
    whole = N * N if num_pairs is None else num_pairs
    mlp = _TOWER_MLPS[family] * D * F
    num_windowed = 0
    if vision.window_size:
        num_windowed = vision.num_layers - len(vision.full_attention_layers)
    pairs = (vision.num_layers - num_windowed) * whole + num_windowed * N * vision.window_side**2
    width = vision.merge_size**2 * D
    merger = width * width + width * vision.output_size
    num_mergers = 1 + len(vision.deepstack_layers)
    dense = N * (vision.patch_dim * D + vision.num_layers * (4 * D * D + mlp))
    return 2 * (dense + N // vision.merge_size**2 * merger * num_mergers) + 4 * D * pairs


def forward_flops(config: BackboneConfig, packed: Packed) -> tuple[float, float, float]:
    """(tower, decoder's layers, logits) of one forward over packed trees."""
    tower = tower_flops(config.vision, config.family, packed.patches, packed.patch_pairs)
    layers = decoder_flops(config.text, packed.tokens, packed.pairs, 0)
    return tower, layers, decoder_flops(config.text, 0, 0, packed.scored)


def train_flops(
    config: BackboneConfig,
    packed: Packed,
    *,
    remat: str,
    freeze_vision: bool = False,
    has_adapters: bool = False,
) -> float:
    """Forward and backward as they are computed, what is recomputed included.

    A backward pass is two forwards: gradients of the inputs and of the weights. Adapters leave out
    the second of these and the tower's both; the logits' weights are trained unless adapters are.
    "dots" recomputes no product with weights, "layer" all of them; the logits always are.
    """
    tower, layers, logits = forward_flops(config, packed)
    is_recomputed = remat == "layer"
    num_tower = 1 if freeze_vision or has_adapters else 3 + is_recomputed
    num_text = 2 if has_adapters else 3
    return num_tower * tower + (num_text + is_recomputed) * layers + (num_text + 1) * logits


def model_flops(
    config: BackboneConfig,
    prompt_sizes: Int[np.ndarray, "N 2"],
    num_row_tokens: Int[np.ndarray, "N R"],
) -> float:
    """What one update over N prompts is worth: three forwards of real tokens, nothing recomputed.

    Args:
        config: of the backbone.
        prompt_sizes: tokens and patches of each prompt.
        num_row_tokens: response tokens of each of its R rows; a prompt without any counts nothing.
    """
    is_trained = num_row_tokens.any(-1)
    (prompts, patches), rows = prompt_sizes[is_trained].T, num_row_tokens[is_trained]
    num_pairs = int(tree_pairs(prompts, rows).sum())
    num_tokens, num_scored = int(prompts.sum() + rows.sum()), int(rows.sum())
    towers = sum(tower_flops(config.vision, config.family, int(n)) for n in patches)
    return 3 * (towers + decoder_flops(config.text, num_tokens, num_pairs, num_scored))


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
    """An update: each microbatch gathers the weights in every pass and scatters their gradient."""
    num_weights = decoder_weights(config.text)
    gathered = num_weights * layout.itemsize / layout.product_parts
    num_passes = 2 + (remat != "none")
    # Weights, two moments and a gradient in float32, each read and written.
    state = 0 if has_adapters else 32 * num_weights / layout.weight_parts / layout.product_parts
    return Work(
        flops=train_flops(
            config, packed, remat=remat, freeze_vision=freeze_vision, has_adapters=has_adapters
        ),
        hbm_bytes=num_microbatches * num_passes * gathered + state,
        ici_bytes=num_microbatches * (num_passes + 1) * gathered * (1 - 1 / layout.weight_parts),
        tokens=packed.scored,
        num_passes=num_microbatches,
    )


def score_work(
    config: BackboneConfig, packed: Packed, layout: Layout, *, num_microbatches: int
) -> Work:
    """The log-probabilities of all responses: a forward."""
    gathered = decoder_weights(config.text) * layout.itemsize / layout.product_parts
    return Work(
        flops=sum(forward_flops(config, packed)),
        hbm_bytes=num_microbatches * gathered,
        ici_bytes=num_microbatches * gathered * (1 - 1 / layout.weight_parts),
        tokens=packed.scored,
        num_passes=num_microbatches,
    )


def prefill_work(config: BackboneConfig, rows: Rows, layout: Layout) -> Work:
    """The prompts and their images, once each."""
    tower = rows.prompts * tower_flops(config.vision, config.family, rows.patches)
    num_tokens = rows.prompts * rows.prompt_tokens
    num_pairs = rows.prompts * _causal(rows.prompt_tokens)
    return Work(
        flops=tower + decoder_flops(config.text, num_tokens, num_pairs, 0),
        hbm_bytes=decoder_weights(config.text) * layout.itemsize / layout.product_parts,
    )


def decode_work(
    config: BackboneConfig, rows: Rows, layout: Layout, *, num_steps: int, num_tokens: int
) -> Work:
    """Some steps of all rows, idle ones too.

    Every step reads the weights, and all of the cache that there is room for.

    Args:
        config: of the backbone.
        rows: with the room that each has.
        layout: of the program.
        num_steps: tokens that a row which is never idle samples.
        num_tokens: that all rows sample.
    """
    text = config.text
    num_rows = rows.prompts * rows.rows
    num_pairs = num_rows * num_steps * (rows.prompt_tokens + rows.row_tokens)
    kept = rows.prompts * rows.prompt_tokens + num_rows * rows.row_tokens
    cache = 2 * text.num_layers * text.num_kv_heads * text.head_dim * kept * layout.itemsize
    cache /= layout.batch_parts * math.gcd(text.num_kv_heads, layout.product_parts)
    weights = decoder_weights(text) * layout.itemsize / layout.product_parts
    num_read = num_rows * num_steps
    return Work(
        flops=decoder_flops(text, num_read, num_pairs, num_read),
        hbm_bytes=num_steps * (weights + cache),
        tokens=num_tokens,
        num_passes=num_steps,
    )


def decoder_weights(text: TextConfig) -> int:
    """Weights that a token passes: the layers' products and the unembedding."""
    D, H = text.hidden_size, text.head_dim
    heads = 2 * text.num_heads + 2 * text.num_kv_heads
    layer = D * H * heads + 3 * D * text.intermediate_size
    return text.num_layers * layer + D * text.vocab_size
