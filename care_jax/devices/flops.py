"""FLOPs of a model, counted from shapes, and the published peaks of chips.

XLA's cost analysis counts a scanned layer only once. A matmul of [m, k] with [k, n] is 2mkn FLOPs.
Norms, rotary embeddings, softmax and sampling are left out. Padding counts as computed. Attention
counts the (query, key) pairs that the masks leave visible.

Letters: P prompt tokens, N image patches, R rows per prompt, T response tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from models.config import BackboneConfig, TextConfig, VisionConfig

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published specifications of one chip."""

    flops: float  # dense bfloat16 FLOPs per second
    hbm: float  # bytes of memory that programs can use
    hbm_bandwidth: float  # bytes per second to and from HBM
    ici_bandwidth: float  # bytes per second received from other chips, over all links
    dcn_bandwidth: float  # bytes per second received from other slices of TPUs or nodes of GPUs


# The compiler reserves some of a TPU's 16, 95 and 32 GiB. Programs get 90% of a GPU's memory
# (XLA_PYTHON_CLIENT_MEM_FRACTION=0.9); CUDA and NCCL allocate from the rest. ICI of a GPU is NVLink
# or PCIe 4.0 x16 in one direction. DCN is a chip's share of its host's network cards: 25, 50 and
# 100 Gbit/s for v5e, v5p and v6e, one card of 200 or 400 Gbit/s for each A100, H100 and H200, and
# 25 Gbit/s for the others. NVIDIA's data sheets of L4 and L40S give FLOPs with sparsity, twice the
# dense ones here; those of the RTX 4090 are for float32 sums, from the Ada whitepaper.
CHIPS = {
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 200e9, 3.125e9),
    "v5p": Chip(459e12, 95.74 * GIB, 2765e9, 600e9, 6.25e9),
    "v6e": Chip(918e12, 31.25 * GIB, 1640e9, 448e9, 12.5e9),
    "rtx4090": Chip(165.2e12, 0.9 * 23.52 * GIB, 1008e9, 32e9, 3.125e9),
    "l4": Chip(121e12, 0.9 * 22.03 * GIB, 300e9, 32e9, 3.125e9),
    "a10g": Chip(70e12, 0.9 * 22.03 * GIB, 600e9, 32e9, 3.125e9),
    "l40s": Chip(362e12, 0.9 * 44.34 * GIB, 864e9, 32e9, 3.125e9),
    "a100-40": Chip(312e12, 0.9 * 39.39 * GIB, 1555e9, 300e9, 25e9),
    "a100": Chip(312e12, 0.9 * 79.25 * GIB, 2039e9, 300e9, 25e9),
    "h100": Chip(989e12, 0.9 * 79.1 * GIB, 3350e9, 450e9, 50e9),
    "h200": Chip(989e12, 0.9 * 139.7 * GIB, 4800e9, 450e9, 50e9),
}
# Dense bfloat16 FLOPs per second, by JAX's `device_kind`.
PEAK_FLOPS = {
    "TPU v5 lite": CHIPS["v5e"].flops,
    "TPU v5": CHIPS["v5p"].flops,
    "TPU v5p": CHIPS["v5p"].flops,
    "TPU v6 lite": CHIPS["v6e"].flops,
    "NVIDIA GeForce RTX 4090": CHIPS["rtx4090"].flops,
    "NVIDIA L4": CHIPS["l4"].flops,
    "NVIDIA A10G": CHIPS["a10g"].flops,
    "NVIDIA L40S": CHIPS["l40s"].flops,
    "NVIDIA A100-SXM4-40GB": CHIPS["a100-40"].flops,
    "NVIDIA A100-SXM4-80GB": CHIPS["a100"].flops,
    "NVIDIA H100 80GB HBM3": CHIPS["h100"].flops,
    "NVIDIA H200": CHIPS["h200"].flops,
}


@dataclasses.dataclass(frozen=True)
class Packed:
    """The size of one forward over packed trees."""

    tokens: int  # computed, padding included
    patches: int  # likewise
    pairs: int  # (query, visible key) pairs of tokens
    patch_pairs: int  # pairs of patches of the same image
    scored: int  # response tokens, whose logits are computed


def tree_pairs(
    prompt: Int[np.ndarray, " N"], responses: Int[np.ndarray, "N R"]
) -> Int[np.ndarray, " N"]:
    """(query, visible key) pairs of each tree, from the tokens of a prompt and its responses."""
    prompt, responses = prompt.astype(np.int64), responses.astype(np.int64)
    return causal_pairs(prompt) + (responses * prompt[:, None] + causal_pairs(responses)).sum(-1)


def causal_pairs(num_tokens):
    """Pairs of a query and a key that it sees in a causal sequence, its own included."""
    return num_tokens * (num_tokens + 1) // 2


def decoder_flops(text: TextConfig, num_tokens: int, num_pairs: int, num_scored: int) -> float:
    """FLOPs of a forward of the decoder; the logits of `num_scored` tokens are computed.

    A token of a sparse decoder is computed by the experts that are chosen for it.
    """
    D, F, H = text.hidden_size, text.intermediate_size, text.head_dim
    heads = 2 * text.num_heads + 2 * text.num_kv_heads  # q, out; k, v
    mlp = D * text.num_experts + 3 * D * F * (text.num_experts_per_token or 1)
    layer = 2 * num_tokens * (D * H * heads + mlp) + 4 * text.num_heads * H * num_pairs
    return text.num_layers * layer + 2 * D * text.vocab_size * num_scored


def tower_flops(
    vision: VisionConfig | None, num_patches: int, num_pairs: int | None = None
) -> float:
    """FLOPs of a forward of the vision tower; every window counts as full. 0 without a tower.

    `num_pairs` are pairs of patches of the same image; None if all patches are of one image.
    """
    if vision is None:
        return 0.0
    D, F, N = vision.hidden_size, vision.intermediate_size, num_patches
    whole = N * N if num_pairs is None else num_pairs
    mlp = (3 if vision.gated else 2) * D * F
    num_full = len(vision.full_attention_layers)
    num_windowed = vision.num_layers - num_full if vision.window_size else 0
    pairs = (vision.num_layers - num_windowed) * whole + num_windowed * N * vision.window_side**2
    width = vision.merge_size**2 * D
    merger = width * width + width * vision.output_size
    num_mergers = 1 + len(vision.deepstack_layers)
    dense = N * (vision.patch_dim * D + vision.num_layers * (4 * D * D + mlp))
    return 2 * (dense + N // vision.merge_size**2 * merger * num_mergers) + 4 * D * pairs


def forward_flops(config: BackboneConfig, packed: Packed) -> tuple[float, float, float]:
    """FLOPs of (vision tower, decoder layers, logits) in one forward over packed trees."""
    tower = tower_flops(config.vision, packed.patches, packed.patch_pairs)
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
    """FLOPs of forward and backward, rematerialisation included.

    A backward pass costs two forwards: gradients of the inputs and of the weights. With adapters
    there are no weight gradients and no backward of the vision tower. remat="dots" recomputes no
    matmul with weights, "layer" all of them; the logits are always recomputed.
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
    *,
    freeze_vision: bool = False,
    has_adapters: bool = False,
) -> float:
    """Model FLOPs of one update over N prompts: three forwards of real tokens, without remat.

    Frozen weights have no gradient: with adapters the decoder counts two forwards and the tower
    one. `prompt_sizes` are tokens and patches of each prompt, `num_row_tokens` the tokens of each
    response; a prompt without any counts 0.
    """
    is_trained = num_row_tokens.any(-1)
    (prompts, patches), rows = prompt_sizes[is_trained].T, num_row_tokens[is_trained]
    num_pairs = int(tree_pairs(prompts, rows).sum())
    num_tokens, num_scored = int(prompts.sum() + rows.sum()), int(rows.sum())
    towers = sum(tower_flops(config.vision, int(n)) for n in patches)
    decoder = decoder_flops(config.text, num_tokens, num_pairs, num_scored)
    num_text = 2 if has_adapters else 3
    return (1 if freeze_vision or has_adapters else 3) * towers + num_text * decoder
