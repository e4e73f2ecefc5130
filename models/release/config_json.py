"""Converts a Hugging Face `config.json` to a `BackboneConfig` and back.

The file has two layouts. Text-only releases and those of Qwen2.5-VL keep the text fields at the top
level with `rope_theta` and `rope_scaling`. Qwen3-VL and transformers 5 nest them under
`text_config` if there is a tower, and transformers 5 writes `rope_parameters`. All are read. The
layout of a family's releases is written, which the oldest transformers with the family opens too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from models.config import (
    IMAGE_TOKENS,
    VISION_ROPE_THETA,
    BackboneConfig,
    RopeScaling,
    TextConfig,
    VisionConfig,
)
from models.families import Decoder, Family, Tower, family_of

_ROPE_SCALING = [field.name for field in dataclasses.fields(RopeScaling)]  # names as in the file


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


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON file, got {error}; fetch it again") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, got {_short(fields)}; fetch it again")
    return fields


def from_hf(config: dict[str, Any], generation: dict[str, Any] | None = None) -> BackboneConfig:
    """Reads a `config.json` in either layout.

    Args:
        config: the file's fields.
        generation: fields of `generation_config.json`. Its EOS ids are appended to the config's,
            its padding is that of a config without; the rest, sampling settings, is ignored.

    Raises:
        ValueError: a field is missing, or asks for something that is not implemented.
    """
    family = str(_field(config, "model_type", "config.json"))
    row = family_of(family)
    if quantization := _object(config, "quantization_config", "config.json"):
        raise ValueError(
            f"the release is quantised ({quantization.get('quant_method', 'in a way not named')}), "
            "which is not implemented; choose the release without quantisation"
        )
    text = _object(config, "text_config", "config.json") or config
    tie = _is_tied(config, "config.json")
    if family == "qwen2_5_vl":  # as in transformers
        tie = tie or _is_tied(text, "text_config")
    vision, tokens = None, {}
    if row.tower:
        _field(config, "vision_config", "config.json")
        vision = _vision_from_hf(_object(config, "vision_config", "config.json"), row.tower)
        tokens = {name: _field(config, name, "config.json") for name in IMAGE_TOKENS}
    decoder = _text_from_hf(text, row, tie=tie)

    eos = _eos_token_ids(text, config, generation or {})
    pad, bos = (text.get(name, config.get(name)) for name in ("pad_token_id", "bos_token_id"))
    # Not BOS, which Llama's prompts begin with: transformers' `generate` masks padding.
    pads = (pad, (generation or {}).get("pad_token_id"), eos[0])
    tokens["pad_token_id"] = next(index for index in pads if index is not None)
    if bos not in (None, tokens["pad_token_id"]):
        tokens["bos_token_id"] = bos
    for name, index in [*(("eos_token_id", index) for index in eos), *tokens.items()]:
        # Image and vision ids may exceed the vocabulary here: `PromptBuilder` checks them.
        size = sys.maxsize if name in IMAGE_TOKENS else decoder.vocab_size
        kind = f"a token of the vocabulary of {decoder.vocab_size}"
        _check("config.json", name, index, kind, _is_whole(index) and index < size)
    return BackboneConfig(vision=vision, text=decoder, family=family, eos_token_ids=eos, **tokens)


def to_hf(config: BackboneConfig) -> dict[str, Any]:
    """A `config.json` that transformers opens; `from_hf` of it gives this config back."""
    text, eos = config.text, list(config.eos_token_ids)
    family = family_of(config.family)
    shared = {
        "bos_token_id": config.pad_token_id if config.bos_token_id is None else config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": text.tie_embeddings,
    }
    decoder = {**_part_to_hf(text, family.decoder), "rope_theta": text.rope_theta}
    top = {"architectures": [family.architecture], "model_type": config.family, **shared}
    if config.vision is None or family.tower is None:
        scaling = text.rope_scaling
        stretched = scaling and {"rope_type": "llama3", **dataclasses.asdict(scaling)}
        return {**top, **decoder, "head_dim": text.head_dim, "rope_scaling": stretched}
    is_interleaved = {"rope_type": "default", "mrope_interleaved": True}
    mrope = is_interleaved if text.mrope_interleaved else {"type": "mrope"}
    decoder["rope_scaling"] = {**mrope, "mrope_section": list(text.mrope_section)}
    return {
        **top,
        **{name: getattr(config, name) for name in IMAGE_TOKENS},
        **({"text_config": {**decoder, **shared}} if family.nests else decoder),
        "vision_config": _part_to_hf(config.vision, family.tower)
        | {"in_channels": config.vision.in_channels},
    }


def _part_to_hf(config: VisionConfig | TextConfig, part: Decoder) -> dict[str, Any]:
    """vision_config or text_config."""
    values = {theirs: getattr(config, ours) for ours, theirs in part.names.items()}
    lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
    return {**part.written, **part.fixed, **values, **lists}


def _check(where: str, name: str, value: Any, kind: str, is_right: bool) -> None:
    if not is_right:
        raise ValueError(f"{where} {name} must be {kind}, got {_short(value)}; correct it")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_size(value: Any) -> bool:
    return _is_whole(value, 1) and value < 2**31


def _is_depth(value: Any) -> bool:
    return _is_whole(value, 1) and value <= 1000


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_whole, value))


_LAYERS = "a list of layers, numbered from 0", _is_list
_ONE_SIZE = "one number, the same along every axis (others are not implemented)", _is_size
# The type of a field that is not a whole number above 0.
_KINDS = {
    "num_layers": ("a whole number from 1 to 1000", _is_depth),
    "full_attention_layers": _LAYERS,
    "deepstack_layers": _LAYERS,
    "patch_size": _ONE_SIZE,
    "temporal_patch_size": _ONE_SIZE,
    "norm_eps": ("a number above 0", _is_positive),
}


def _field(config: dict[str, Any], name: str, where: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"{where} must have {name!r}, got {sorted(config)}; add it")
    return config[name]


def _object(config: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The object under a name; {} if there is none."""
    found = config.get(name)
    _check(where, name, found, "a JSON object", isinstance(found, dict | None))
    return found or {}


def _fields(config: dict[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """The fields under our names, lists converted to tuples."""
    values = {}
    for ours, theirs in names.items():
        kind, is_right = _KINDS.get(ours, ("a whole number above 0", _is_size))
        value = _field(config, theirs, where)
        value = tuple(value) if isinstance(value, list) else value
        if ours in ("patch_size", "temporal_patch_size") and isinstance(value, tuple) and value:
            value = value[0] if value == value[:1] * len(value) else value
        _check(where, theirs, value, kind, is_right(value))
        values[ours] = value
    return values


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
    _check(where, "tie_word_embeddings", tie, "true or false", isinstance(tie, bool))
    return tie


def _check_fixed(config: dict[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    """Refuses settings that the code does not implement; absent settings pass."""
    for name, expected in fixed.items():
        if config.get(name, expected) != expected:
            raise ValueError(
                f"{where} {name} must be {expected!r}, got {config[name]!r}, which is not "
                "implemented"
            )


def _vision_from_hf(config: dict[str, Any], tower: Tower) -> VisionConfig:
    config = {**tower.defaults, **config}
    _check_fixed(config, tower.fixed, "vision_config")
    _check_tower_rope(config)
    fields = _fields(config, tower.names, "vision_config")
    channels = config.get("in_channels", config.get("in_chans", 3))
    _check("vision_config", "in_channels", channels, "a whole number above 0", _is_size(channels))
    return VisionConfig(in_channels=channels, **fields, **tower.flags)


def _check_tower_rope(config: dict[str, Any]) -> None:
    """Refuses a tower with other rotary frequencies, in every field that may set them."""
    fixed = {"rope_theta": VISION_ROPE_THETA, "partial_rotary_factor": 1.0}
    for name in ("rope_parameters", "rope_scaling", ""):
        rope = _object(config, name, "vision_config") if name else config
        where = f"vision_config {name}".strip()
        given = {key: value for key, value in rope.items() if value is not None}
        _check_fixed(given, fixed, where)
        rope_type = given.get("rope_type", given.get("type", "default")) if name else "default"
        kind = "'default' or 'axial' (others are not implemented)"
        _check(where, "rope_type", rope_type, kind, rope_type in ("default", "axial"))


def _text_from_hf(config: dict[str, Any], family: Family, *, tie: bool) -> TextConfig:
    decoder, reads_images = family.decoder, family.tower is not None
    if "num_local_experts" in config:  # as transformers 5 writes it
        config = {"num_experts": config["num_local_experts"], **config}
    config = {**decoder.defaults, **config}
    _check_fixed(config, decoder.fixed, "text_config")
    fields = _fields(config, decoder.names, "text_config")
    if "head_dim" not in fields:
        fields["head_dim"] = _head_dim(config, fields, is_free=not reads_images)
    rope = _object(config, "rope_parameters", "text_config")
    rope = rope or _object(config, "rope_scaling", "text_config")
    given = {name: value for name, value in rope.items() if value is not None}
    _check_fixed(given, {"partial_rotary_factor": 1.0}, "rope_scaling")
    theta = rope.get("rope_theta") or _field(config, "rope_theta", "text_config")
    _check("text_config", "rope_theta", theta, "a number above 0", _is_positive(theta))
    fields["rope_theta"] = float(theta)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    known = "mrope" if reads_images else "llama3"
    kind = f"'default' or {known!r} (others are not implemented)"
    _check("rope", "type", rope_type, kind, rope_type in ("default", known))
    if rope_type == "llama3":
        numbers = {name: _field(rope, name, "rope_scaling") for name in _ROPE_SCALING}
        for name, value in numbers.items():
            _check("rope_scaling", name, value, "a number above 0", _is_positive(value))
        fields["rope_scaling"] = RopeScaling(**numbers)
    if reads_images:
        is_interleaved = decoder.flags["mrope_interleaved"]
        _check_fixed(rope, {"mrope_interleaved": is_interleaved}, "rope_scaling")
        section = _field(rope, "mrope_section", "rope_scaling")
        is_three = _is_list(section) and len(section) == 3
        _check("rope_scaling", "mrope_section", section, "three whole numbers", is_three)
        fields["mrope_section"] = tuple(section)
    else:
        fields["mrope_section"] = (fields["head_dim"] // 2, 0, 0)
    return TextConfig(tie_embeddings=tie, **fields, **decoder.flags)


def _head_dim(config: dict[str, Any], fields: dict[str, Any], *, is_free: bool) -> int:
    """hidden_size / num_attention_heads, or any other size that is given if `is_free`."""
    width, heads = fields["hidden_size"], fields["num_heads"]
    given = config.get("head_dim")
    kind = f"hidden_size / num_attention_heads = {width} / {heads}"
    if is_free and given is not None:
        is_even = _is_size(given) and given % 2 == 0
        _check("text_config", "head_dim", given, "an even number above 0", is_even)
        return given
    given = width // heads if given is None else given
    _check("text_config", "head_dim", given, kind, given * heads == width)
    return given
