"""The Qwen2.5-VL backbone of the measurements."""

import dataclasses

from models.config import BackboneConfig
from models.release.known import RELEASES

_BASE = RELEASES["Qwen/Qwen2.5-VL-3B-Instruct"]
IMAGE_SIDE = 448  # pixels: 1024 patches of 14, 256 tokens


def medium_config(num_layers: int = 12) -> BackboneConfig:
    """107M parameters: 12 decoder layers of width 768; 6 vision layers of 256, 2 full attention.

    `num_layers` is of the decoder; the tower has half as many.
    """
    num_vision = max(num_layers // 2, 1)
    text = dataclasses.replace(
        _BASE.text,
        num_layers=num_layers,
        hidden_size=768,
        intermediate_size=2048,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        mrope_section=(8, 12, 12),
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    vision = dataclasses.replace(
        _BASE.vision,
        num_layers=num_vision,
        hidden_size=256,
        intermediate_size=684,
        num_heads=4,
        output_size=768,
        full_attention_layers=tuple(range(num_vision))[2::3] or (0,),
    )
    names = "image", "video", "vision_start", "vision_end"
    tokens = {f"{name}_token_id": 31990 + index for index, name in enumerate(names)}
    ends = {"eos_token_ids": (31994,), "pad_token_id": 31995}
    return dataclasses.replace(_BASE, text=text, vision=vision, **tokens, **ends)
