"""Backbone shapes: frozen, hashable, and read from or written to a Hugging Face `config.json`.

Two families: Qwen2.5-VL and Qwen3-VL. Two layouts of that file are in use: published Qwen2.5-VL
releases keep the text fields at the top level with `rope_theta` and `rope_scaling`; Qwen3-VL and
transformers 5 nest them under `text_config`, the latter with `rope_parameters`. All are read; the
nested one is written, with the rotary fields in the older form, which either generation of
transformers opens. No field has a silent default: the class defaults of transformers fit none of
the releases.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

VISION_ROPE_THETA = 10000.0  # base of the towers' rotary frequencies, of all releases


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
        window_size: pixels per side of an attention window; 0 where there are no windows.
        full_attention_layers: layers that attend over the whole image instead of windows.
        num_position_embeddings: rows of the learned position table, a square; 0 without one.
        deepstack_layers: layers after which the decoder is given features too, increasing.
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
        """Rows, and columns, of the grid that the position table is."""
        return math.isqrt(self.num_position_embeddings)


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
        qkv_bias: queries, keys and values have biases.
        qk_norm: queries and keys are normalised, head by head, before they are rotated.
        mrope_interleaved: height and width take turns with time, instead of consecutive sections.
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
    """A vision-language backbone: its two halves and the token ids that join them.

    Attributes:
        vision, text: the halves.
        family: the `model_type` of its releases.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id: of the tokens
            that stand for images and videos, and around them.
        eos_token_ids: each of them ends a response. The first is the one that is taught.
        pad_token_id: fills rows. It may be one of `eos_token_ids`: masks tell what is padding.
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
        _family(self.family)
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

    @classmethod
    def from_folder(cls, folder: str | pathlib.Path) -> BackboneConfig:
        """Reads a release's config.json, and its generation_config.json where there is one.

        Raises:
            ValueError: one of them is no JSON, or `from_hf` refuses it.
        """
        folder = pathlib.Path(folder)
        generation = {}
        if (folder / "generation_config.json").is_file():
            generation = _read_json(folder / "generation_config.json")
        return cls.from_hf(_read_json(folder / "config.json"), generation)

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], generation: dict[str, Any] | None = None
    ) -> BackboneConfig:
        """Reads a `config.json` in either layout.

        Args:
            config: the file's fields.
            generation: those of `generation_config.json`. Its end-of-sequence ids come behind the
                config's; the rest, how its authors sampled, is not read.

        Raises:
            ValueError: a field is missing, or asks for something that is not implemented.
        """
        model_type = _field(config, "model_type", "config.json")
        family = _family(model_type)
        text = config.get("text_config") or config
        eos = _eos_token_ids(text, config, generation or {})
        pad = text.get("pad_token_id", config.get("pad_token_id"))
        if pad is None:
            pad = text.get("bos_token_id", config.get("bos_token_id"))
        tie = _is_tied(config, "config.json")
        if family.text_ties:
            tie = tie or _is_tied(text, "text_config")
        return cls(
            vision=_vision_from_hf(_field(config, "vision_config", "config.json"), family),
            text=_text_from_hf(text, family, tie=tie),
            family=model_type,
            image_token_id=_field(config, "image_token_id", "config.json"),
            video_token_id=_field(config, "video_token_id", "config.json"),
            vision_start_token_id=_field(config, "vision_start_token_id", "config.json"),
            vision_end_token_id=_field(config, "vision_end_token_id", "config.json"),
            eos_token_ids=eos,
            pad_token_id=eos[0] if pad is None else pad,
        )

    @property
    def hf_eos_token_id(self) -> int | list[int]:
        """`eos_token_ids` as files have them: a number where there is one."""
        return self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that transformers opens; `from_hf` of it gives this config back."""
        family = _family(self.family)
        # The releases' beginning-of-sequence token is the one they pad with.
        tokens = {
            "bos_token_id": self.pad_token_id,
            "eos_token_id": self.hf_eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        return {
            "architectures": [family.architecture],
            "model_type": self.family,
            "tie_word_embeddings": self.text.tie_embeddings,
            "image_token_id": self.image_token_id,
            "video_token_id": self.video_token_id,
            "vision_start_token_id": self.vision_start_token_id,
            "vision_end_token_id": self.vision_end_token_id,
            **tokens,
            "text_config": {**_text_to_hf(self.text, family), **tokens},
            "vision_config": _vision_to_hf(self.vision, family),
        }


@dataclasses.dataclass(frozen=True)
class _Family:
    """What the releases of a family have in common.

    Attributes:
        architecture: class of transformers.
        vision_fields, text_fields: fields it has and the other family has not, ours to theirs.
        vision_fixed, text_fixed: settings of all its releases; others are not implemented.
        vision_written, text_written, rope_written: what else is written, and not read.
        text_ties: embeddings are tied where text_config alone says so too, as transformers has it.
        flags: what `TextConfig` says of it.
    """

    architecture: str
    vision_fields: dict[str, str]
    text_fields: dict[str, str]
    vision_fixed: dict[str, Any]
    text_fixed: dict[str, Any]
    vision_written: dict[str, Any]
    text_written: dict[str, Any]
    rope_written: dict[str, Any]
    text_ties: bool
    flags: dict[str, bool]


_FAMILIES = {
    "qwen2_5_vl": _Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        vision_fields={
            "window_size": "window_size",
            "full_attention_layers": "fullatt_block_indexes",
        },
        text_fields={},
        vision_fixed={"hidden_act": "silu"},
        text_fixed={"hidden_act": "silu", "use_sliding_window": False},
        vision_written={"model_type": "qwen2_5_vl_vision", "tokens_per_second": 2},
        text_written={"model_type": "qwen2_5_vl_text"},
        rope_written={"type": "mrope"},
        text_ties=True,
        flags={"qkv_bias": True, "qk_norm": False, "mrope_interleaved": False},
    ),
    "qwen3_vl": _Family(
        architecture="Qwen3VLForConditionalGeneration",
        vision_fields={
            "num_position_embeddings": "num_position_embeddings",
            "deepstack_layers": "deepstack_visual_indexes",
        },
        text_fields={"head_dim": "head_dim"},
        vision_fixed={"hidden_act": "gelu_pytorch_tanh"},
        text_fixed={"hidden_act": "silu", "attention_bias": False},
        vision_written={"model_type": "qwen3_vl"},
        text_written={"model_type": "qwen3_vl_text"},
        rope_written={"rope_type": "default", "mrope_interleaved": True},
        text_ties=False,
        flags={"qkv_bias": False, "qk_norm": True, "mrope_interleaved": True},
    ),
}
FAMILIES = tuple(_FAMILIES)

# Fields of both families, ours to theirs.
_VISION_FIELDS = {
    "num_layers": "depth",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_heads",
    "output_size": "out_hidden_size",
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}
_TEXT_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise ValueError(
            f"family must be one of {', '.join(_FAMILIES)}, got {name!r}; use such a backbone"
        )
    return _FAMILIES[name]


def _field(config: dict[str, Any], name: str, where: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"{where} must have {name!r}, got {sorted(config)}; add it")
    return config[name]


def _fields(config: dict[str, Any], names: dict[str, str], where: str) -> dict[str, Any]:
    """The fields under our names, lists as tuples."""
    values = {ours: _field(config, theirs, where) for ours, theirs in names.items()}
    return {ours: tuple(v) if isinstance(v, list | tuple) else v for ours, v in values.items()}


def _fields_to_hf(config: VisionConfig | TextConfig, names: dict[str, str]) -> dict[str, Any]:
    values = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    return {theirs: list(v) if isinstance(v, tuple) else v for theirs, v in values.items()}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a JSON file, got {error}; fetch it again") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, got {fields!r}; fetch it again")
    return fields


def _eos_token_ids(
    text: dict[str, Any], config: dict[str, Any], generation: dict[str, Any]
) -> tuple[int, ...]:
    """The config's ids, its text part's where that has any, then the generation config's others."""
    own = text.get("eos_token_id")
    own = config.get("eos_token_id") if own is None else own
    ids: list[int] = []
    for found in (own, generation.get("eos_token_id")):
        ids += found if isinstance(found, list | tuple) else [] if found is None else [found]
    if not ids or not all(type(index) is int for index in ids):
        raise ValueError(
            "config.json or generation_config.json must have 'eos_token_id', a token id or a list "
            f"of them, got {ids or None}; add it"
        )
    return tuple(dict.fromkeys(ids))


def _is_tied(config: dict[str, Any], where: str) -> bool:
    tie = config.get("tie_word_embeddings", False)
    if not isinstance(tie, bool):
        raise ValueError(
            f"{where} tie_word_embeddings must be true or false, got {tie!r}; correct or remove it"
        )
    return tie


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} {value} must be a multiple of {divisor_name} = {divisor}")


def _check_fixed(config: dict[str, Any], fixed: dict[str, Any], where: str) -> None:
    """Refuses settings that the code does not implement; an absent one is as it should be."""
    for name, expected in fixed.items():
        if config.get(name, expected) != expected:
            raise ValueError(
                f"{where} {name} must be {expected!r}, got {config[name]!r}, which is not "
                "implemented"
            )


def _vision_from_hf(config: dict[str, Any], family: _Family) -> VisionConfig:
    _check_fixed(config, family.vision_fixed, "vision_config")
    _check_tower_rope(config)
    fields = _fields(config, _VISION_FIELDS | family.vision_fields, "vision_config")
    for name in ("patch_size", "temporal_patch_size"):
        fields[name] = _one_size(fields[name], name)
    return VisionConfig(in_channels=config.get("in_channels", config.get("in_chans", 3)), **fields)


def _check_tower_rope(config: dict[str, Any]) -> None:
    """Refuses a tower with other rotary frequencies, in any of the places they are written in."""
    fixed = {"rope_theta": VISION_ROPE_THETA, "partial_rotary_factor": 1.0}
    for where in ("rope_parameters", "rope_scaling", ""):
        rope = (config.get(where) or {}) if where else config
        given = {name: value for name, value in rope.items() if value is not None}
        _check_fixed(given, fixed, f"vision_config {where}".strip())
        rope_type = given.get("rope_type", given.get("type", "default")) if where else "default"
        if rope_type not in ("default", "axial"):
            raise ValueError(
                f"vision_config {where} rope_type must be 'default' or 'axial', got {rope_type!r}, "
                "which is not implemented"
            )


def _one_size(size: int | tuple[int, ...], name: str) -> int:
    """A size that may be written once for each axis."""
    sizes = size if isinstance(size, tuple) else (size,)
    if len(set(sizes)) != 1 or type(sizes[0]) is not int:
        raise ValueError(
            f"vision_config {name} must be one number, the same along every axis, got {size!r}, "
            "which is not implemented"
        )
    return sizes[0]


def _vision_to_hf(vision: VisionConfig, family: _Family) -> dict[str, Any]:
    return {
        **family.vision_written,
        **family.vision_fixed,
        "in_channels": vision.in_channels,
        **_fields_to_hf(vision, _VISION_FIELDS | family.vision_fields),
    }


def _text_from_hf(config: dict[str, Any], family: _Family, *, tie: bool) -> TextConfig:
    _check_fixed(config, family.text_fixed, "text_config")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "mrope"):
        raise ValueError(f"rope type must be 'default' or 'mrope', got {rope_type!r}")
    is_interleaved = {"mrope_interleaved": family.flags["mrope_interleaved"]}
    _check_fixed(rope, is_interleaved, "rope_scaling")
    fields = _fields(config, _TEXT_FIELDS | family.text_fields, "text_config")
    if "head_dim" not in fields:
        fields["head_dim"], remainder = divmod(fields["hidden_size"], fields["num_heads"])
        if remainder or config.get("head_dim", fields["head_dim"]) != fields["head_dim"]:
            raise ValueError(
                "head_dim must be hidden_size / num_attention_heads = "
                f"{fields['hidden_size']} / {fields['num_heads']}, got {config.get('head_dim')}"
            )
    return TextConfig(
        rope_theta=float(rope.get("rope_theta") or _field(config, "rope_theta", "text_config")),
        mrope_section=tuple(_field(rope, "mrope_section", "rope_scaling")),
        tie_embeddings=tie,
        **fields,
        **family.flags,
    )


def _text_to_hf(text: TextConfig, family: _Family) -> dict[str, Any]:
    return {
        **family.text_written,
        **family.text_fixed,
        **_fields_to_hf(text, _TEXT_FIELDS | family.text_fields),
        "rope_theta": text.rope_theta,
        "rope_scaling": {**family.rope_written, "mrope_section": list(text.mrope_section)},
        "tie_word_embeddings": text.tie_embeddings,
    }


def _preset(family: str, vision: VisionConfig, **text: Any) -> BackboneConfig:
    """A release: what both families share, and `text` fields of its own."""
    return BackboneConfig(
        vision=vision,
        text=TextConfig(head_dim=128, norm_eps=1e-6, **text, **_FAMILIES[family].flags),
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
