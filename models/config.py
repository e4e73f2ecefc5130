"""Backbone configs, frozen and hashable.

Only fields specific to a family have defaults: the class defaults of transformers fit none of the
releases. `release.config_json` reads and writes a config as a Hugging Face `config.json`.
"""

from __future__ import annotations

import dataclasses
import math

from models.families import family_of

# Fields of `BackboneConfig` with the ids of image tokens.
IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
VISION_ROPE_THETA = 10000.0  # base of the rotary frequencies in every release's vision tower


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
    bos_token_id: int | None = None  # for an export; None: as `pad_token_id`
    # None without a tower:
    image_token_id: int | None = None  # placeholder of an image feature
    video_token_id: int | None = None
    vision_start_token_id: int | None = None  # before the placeholders
    vision_end_token_id: int | None = None  # after them

    def __post_init__(self):
        without_tower = family_of(self.family).tower is None
        has_tower = "no vision tower" if without_tower else "a vision tower"
        tokens = [getattr(self, name) for name in IMAGE_TOKENS]
        if any((part is None) != without_tower for part in (self.vision, *tokens)):
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
