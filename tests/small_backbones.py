"""A small backbone of every family, and what transformers' model of it is given."""

import dataclasses

import jax
import numpy as np
import pytest

from models.config import (
    IMAGE_TOKENS,
    BackboneConfig,
    RopeScaling,
    TextConfig,
    VisionConfig,
)
from models.families import FAMILIES
from models.positions import ImagePatches

WITH_TOWER = [name for name, family in FAMILIES.items() if family.tower]
all_families = pytest.mark.parametrize("family", FAMILIES, indirect=True)


def small_backbone(family: str) -> BackboneConfig:
    small = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "qwen3_vl_moe": qwen3_vl_moe}
    return small[family]() if family in small else text_only(family)


def qwen2_5_vl() -> BackboneConfig:
    """Untied, GQA, four tower layers of both kinds, windows of 4 x 4 patches."""
    return BackboneConfig(
        vision=VisionConfig(
            num_layers=4,
            hidden_size=32,
            intermediate_size=44,
            num_heads=2,
            output_size=48,
            patch_size=4,
            temporal_patch_size=2,
            in_channels=3,
            merge_size=2,
            window_size=16,
            full_attention_layers=(1, 3),
        ),
        text=TextConfig(
            num_layers=3,
            hidden_size=48,
            intermediate_size=80,
            num_heads=6,
            num_kv_heads=2,
            head_dim=8,
            vocab_size=120,
            norm_eps=1e-5,
            rope_theta=10000.0,
            mrope_section=(1, 1, 2),
            tie_embeddings=False,
            max_position_embeddings=512,
        ),
        family="qwen2_5_vl",
        image_token_id=110,
        video_token_id=111,
        vision_start_token_id=112,
        vision_end_token_id=113,
        eos_token_ids=(114,),
        pad_token_id=115,
    )


def qwen3_vl() -> BackboneConfig:
    """Heads that are not hidden_size / num_heads, two DeepStack layers of four, 5 x 5 positions."""
    other = qwen2_5_vl()
    vision = dataclasses.replace(
        other.vision,
        window_size=0,
        full_attention_layers=(),
        num_position_embeddings=25,
        deepstack_layers=(0, 2),
        gated=False,
    )
    text = dataclasses.replace(
        other.text,
        head_dim=16,
        mrope_section=(4, 2, 2),
        qkv_bias=False,
        qk_norm=True,
        mrope_interleaved=True,
    )
    return dataclasses.replace(other, vision=vision, text=text, family="qwen3_vl")


def qwen3_vl_moe() -> BackboneConfig:
    """Eight experts, of which a token has three."""
    other = qwen3_vl()
    sparse = {"num_experts": 8, "num_experts_per_token": 3, "intermediate_size": 40}
    text = dataclasses.replace(other.text, **sparse)
    return dataclasses.replace(other, text=text, family="qwen3_vl_moe")


def text_only(family: str) -> BackboneConfig:
    """Heads that are not hidden_size / num_heads; Llama's rotary frequencies are stretched."""
    scaling = RopeScaling(4.0, 1.0, 4.0, 32) if family == "llama" else None
    changes = {"head_dim": 16, "mrope_section": (8, 0, 0), "rope_scaling": scaling}
    text = dataclasses.replace(qwen2_5_vl().text, **changes, **FAMILIES[family].decoder.flags)
    no_images = dict.fromkeys(("vision", *IMAGE_TOKENS))
    return dataclasses.replace(qwen2_5_vl(), text=text, family=family, **no_images)


@dataclasses.dataclass
class Batch:
    """Left-padded prompts, and the same as separate lists."""

    tokens: np.ndarray  # [B, P]
    is_valid: np.ndarray
    positions: jax.Array
    next_position: jax.Array
    feature_index: np.ndarray
    images: ImagePatches | None
    patches: list[np.ndarray]
    grids: list[np.ndarray]


def reference_inputs(batch: Batch, config: BackboneConfig) -> dict:
    """What transformers' processor would hand over; without the token types it ignores M-RoPE."""
    import torch

    inputs = {
        "input_ids": torch.tensor(batch.tokens),
        "attention_mask": torch.tensor(batch.is_valid.astype(np.int64)),
    }
    if config.vision:
        is_image = batch.tokens == config.image_token_id
        inputs["mm_token_type_ids"] = torch.tensor(is_image.astype(np.int64))
    if any(map(len, batch.grids)):
        inputs["pixel_values"] = torch.tensor(np.concatenate(batch.patches))
        inputs["image_grid_thw"] = torch.tensor(np.concatenate(batch.grids))
    return inputs
