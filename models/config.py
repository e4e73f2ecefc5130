"""Backbone configs, frozen and hashable, and the releases of two families: Qwen2.5-VL, Qwen3-VL.

Only fields specific to a family have defaults: the class defaults of transformers fit none of the
releases. `release.config_json` reads and writes a config as a Hugging Face `config.json`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

VISION_ROPE_THETA = 10000.0  # base of the rotary frequencies in every release's vision tower

# By family, the fields of `VisionConfig` and of `TextConfig` that all its releases share.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"gated": True},
        {"qkv_bias": True, "qk_norm": False, "mrope_interleaved": False},
    ),
    "qwen3_vl": ({"gated": False}, {"qkv_bias": False, "qk_norm": True, "mrope_interleaved": True}),
}


def flags_of(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of `FAMILIES`; refuses an unknown family."""
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"family must be one of {known}, got {family!r}; choose another model")
    return FAMILIES[family]


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    output_size: int  # width of the merged features; equals the text width
    patch_size: int  # pixels per side of a patch
    temporal_patch_size: int  # frames per patch (a still image is repeated to fill it)
    in_channels: int  # colour channels
    merge_size: int  # patches per side of a merge block, which becomes one feature
    window_size: int = 0  # pixels per side of an attention window; 0 without windows
    full_attention_layers: tuple[int, ...] = ()  # over the whole image instead of windows
    num_position_embeddings: int = 0  # rows of the learned position table, a square; 0 without one
    deepstack_layers: tuple[int, ...] = ()  # their output also goes to the decoder; increasing
    gated: bool = True  # RMSNorm, gated SiLU; else LayerNorm, plain GELU, biased patch embedding

    def __post_init__(self):
        _check_divides("vision hidden_size", self.hidden_size, "4 * num_heads", 4 * self.num_heads)
        if 0 < self.window_size < self.merge_size * self.patch_size:
            raise ValueError(
                f"window_size {self.window_size} must be 0 or at least one merge block, "
                f"{self.merge_size * self.patch_size} pixels; change it"
            )
        if self.position_side**2 != self.num_position_embeddings:
            number = self.num_position_embeddings
            raise ValueError(f"num_position_embeddings {number} must be a square; change it")
        layers = self.deepstack_layers
        if layers != tuple(sorted(set(layers) & set(range(self.num_layers)))):
            raise ValueError(
                f"deepstack_visual_indexes {layers} must be increasing layer numbers below "
                f"{self.num_layers}; change them"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch: channel, frame, row, column."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window_side(self) -> int:
        """Patches per side of a full window."""
        return self.window_size // self.merge_size // self.patch_size * self.merge_size

    @property
    def position_side(self) -> int:
        """Cells per side of the square grid in the position table."""
        return math.isqrt(self.num_position_embeddings)


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text decoder."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float  # ε of every RMSNorm
    rope_theta: float  # base of the rotary frequencies
    mrope_section: tuple[int, int, int]  # frequencies for time, height, width; sum head_dim / 2
    tie_embeddings: bool  # the unembedding is the embedding table
    max_position_embeddings: int  # tokens the release was trained for; only for export
    qkv_bias: bool = True
    qk_norm: bool = False  # a per-head RMSNorm of queries and keys before the rotary embedding
    mrope_interleaved: bool = False  # time, height and width alternate, not in sections

    def __post_init__(self):
        _check_divides("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        if 2 * sum(self.mrope_section) != self.head_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} must sum to head_dim / 2 = "
                f"{self.head_dim // 2}; change it"
            )
        if self.mrope_interleaved and 6 * max(self.mrope_section[1:]) > self.head_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} must give height and width at most a third "
                f"each of the {self.head_dim // 2} frequencies; change it"
            )


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """A vision-language backbone: vision tower, text decoder and special token ids."""

    vision: VisionConfig
    text: TextConfig
    family: str  # the `model_type` of its releases
    image_token_id: int  # placeholder of an image feature
    video_token_id: int
    vision_start_token_id: int  # before the placeholders
    vision_end_token_id: int  # after them
    eos_token_ids: tuple[int, ...]  # each ends a response; SFT targets end with the first
    pad_token_id: int  # may be one of `eos_token_ids`, since masks mark the padding

    def __post_init__(self):
        flags_of(self.family)
        if self.vision.output_size != self.text.hidden_size:
            raise ValueError(
                f"vision output_size {self.vision.output_size} must equal text hidden_size "
                f"{self.text.hidden_size}; change out_hidden_size"
            )
        if len(self.vision.deepstack_layers) > self.text.num_layers:
            raise ValueError(
                f"deepstack_visual_indexes {self.vision.deepstack_layers} must not outnumber the "
                f"{self.text.num_layers} decoder layers; list fewer"
            )


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} {value} must be a multiple of {divisor_name} = {divisor}")


# Further fields that all releases of a family share: of the tower, of the decoder.
_SHARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"num_layers": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14}
        | {"window_size": 112, "full_attention_layers": (7, 15, 23, 31)},
        {"rope_theta": 1e6, "mrope_section": (16, 24, 24), "max_position_embeddings": 128000},
    ),
    "qwen3_vl": (
        {"patch_size": 16, "num_position_embeddings": 2304},
        {"rope_theta": 5e6, "mrope_section": (24, 20, 20), "max_position_embeddings": 262144},
    ),
}


def _release(family: str, *sizes: int, tied: bool, **tower: Any) -> BackboneConfig:
    """A release; `sizes` are the fields of `TextConfig` up to vocab_size."""
    (vision_flags, text_flags), (vision, text) = FAMILIES[family], _SHARED[family]
    tower |= {"output_size": sizes[1], "num_heads": 16, "temporal_patch_size": 2}
    return BackboneConfig(
        vision=VisionConfig(in_channels=3, merge_size=2, **vision, **vision_flags, **tower),
        text=TextConfig(*sizes, norm_eps=1e-6, tie_embeddings=tied, **text, **text_flags),
        family=family,
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        eos_token_ids=(151645,),
        pad_token_id=151643,
    )


QWEN2_5_VL_3B = _release("qwen2_5_vl", 36, 2048, 11008, 16, 2, 128, 151936, tied=True)
QWEN2_5_VL_7B = _release("qwen2_5_vl", 28, 3584, 18944, 28, 4, 128, 152064, tied=False)
QWEN3_VL_4B = _release(
    *("qwen3_vl", 36, 2560, 9728, 32, 8, 128, 151936),
    tied=True,
    num_layers=24,
    hidden_size=1024,
    intermediate_size=4096,
    deepstack_layers=(5, 11, 17),
)
QWEN3_VL_8B = _release(
    *("qwen3_vl", 36, 4096, 12288, 32, 8, 128, 151936),
    tied=False,
    num_layers=27,
    hidden_size=1152,
    intermediate_size=4304,
    deepstack_layers=(8, 16, 24),
)

# By hub id.
RELEASES = {
    "Qwen/Qwen2.5-VL-3B-Instruct": QWEN2_5_VL_3B,
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN2_5_VL_7B,
    "Qwen/Qwen3-VL-4B-Instruct": QWEN3_VL_4B,
    "Qwen/Qwen3-VL-8B-Instruct": QWEN3_VL_8B,
}
