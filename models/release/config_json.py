"""Converts a Hugging Face `config.json` to a `BackboneConfig` and back.

The file has two layouts. Text-only releases and those of Qwen2.5-VL keep the text fields at the top
level with `rope_theta` and `rope_scaling`. Qwen3-VL and transformers 5 nest them under
`text_config` if there is a tower, and transformers 5 writes `rope_parameters`. All are read. With a
tower the nested layout is written, always with `rope_theta` and `rope_scaling`, which both older
and newer transformers open.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

from models.config import (
    IMAGE_TOKENS,
    VISION_ROPE_THETA,
    BackboneConfig,
    RopeScaling,
    TextConfig,
    VisionConfig,
    flags_of,
)

# Our name to theirs: fields of all families.
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


@dataclasses.dataclass(frozen=True)
class _Part:
    """vision_config or text_config of a family's releases."""

    fields: dict[str, str]  # our name to theirs
    fixed: dict[str, Any]  # settings of all releases; other values are not implemented
    written: dict[str, Any] = dataclasses.field(default_factory=dict)  # more settings for export

    def to_hf(self, config: VisionConfig | TextConfig) -> dict[str, Any]:
        values = {theirs: getattr(config, ours) for ours, theirs in self.fields.items()}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return {**self.written, **self.fixed, **values, **lists}


_VISION = {
    "qwen2_5_vl": _Part(
        _VISION_FIELDS
        | {"window_size": "window_size", "full_attention_layers": "fullatt_block_indexes"},
        fixed={"hidden_act": "silu"},
        written={"model_type": "qwen2_5_vl_vision", "tokens_per_second": 2},
    ),
    "qwen3_vl": _Part(
        {**_VISION_FIELDS, "num_position_embeddings": "num_position_embeddings"}
        | {"deepstack_layers": "deepstack_visual_indexes"},
        fixed={"hidden_act": "gelu_pytorch_tanh"},
        written={"model_type": "qwen3_vl"},
    ),
}
_VISION["qwen3_vl_moe"] = dataclasses.replace(
    _VISION["qwen3_vl"], written={"model_type": "qwen3_vl_moe"}
)
_TEXT = {
    "qwen2_5_vl": _Part(
        _TEXT_FIELDS,
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        written={"model_type": "qwen2_5_vl_text"},
    ),
    "qwen3_vl": _Part(
        _TEXT_FIELDS | {"head_dim": "head_dim"},
        fixed={"hidden_act": "silu", "attention_bias": False},
        written={"model_type": "qwen3_vl_text"},
    ),
    "qwen3_vl_moe": _Part(
        _TEXT_FIELDS
        | {"head_dim": "head_dim", "intermediate_size": "moe_intermediate_size"}
        | {"num_experts": "num_experts", "num_experts_per_token": "num_experts_per_tok"},
        fixed={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        written={"model_type": "qwen3_vl_moe_text"},
    ),
    "qwen2": _Part(_TEXT_FIELDS, fixed={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": _Part(
        _TEXT_FIELDS | {"head_dim": "head_dim"},
        fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    ),
    "llama": _Part(
        _TEXT_FIELDS, fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    ),
}
_ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
# rope_scaling of the families with M-RoPE, without its sections.
_MROPES = {
    "qwen2_5_vl": {"type": "mrope"},
    "qwen3_vl": {"rope_type": "default", "mrope_interleaved": True},
    "qwen3_vl_moe": {"rope_type": "default", "mrope_interleaved": True},
}
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
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a JSON file, got {error}; fetch it again") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, got {fields!r}; fetch it again")
    return fields


def from_hf(config: dict[str, Any], generation: dict[str, Any] | None = None) -> BackboneConfig:
    """Reads a `config.json` in either layout.

    Args:
        config: the file's fields.
        generation: fields of `generation_config.json`. Its EOS ids are appended to the config's;
            the rest, the authors' sampling settings, is ignored.

    Raises:
        ValueError: a field is missing, or asks for something that is not implemented.
    """
    family = str(_field(config, "model_type", "config.json"))
    tower_flags, _ = flags_of(family)  # refuses other families
    text = _object(config, "text_config", "config.json") or config
    tie = _is_tied(config, "config.json")
    if family == "qwen2_5_vl":  # as in transformers
        tie = tie or _is_tied(text, "text_config")
    vision, tokens = None, {}
    if tower_flags is not None:
        _field(config, "vision_config", "config.json")
        vision = _vision_from_hf(_object(config, "vision_config", "config.json"), family)
        tokens = {name: _field(config, name, "config.json") for name in IMAGE_TOKENS}
    decoder = _text_from_hf(text, family, tie=tie)

    eos = _eos_token_ids(text, config, generation or {})
    pads = [text.get(name, config.get(name)) for name in ("pad_token_id", "bos_token_id")]
    tokens["pad_token_id"] = next((index for index in pads if index is not None), eos[0])
    for name, index in [*tokens.items(), *(("eos_token_id", index) for index in eos)]:
        # Image and vision ids may exceed the vocabulary here: `PromptBuilder` checks them.
        size = sys.maxsize if name in IMAGE_TOKENS else decoder.vocab_size
        kind = f"a token of the vocabulary of {decoder.vocab_size}"
        _check("config.json", name, index, kind, _is_whole(index) and index < size)
    return BackboneConfig(vision=vision, text=decoder, family=family, eos_token_ids=eos, **tokens)


def to_hf(config: BackboneConfig) -> dict[str, Any]:
    """A `config.json` that transformers opens; `from_hf` of it gives this config back."""
    family, text, eos = config.family, config.text, list(config.eos_token_ids)
    shared = {
        "bos_token_id": config.pad_token_id,  # as in the releases
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": text.tie_embeddings,
    }
    decoder = {**_TEXT[family].to_hf(text), "rope_theta": text.rope_theta}
    top = {"architectures": [_ARCHITECTURES[family]], "model_type": family, **shared}
    if config.vision is None:
        scaling = text.rope_scaling
        stretched = scaling and {"rope_type": "llama3", **dataclasses.asdict(scaling)}
        return {**top, **decoder, "head_dim": text.head_dim, "rope_scaling": stretched}
    section = list(text.mrope_section)
    decoder["rope_scaling"] = {**_MROPES[family], "mrope_section": section}
    return {
        **top,
        **{name: getattr(config, name) for name in IMAGE_TOKENS},
        "text_config": {**decoder, **shared},
        "vision_config": _VISION[family].to_hf(config.vision)
        | {"in_channels": config.vision.in_channels},
    }


def _check(where: str, name: str, value: Any, kind: str, is_right: bool) -> None:
    if not is_right:
        raise ValueError(f"{where} {name} must be {kind}, got {value!r}; correct it")


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_size(value: Any) -> bool:
    return _is_whole(value, 1)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_whole, value))


_LAYERS = "a list of layers, numbered from 0", _is_list
_ONE_SIZE = "one number, the same along every axis (others are not implemented)", _is_size
# The type of a field that is not a whole number above 0.
_KINDS = {
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


def _fields(config: dict[str, Any], names: dict[str, str], where: str) -> dict[str, Any]:
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


def _check_fixed(config: dict[str, Any], fixed: dict[str, Any], where: str) -> None:
    """Refuses settings that the code does not implement; absent settings pass."""
    for name, expected in fixed.items():
        if config.get(name, expected) != expected:
            raise ValueError(
                f"{where} {name} must be {expected!r}, got {config[name]!r}, which is not "
                "implemented"
            )


def _vision_from_hf(config: dict[str, Any], family: str) -> VisionConfig:
    _check_fixed(config, _VISION[family].fixed, "vision_config")
    _check_tower_rope(config)
    flags, _ = flags_of(family)
    assert flags is not None  # the family has a tower
    fields = _fields(config, _VISION[family].fields, "vision_config")
    channels = config.get("in_channels", config.get("in_chans", 3))
    _check("vision_config", "in_channels", channels, "a whole number above 0", _is_size(channels))
    return VisionConfig(in_channels=channels, **fields, **flags)


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


def _text_from_hf(config: dict[str, Any], family: str, *, tie: bool) -> TextConfig:
    tower_flags, flags = flags_of(family)
    if "num_local_experts" in config:  # as transformers 5 writes it
        config = {"num_experts": config["num_local_experts"], **config}
    _check_fixed(config, _TEXT[family].fixed, "text_config")
    fields = _fields(config, _TEXT[family].fields, "text_config")
    if "head_dim" not in fields:
        fields["head_dim"] = _head_dim(config, fields, is_free=tower_flags is None)
    rope = _object(config, "rope_parameters", "text_config")
    rope = rope or _object(config, "rope_scaling", "text_config")
    given = {name: value for name, value in rope.items() if value is not None}
    _check_fixed(given, {"partial_rotary_factor": 1.0}, "rope_scaling")
    theta = rope.get("rope_theta") or _field(config, "rope_theta", "text_config")
    _check("text_config", "rope_theta", theta, "a number above 0", _is_positive(theta))
    fields["rope_theta"] = float(theta)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    known = "llama3" if tower_flags is None else "mrope"
    kind = f"'default' or {known!r} (others are not implemented)"
    _check("rope", "type", rope_type, kind, rope_type in ("default", known))
    if rope_type == "llama3":
        numbers = {name: _field(rope, name, "rope_scaling") for name in _ROPE_SCALING}
        for name, value in numbers.items():
            _check("rope_scaling", name, value, "a number above 0", _is_positive(value))
        fields["rope_scaling"] = RopeScaling(**numbers)
    if tower_flags is None:
        fields["mrope_section"] = (fields["head_dim"] // 2, 0, 0)
    else:
        _check_fixed(rope, {"mrope_interleaved": flags["mrope_interleaved"]}, "rope_scaling")
        section = _field(rope, "mrope_section", "rope_scaling")
        is_three = _is_list(section) and len(section) == 3
        _check("rope_scaling", "mrope_section", section, "three whole numbers", is_three)
        fields["mrope_section"] = tuple(section)
    return TextConfig(tie_embeddings=tie, **fields, **flags)


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
