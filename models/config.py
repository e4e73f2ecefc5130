"""Backbone configs, frozen and hashable, and the releases of two families: Qwen2.5-VL, Qwen3-VL.

Only fields specific to a family have defaults: the class defaults of transformers fit none of the
releases. `release.config_json` reads and writes a config as a Hugging Face `config.json`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

VISION_ROPE_THETA = 10000.0  # base of the rotary frequencies in every release's vision tower

# Fields of `TextConfig` that the family determines.
_FLAGS = {
    "qwen2_5_vl": {"qkv_bias": True, "qk_norm": False, "mrope_interleaved": False},
    "qwen3_vl": {"qkv_bias": False, "qk_norm": True, "mrope_interleaved": True},
}
FAMILIES = tuple(_FLAGS)


def flags_of(family: str) -> dict[str, Any]:
    """The fields of `TextConfig` that all releases of a family share.

    Raises:
        ValueError: the family is unknown.
    """
    if family not in _FLAGS:
        raise ValueError(
            f"family must be one of {', '.join(_FLAGS)}, got {family!r}; use such a backbone"
        )
    return _FLAGS[family]


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower.

    Attributes:
        num_layers, hidden_size, intermediate_size, num_heads: of the transformer.
        output_size: width of the merged features; equals the text width.
        patch_size: pixels per side of a patch.
        temporal_patch_size: frames per patch (a still image is repeated to fill it).
        in_channels: colour channels.
        merge_size: patches per side of a merge block, which becomes one feature.
        window_size: pixels per side of an attention window; 0 without windows.
        full_attention_layers: layers that attend over the whole image instead of windows.
        num_position_embeddings: rows of the learned position table, a square number; 0 without one.
        deepstack_layers: layers whose output also goes to the decoder (DeepStack), increasing.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    output_size: int
    patch_size: int
    temporal_patch_size: int
    in_channels: int
    merge_size: int
    window_size: int = 0
    full_attention_layers: tuple[int, ...] = ()
    num_position_embeddings: int = 0
    deepstack_layers: tuple[int, ...] = ()

    def __post_init__(self):
        _check_divides("vision hidden_size", self.hidden_size, "4 * num_heads", 4 * self.num_heads)
        if 0 < self.window_size < self.merge_size * self.patch_size:
            raise ValueError(
                f"window_size {self.window_size} must hold one merged cell of "
                f"{self.merge_size * self.patch_size} pixels; raise window_size"
            )
        if self.position_side**2 != self.num_position_embeddings:
            raise ValueError(
                f"num_position_embeddings {self.num_position_embeddings} must be a square; change "
                "num_position_embeddings"
            )
        layers = self.deepstack_layers
        if layers != tuple(sorted(set(layers) & set(range(self.num_layers)))):
            raise ValueError(
                f"deepstack_visual_indexes {layers} must be increasing layers of a tower of "
                f"{self.num_layers}; change deepstack_visual_indexes"
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
    """The text decoder.

    Attributes:
        num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size:
            of the transformer.
        norm_eps: ε of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        mrope_section: number of frequencies for time, height and width; the sum is head_dim / 2.
        tie_embeddings: the unembedding is the embedding table.
        max_position_embeddings: tokens the release was trained for; only for export.
        qkv_bias: queries, keys and values have biases.
        qk_norm: queries and keys get a per-head RMSNorm before the rotary embedding.
        mrope_interleaved: time, height and width alternate over the frequencies instead of each
            taking a consecutive section.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    tie_embeddings: bool
    max_position_embeddings: int
    qkv_bias: bool = True
    qk_norm: bool = False
    mrope_interleaved: bool = False

    def __post_init__(self):
        _check_divides("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        if 2 * sum(self.mrope_section) != self.head_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} must sum to head_dim / 2 = "
                f"{self.head_dim // 2}; change mrope_section"
            )
        if self.mrope_interleaved and 6 * max(self.mrope_section[1:]) > self.head_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} must give height and width at most every "
                f"third of the {self.head_dim // 2} frequencies; change mrope_section"
            )


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """A vision-language backbone: vision tower, text decoder and special token ids.

    Attributes:
        vision, text: the tower and the decoder.
        family: the `model_type` of its releases.
        image_token_id, video_token_id: placeholder tokens of image and video features.
        vision_start_token_id, vision_end_token_id: tokens before and after the placeholders.
        eos_token_ids: each of them ends a response. SFT targets end with the first.
        pad_token_id: pads rows. It may be one of `eos_token_ids`: masks mark the padding.
    """

    vision: VisionConfig
    text: TextConfig
    family: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int

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
                f"{self.text.num_layers} decoder layers; name fewer"
            )


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} {value} must be a multiple of {divisor_name} = {divisor}")


def _preset(family: str, vision: VisionConfig, **text: Any) -> BackboneConfig:
    """A release: values that all releases share, and its `vision` and `text` fields."""
    return BackboneConfig(
        vision=vision,
        text=TextConfig(head_dim=128, norm_eps=1e-6, **text, **flags_of(family)),
        family=family,
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        eos_token_ids=(151645,),
        pad_token_id=151643,
    )


def _qwen2_5_vl(**text: Any) -> BackboneConfig:
    vision = VisionConfig(
        num_layers=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        output_size=text["hidden_size"],
        patch_size=14,
        temporal_patch_size=2,
        in_channels=3,
        merge_size=2,
        window_size=112,
        full_attention_layers=(7, 15, 23, 31),
    )
    shared = {"rope_theta": 1e6, "mrope_section": (16, 24, 24), "max_position_embeddings": 128000}
    return _preset("qwen2_5_vl", vision, **text, **shared)


def _qwen3_vl(vision: dict[str, Any], **text: Any) -> BackboneConfig:
    tower = VisionConfig(
        num_heads=16,
        output_size=text["hidden_size"],
        patch_size=16,
        temporal_patch_size=2,
        in_channels=3,
        merge_size=2,
        num_position_embeddings=2304,
        **vision,
    )
    shared = {"rope_theta": 5e6, "mrope_section": (24, 20, 20), "max_position_embeddings": 262144}
    return _preset("qwen3_vl", tower, **text, **shared)


QWEN2_5_VL_3B = _qwen2_5_vl(
    num_layers=36,
    hidden_size=2048,
    intermediate_size=11008,
    num_heads=16,
    num_kv_heads=2,
    vocab_size=151936,
    tie_embeddings=True,
)
QWEN2_5_VL_7B = _qwen2_5_vl(
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    vocab_size=152064,
    tie_embeddings=False,
)
QWEN3_VL_4B = _qwen3_vl(
    {
        "num_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "deepstack_layers": (5, 11, 17),
    },
    num_layers=36,
    hidden_size=2560,
    intermediate_size=9728,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=151936,
    tie_embeddings=True,
)
QWEN3_VL_8B = _qwen3_vl(
    {
        "num_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "deepstack_layers": (8, 16, 24),
    },
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=151936,
    tie_embeddings=False,
)

# Hub ids of the releases.
RELEASES = {
    "Qwen/Qwen2.5-VL-3B-Instruct": QWEN2_5_VL_3B,
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN2_5_VL_7B,
    "Qwen/Qwen3-VL-4B-Instruct": QWEN3_VL_4B,
    "Qwen/Qwen3-VL-8B-Instruct": QWEN3_VL_8B,
}
