"""Backbone configs, frozen and hashable, their families, and the releases known by name.

Only fields specific to a family have defaults: the class defaults of transformers fit none of the
releases. `release.config_json` reads and writes a config as a Hugging Face `config.json`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

# Fields of `BackboneConfig` with the ids of image tokens.
IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
VISION_ROPE_THETA = 10000.0  # base of the rotary frequencies in every release's vision tower

# By family, the fields of `VisionConfig` and of `TextConfig` that all its releases share; None for
# a family without a tower, which reads text alone.
FAMILIES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"gated": True},
        {"qkv_bias": True, "qk_norm": False, "mrope_interleaved": False},
    ),
    "qwen3_vl": ({"gated": False}, {"qkv_bias": False, "qk_norm": True, "mrope_interleaved": True}),
    "qwen3_vl_moe": (
        {"gated": False},
        {"qkv_bias": False, "qk_norm": True, "mrope_interleaved": True},
    ),
    "qwen2": (None, {"qkv_bias": True, "qk_norm": False}),
    "qwen3": (None, {"qkv_bias": False, "qk_norm": True}),
    "llama": (None, {"qkv_bias": False, "qk_norm": False}),
}


def flags_of(family: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The row of `FAMILIES`; refuses an unknown family."""
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"model_type must be one of {known}, got {family!r}; choose another model")
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
class RopeScaling:
    """Rotary frequencies that Llama 3.1 stretches for long contexts (rope_type "llama3").

    A frequency that turns fewer than `low_freq_factor` times within the original context is divided
    by `factor`, one that turns more than `high_freq_factor` times is kept; between them the share
    of each is linear in the number of turns.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}; change them"
            )


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
    # Frequencies for time, height and width, sum head_dim / 2; without a tower all are for time.
    mrope_section: tuple[int, int, int]
    tie_embeddings: bool  # the unembedding is the embedding table
    max_position_embeddings: int  # tokens the release was trained for; only for export
    qkv_bias: bool = True
    qk_norm: bool = False  # a per-head RMSNorm of queries and keys before the rotary embedding
    mrope_interleaved: bool = False  # time, height and width alternate, not in sections
    rope_scaling: RopeScaling | None = None
    # Of a sparse decoder, whose `intermediate_size` is the width of one expert:
    num_experts: int = 0  # 0: dense
    num_experts_per_token: int = 0  # chosen by the router

    @property
    def route_shape(self) -> tuple[int, int]:
        """L, K: the experts of a token in all layers; K is 0 if the decoder is dense."""
        return self.num_layers, self.num_experts_per_token

    def __post_init__(self):
        _check_divides("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_token} must not exceed num_experts "
                f"{self.num_experts}; lower it"
            )
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
    """A backbone: vision tower, if it has one, text decoder and special token ids."""

    vision: VisionConfig | None  # None: it reads text alone
    text: TextConfig
    family: str  # the `model_type` of its releases
    eos_token_ids: tuple[int, ...]  # each ends a response
    pad_token_id: int  # may be one of `eos_token_ids`, since masks mark the padding
    # None without a tower:
    image_token_id: int | None = None  # placeholder of an image feature
    video_token_id: int | None = None
    vision_start_token_id: int | None = None  # before the placeholders
    vision_end_token_id: int | None = None  # after them

    def __post_init__(self):
        flags, _ = flags_of(self.family)
        has_tower = "no vision tower" if flags is None else "a vision tower"
        tokens = [getattr(self, name) for name in IMAGE_TOKENS]
        if any((part is None) != (flags is None) for part in (self.vision, *tokens)):
            raise ValueError(
                f"a backbone of family {self.family} must have {has_tower} and its tokens, got "
                f"{self.vision} and {tokens}; choose another family"
            )
        if self.vision is None:
            return
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

    @property
    def merge_size(self) -> int:
        """Patches per side of a merge block; 1 without a tower, whose prompts have no patches."""
        return self.vision.merge_size if self.vision else 1


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} {value} must be a multiple of {divisor_name} = {divisor}")


# Further fields that all releases of a family share: of the tower, of the decoder.
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
    (vision_flags, text_flags), (vision, text) = FAMILIES[family], _SHARED[family]
    images = {}
    if vision_flags is not None:
        tower |= {"output_size": sizes[1], "num_heads": 16, "temporal_patch_size": 2}
        tower |= {"in_channels": 3, "merge_size": 2}
        images = _IMAGE_TOKEN_IDS
    return BackboneConfig(
        vision=VisionConfig(**vision, **vision_flags, **tower) if vision_flags else None,
        text=TextConfig(*sizes, norm_eps=1e-6, tie_embeddings=tied, **text, **text_flags),
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
