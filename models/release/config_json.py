"""Converts a Hugging Face `config.json` to a `BackboneConfig` and back.

The file has two layouts. Published Qwen2.5-VL releases keep the text fields at the top level with
`rope_theta` and `rope_scaling`. Qwen3-VL and transformers 5 nest them under `text_config`, the
latter with `rope_parameters`. All are read. The nested layout is written, with `rope_theta` and
`rope_scaling`, which both older and newer transformers open.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

from models.config import (
    VISION_ROPE_THETA,
    BackboneConfig,
    TextConfig,
    VisionConfig,
    flags_of,
)


@dataclasses.dataclass(frozen=True)
class _Family:
    """What the releases of a family have in common.

    Attributes:
        architecture: class in transformers.
        vision_fields, text_fields: fields that only this family has, our name to theirs.
        vision_fixed, text_fixed: settings of all its releases; other values are not implemented.
        vision_written, text_written, rope_written: further fields for export.
        text_ties: setting tie_word_embeddings in text_config alone also ties the embeddings, as in
            transformers.
        flags: fields of `TextConfig` that the family determines.
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
        flags=flags_of("qwen2_5_vl"),
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
        flags=flags_of("qwen3_vl"),
    ),
}
# Fields of both families, our name to theirs.
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

_IMAGE_TOKENS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
_LISTS = ("full_attention_layers", "deepstack_layers")
_SIZES = ("patch_size", "temporal_patch_size")  # one number, or one for each axis


def from_folder(folder: str | pathlib.Path) -> BackboneConfig:
    """Reads a release's config.json, and its generation_config.json if present.

    Raises:
        ValueError: one of them is not valid JSON, or `from_hf` refuses it.
    """
    folder = pathlib.Path(folder)
    generation = {}
    if (folder / "generation_config.json").is_file():
        generation = _read_json(folder / "generation_config.json")
    return from_hf(_read_json(folder / "config.json"), generation)


def from_hf(config: dict[str, Any], generation: dict[str, Any] | None = None) -> BackboneConfig:
    """Reads a `config.json` in either layout.

    Args:
        config: the file's fields.
        generation: fields of `generation_config.json`. Its EOS ids are appended to the config's;
            the rest, the authors' sampling settings, is ignored.

    Raises:
        ValueError: a field is missing, or asks for something that is not implemented.
    """
    model_type = _field(config, "model_type", "config.json")
    flags_of(str(model_type))  # refuses other families
    family = _FAMILIES[model_type]
    text = _object(config, "text_config", "config.json") or config
    eos = _eos_token_ids(text, config, generation or {})
    pad = text.get("pad_token_id", config.get("pad_token_id"))
    if pad is None:
        pad = text.get("bos_token_id", config.get("bos_token_id"))
    tie = _is_tied(config, "config.json")
    if family.text_ties:
        tie = tie or _is_tied(text, "text_config")
    _field(config, "vision_config", "config.json")
    vision = _vision_from_hf(_object(config, "vision_config", "config.json"), family)
    decoder = _text_from_hf(text, family, tie=tie)
    tokens = {name: _field(config, name, "config.json") for name in _IMAGE_TOKENS}
    tokens["pad_token_id"] = eos[0] if pad is None else pad
    for name, index in [*tokens.items(), *(("eos_token_id", index) for index in eos)]:
        # The tokenizer says where image tokens are; see `PromptBuilder`.
        size = sys.maxsize if name in _IMAGE_TOKENS else decoder.vocab_size
        if not _is_whole(index) or index >= size:
            raise ValueError(
                f"config.json {name} must be a token of the vocabulary of {decoder.vocab_size}, "
                f"got {index!r}; correct it, or vocab_size"
            )
    return BackboneConfig(
        vision=vision, text=decoder, family=model_type, eos_token_ids=eos, **tokens
    )


def hf_eos_token_id(config: BackboneConfig) -> int | list[int]:
    """`eos_token_ids` as written to files: a number if there is only one, else a list."""
    return config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids)


def to_hf(config: BackboneConfig) -> dict[str, Any]:
    """A `config.json` that transformers opens; `from_hf` of it gives this config back."""
    family = _FAMILIES[config.family]
    # The releases use the padding token as BOS.
    tokens = {
        "bos_token_id": config.pad_token_id,
        "eos_token_id": hf_eos_token_id(config),
        "pad_token_id": config.pad_token_id,
    }
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        "tie_word_embeddings": config.text.tie_embeddings,
        "image_token_id": config.image_token_id,
        "video_token_id": config.video_token_id,
        "vision_start_token_id": config.vision_start_token_id,
        "vision_end_token_id": config.vision_end_token_id,
        **tokens,
        "text_config": {**_text_to_hf(config.text, family), **tokens},
        "vision_config": _vision_to_hf(config.vision, family),
    }


def _field(config: dict[str, Any], name: str, where: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"{where} must have {name!r}, got {sorted(config)}; add it")
    return config[name]


def _object(config: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The object under a name; {} if there is none."""
    found = config.get(name)
    if not isinstance(found, dict | None):
        raise ValueError(f"{where} {name} must be a JSON object, got {found!r}; correct it")
    return found or {}


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _fields(config: dict[str, Any], names: dict[str, str], where: str) -> dict[str, Any]:
    """The fields under our names, lists converted to tuples."""
    values = {ours: _field(config, theirs, where) for ours, theirs in names.items()}
    for ours, value in values.items():
        if ours in _SIZES:
            continue  # see `_one_size`
        if ours in _LISTS:
            kind = "a list of layers, numbered from 0"
            is_right = isinstance(value, list | tuple) and all(map(_is_whole, value))
        elif ours == "norm_eps":
            kind, is_right = "a number above 0", type(value) in (int, float) and value > 0
        else:
            kind, is_right = "a whole number above 0", _is_whole(value, 1)
        if not is_right:
            raise ValueError(f"{where} {names[ours]} must be {kind}, got {value!r}; correct it")
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
    """EOS ids of text_config, or of the config if it has none, then the generation config's."""
    from_text = text.get("eos_token_id")
    from_config = config.get("eos_token_id") if from_text is None else from_text
    ids: list[int] = []
    for found in (from_config, generation.get("eos_token_id")):
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


def _check_fixed(config: dict[str, Any], fixed: dict[str, Any], where: str) -> None:
    """Refuses settings that the code does not implement; absent settings pass."""
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
    channels = config.get("in_channels", config.get("in_chans", 3))
    if not _is_whole(channels, 1):
        raise ValueError(f"vision_config in_channels must be 3, got {channels!r}; correct it")
    return VisionConfig(in_channels=channels, **fields)


def _check_tower_rope(config: dict[str, Any]) -> None:
    """Refuses a tower with other rotary frequencies, in every field that may set them."""
    fixed = {"rope_theta": VISION_ROPE_THETA, "partial_rotary_factor": 1.0}
    for where in ("rope_parameters", "rope_scaling", ""):
        rope = _object(config, where, "vision_config") if where else config
        given = {name: value for name, value in rope.items() if value is not None}
        _check_fixed(given, fixed, f"vision_config {where}".strip())
        rope_type = given.get("rope_type", given.get("type", "default")) if where else "default"
        if rope_type not in ("default", "axial"):
            raise ValueError(
                f"vision_config {where} rope_type must be 'default' or 'axial', got {rope_type!r}, "
                "which is not implemented"
            )


def _one_size(size: int | tuple[int, ...], name: str) -> int:
    """A size that may be given as one number or as a list with one per axis."""
    sizes = size if isinstance(size, tuple) else (size,)
    if not all(_is_whole(each, 1) for each in sizes) or len(set(sizes)) != 1:
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
    rope = _object(config, "rope_parameters", "text_config")
    rope = rope or _object(config, "rope_scaling", "text_config")
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
    theta = rope.get("rope_theta") or _field(config, "rope_theta", "text_config")
    if type(theta) not in (int, float) or not theta > 0:
        raise ValueError(f"text_config rope_theta must be a number above 0, got {theta!r}")
    section = _field(rope, "mrope_section", "rope_scaling")
    is_three = isinstance(section, list | tuple) and len(section) == 3
    if not is_three or not all(map(_is_whole, section)):
        raise ValueError(f"rope_scaling mrope_section must be three whole numbers, got {section!r}")
    return TextConfig(
        rope_theta=float(theta),
        mrope_section=tuple(section),
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
