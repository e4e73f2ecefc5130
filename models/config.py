"""Backbone shapes: frozen, hashable, and read from or written to a Hugging Face `config.json`.

Two layouts of that file are in use: published Qwen2.5-VL releases keep the text fields at the top
level with `rope_theta` and `rope_scaling`; transformers 5 nests them under `text_config` with
`rope_parameters`. Both are read; the nested one is written, with the rotary fields in the older
form, which either generation of transformers opens. No field has a silent default: the class
defaults of transformers fit none of the releases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

FAMILY = "qwen2_5_vl"


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower.

    Attributes:
        num_layers, hidden_size, intermediate_size, num_heads: of the transformer.
        output_size: width of the merged features; equals the text width.
        patch_size: pixels per side of a patch.
        temporal_patch_size: frames per patch (a still image is repeated to fill it).
        in_channels: colour channels.
        merge_size: patches per side that become one feature.
        window_size: pixels per side of an attention window.
        full_attention_layers: layers that attend over the whole image instead of windows.
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
    window_size: int
    full_attention_layers: tuple[int, ...]

    def __post_init__(self):
        _check_divides("vision hidden_size", self.hidden_size, "4 * num_heads", 4 * self.num_heads)
        if self.window_size < self.merge_size * self.patch_size:
            raise ValueError(
                f"window_size {self.window_size} must hold one merged cell of "
                f"{self.merge_size * self.patch_size} pixels; raise window_size"
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


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text decoder.

    Attributes:
        num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size:
            of the transformer.
        norm_eps: ε of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        mrope_section: frequencies that turn with time, height and width; they sum to head_dim / 2.
        tie_embeddings: the unembedding is the embedding table.
        max_position_embeddings: tokens the release was trained for; kept for export.
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

    def __post_init__(self):
        _check_divides("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        if 2 * sum(self.mrope_section) != self.head_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} must sum to head_dim / 2 = "
                f"{self.head_dim // 2}; change mrope_section"
            )


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """A vision-language backbone: its two halves and the token ids that join them."""

    vision: VisionConfig
    text: TextConfig
    family: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_id: int
    pad_token_id: int

    def __post_init__(self):
        if self.family != FAMILY:
            raise ValueError(f"family must be {FAMILY!r}, got {self.family!r}; use such a backbone")
        if self.vision.output_size != self.text.hidden_size:
            raise ValueError(
                f"vision output_size {self.vision.output_size} must equal text hidden_size "
                f"{self.text.hidden_size}; change out_hidden_size"
            )

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> BackboneConfig:
        """Reads a `config.json` in either layout.

        Raises:
            ValueError: a field is missing, or asks for something that is not implemented.
        """
        model_type = _field(config, "model_type", "config.json")
        text = config.get("text_config") or config
        eos = _first(_field({**config, **text}, "eos_token_id", "config.json"))
        pad = text.get("pad_token_id", config.get("pad_token_id"))
        if pad is None:
            pad = text.get("bos_token_id", config.get("bos_token_id"))
        tie = config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
        return cls(
            vision=_vision_from_hf(_field(config, "vision_config", "config.json")),
            text=_text_from_hf(text, tie=bool(tie)),
            family=model_type,
            image_token_id=_field(config, "image_token_id", "config.json"),
            video_token_id=_field(config, "video_token_id", "config.json"),
            vision_start_token_id=_field(config, "vision_start_token_id", "config.json"),
            vision_end_token_id=_field(config, "vision_end_token_id", "config.json"),
            eos_token_id=eos,
            pad_token_id=eos if pad is None else pad,
        )

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that transformers opens; `from_hf` of it gives this config back."""
        # The releases' beginning-of-sequence token is the one they pad with.
        tokens = {
            "bos_token_id": self.pad_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": self.family,
            "tie_word_embeddings": self.text.tie_embeddings,
            "image_token_id": self.image_token_id,
            "video_token_id": self.video_token_id,
            "vision_start_token_id": self.vision_start_token_id,
            "vision_end_token_id": self.vision_end_token_id,
            **tokens,
            "text_config": {**_text_to_hf(self.text), **tokens},
            "vision_config": _vision_to_hf(self.vision),
        }


def _field(config: dict[str, Any], name: str, where: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"{where} must have {name!r}, got {sorted(config)}; add it")
    return config[name]


def _first(value: int | list[int]) -> int:
    return value if isinstance(value, int) else value[0]


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} {value} must be a multiple of {divisor_name} = {divisor}")


def _check_equal(config: dict[str, Any], name: str, expected: Any, where: str) -> None:
    """Refuses a setting that the code does not implement; an absent one means `expected`."""
    if config.get(name, expected) != expected:
        raise ValueError(
            f"{where} {name} must be {expected!r}, got {config[name]!r}, which is not implemented"
        )


def _vision_from_hf(config: dict[str, Any]) -> VisionConfig:
    def field(name):
        return _field(config, name, "vision_config")

    _check_equal(config, "hidden_act", "silu", "vision_config")
    return VisionConfig(
        num_layers=field("depth"),
        hidden_size=field("hidden_size"),
        intermediate_size=field("intermediate_size"),
        num_heads=field("num_heads"),
        output_size=field("out_hidden_size"),
        patch_size=field("patch_size"),
        temporal_patch_size=field("temporal_patch_size"),
        in_channels=config.get("in_channels", config.get("in_chans", 3)),
        merge_size=field("spatial_merge_size"),
        window_size=field("window_size"),
        full_attention_layers=tuple(field("fullatt_block_indexes")),
    )


def _vision_to_hf(vision: VisionConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl_vision",
        "hidden_act": "silu",
        "depth": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.num_heads,
        "out_hidden_size": vision.output_size,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "in_channels": vision.in_channels,
        "spatial_merge_size": vision.merge_size,
        "window_size": vision.window_size,
        "fullatt_block_indexes": list(vision.full_attention_layers),
        "tokens_per_second": 2,
    }


def _text_from_hf(config: dict[str, Any], *, tie: bool) -> TextConfig:
    def field(name):
        return _field(config, name, "text_config")

    _check_equal(config, "hidden_act", "silu", "text_config")
    if config.get("use_sliding_window", False):
        raise ValueError("use_sliding_window must be false: sliding windows are not implemented")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "mrope"):
        raise ValueError(f"rope type must be 'default' or 'mrope', got {rope_type!r}")
    head_dim, remainder = divmod(field("hidden_size"), field("num_attention_heads"))
    if remainder or config.get("head_dim", head_dim) != head_dim:
        raise ValueError(
            f"head_dim must be hidden_size / num_attention_heads = {field('hidden_size')} / "
            f"{field('num_attention_heads')}, got {config.get('head_dim')}"
        )
    return TextConfig(
        num_layers=field("num_hidden_layers"),
        hidden_size=field("hidden_size"),
        intermediate_size=field("intermediate_size"),
        num_heads=field("num_attention_heads"),
        num_kv_heads=field("num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=field("vocab_size"),
        norm_eps=field("rms_norm_eps"),
        rope_theta=float(rope.get("rope_theta") or field("rope_theta")),
        mrope_section=tuple(_field(rope, "mrope_section", "rope_scaling")),
        tie_embeddings=tie,
        max_position_embeddings=field("max_position_embeddings"),
    )


def _text_to_hf(text: TextConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl_text",
        "hidden_act": "silu",
        "num_hidden_layers": text.num_layers,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads,
        "vocab_size": text.vocab_size,
        "rms_norm_eps": text.norm_eps,
        "rope_theta": text.rope_theta,
        "rope_scaling": {"type": "mrope", "mrope_section": list(text.mrope_section)},
        "max_position_embeddings": text.max_position_embeddings,
        "tie_word_embeddings": text.tie_embeddings,
        "use_sliding_window": False,
    }


def _qwen2_5_vl(vision_output: int, text: TextConfig) -> BackboneConfig:
    return BackboneConfig(
        vision=VisionConfig(
            num_layers=32,
            hidden_size=1280,
            intermediate_size=3420,
            num_heads=16,
            output_size=vision_output,
            patch_size=14,
            temporal_patch_size=2,
            in_channels=3,
            merge_size=2,
            window_size=112,
            full_attention_layers=(7, 15, 23, 31),
        ),
        text=text,
        family=FAMILY,
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        eos_token_id=151645,
        pad_token_id=151643,
    )


QWEN2_5_VL_3B = _qwen2_5_vl(
    2048,
    TextConfig(
        num_layers=36,
        hidden_size=2048,
        intermediate_size=11008,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1e6,
        mrope_section=(16, 24, 24),
        tie_embeddings=True,
        max_position_embeddings=128000,
    ),
)

QWEN2_5_VL_7B = _qwen2_5_vl(
    3584,
    TextConfig(
        num_layers=28,
        hidden_size=3584,
        intermediate_size=18944,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=152064,
        norm_eps=1e-6,
        rope_theta=1e6,
        mrope_section=(16, 24, 24),
        tie_embeddings=False,
        max_position_embeddings=128000,
    ),
)
