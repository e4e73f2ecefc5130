"""The settings of releases by hub id, for programs that have no files of them."""

from __future__ import annotations

from typing import Any

from models.config import IMAGE_TOKENS, BackboneConfig, TextConfig, VisionConfig
from models.families import FAMILIES

# Fields that all releases of a family share, besides its flags: of the tower, of the decoder.
_SHARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"num_layers": 32, "hidden_size": 1280, "patch_size": 14}
        | {"window_size": 112, "full_attention_layers": (7, 15, 23, 31)},
        {"rope_theta": 1e6, "mrope_section": (16, 24, 24), "max_position_embeddings": 128000},
    ),
    "qwen3_vl": (
        {"patch_size": 16, "num_position_embeddings": 2304},
        {"rope_theta": 5e6, "mrope_section": (24, 20, 20), "max_position_embeddings": 262144},
    ),
    "qwen3_vl_moe": (
        {"patch_size": 16, "num_position_embeddings": 2304},
        {"rope_theta": 5e6, "mrope_section": (24, 20, 20), "max_position_embeddings": 262144}
        | {"num_experts": 128, "num_experts_per_token": 8},
    ),
    "qwen2": (
        {},
        {"rope_theta": 1e6, "mrope_section": (64, 0, 0), "max_position_embeddings": 32768},
    ),
    "qwen3": (
        {},
        {"rope_theta": 1e6, "mrope_section": (64, 0, 0), "max_position_embeddings": 40960},
    ),
}
# Fields of the towers of Qwen3-VL: of 2B and 4B, and of the larger ones.
_SMALL_TOWER = {"num_layers": 24, "hidden_size": 1024, "intermediate_size": 4096} | {
    "deepstack_layers": (5, 11, 17)
}
_LARGE_TOWER = {"num_layers": 27, "hidden_size": 1152, "intermediate_size": 4304} | {
    "deepstack_layers": (8, 16, 24)
}
_IMAGE_TOKEN_IDS = dict(zip(IMAGE_TOKENS, (151655, 151656, 151652, 151653), strict=True))


def _release(family: str, *sizes: int, tied: bool, **tower: Any) -> BackboneConfig:
    """A release of Qwen; `sizes` are the fields of `TextConfig` up to vocab_size."""
    row, (vision, text) = FAMILIES[family], _SHARED[family]
    images = {}
    if row.tower:
        tower |= {"output_size": sizes[1], "num_heads": 16, "temporal_patch_size": 2}
        tower |= {"in_channels": 3, "merge_size": 2}
        images = _IMAGE_TOKEN_IDS
    return BackboneConfig(
        vision=VisionConfig(**vision, **row.tower.flags, **tower) if row.tower else None,
        text=TextConfig(*sizes, norm_eps=1e-6, tie_embeddings=tied, **text, **row.decoder.flags),
        family=family,
        eos_token_ids=(151645,),
        pad_token_id=151643,
        **images,
    )


# By hub id. For the settings of each see the release's config.json.
RELEASES = {
    "Qwen/Qwen2.5-VL-3B-Instruct": _release(
        *("qwen2_5_vl", 36, 2048, 11008, 16, 2, 128, 151936), tied=True, intermediate_size=3420
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": _release(
        *("qwen2_5_vl", 28, 3584, 18944, 28, 4, 128, 152064), tied=False, intermediate_size=3420
    ),
    "Qwen/Qwen2.5-VL-32B-Instruct": _release(
        *("qwen2_5_vl", 64, 5120, 27648, 40, 8, 128, 152064), tied=False, intermediate_size=3456
    ),
    "Qwen/Qwen2.5-VL-72B-Instruct": _release(
        *("qwen2_5_vl", 80, 8192, 29568, 64, 8, 128, 152064), tied=False, intermediate_size=3456
    ),
    "Qwen/Qwen3-VL-2B-Instruct": _release(
        *("qwen3_vl", 28, 2048, 6144, 16, 8, 128, 151936), tied=True, **_SMALL_TOWER
    ),
    "Qwen/Qwen3-VL-4B-Instruct": _release(
        *("qwen3_vl", 36, 2560, 9728, 32, 8, 128, 151936), tied=True, **_SMALL_TOWER
    ),
    "Qwen/Qwen3-VL-8B-Instruct": _release(
        *("qwen3_vl", 36, 4096, 12288, 32, 8, 128, 151936), tied=False, **_LARGE_TOWER
    ),
    "Qwen/Qwen3-VL-32B-Instruct": _release(
        *("qwen3_vl", 64, 5120, 25600, 64, 8, 128, 151936), tied=False, **_LARGE_TOWER
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _release(
        *("qwen3_vl_moe", 48, 2048, 768, 32, 4, 128, 151936), tied=False, **_LARGE_TOWER
    ),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": _release(
        *("qwen3_vl_moe", 94, 4096, 1536, 64, 4, 128, 151936), tied=False, **_LARGE_TOWER
    ),
    "Qwen/Qwen2.5-7B-Instruct": _release(
        *("qwen2", 28, 3584, 18944, 28, 4, 128, 152064), tied=False
    ),
    "Qwen/Qwen3-8B": _release(*("qwen3", 36, 4096, 12288, 32, 8, 128, 151936), tied=False),
}
