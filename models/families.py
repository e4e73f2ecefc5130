"""The families of releases, by their `model_type`: a row says all but the names of the tensors.

Those are in `release.weights`. `release.config_json` reads and writes the settings of a release by
its family's row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The decoder of a family, `TextConfig`, and text_config of its releases."""

    flags: Mapping[str, Any]  # fields of our config that all releases share and no file has
    fixed: Mapping[str, Any]  # settings of all releases; other values are not implemented
    names: Mapping[str, str]  # fields of our config that a file has, and its names of them
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more, for export
    # Of fields that a file may lack: older transformers leave out what equals their defaults.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Tower(Decoder):
    """The vision tower of a family, `VisionConfig`, vision_config and the image processor."""

    _: dataclasses.KW_ONLY
    image_mean: tuple[float, float, float]  # of each channel of pixels in [0, 1]
    image_std: tuple[float, float, float]
    processor: str  # the class that preprocessor_config.json names


@dataclasses.dataclass(frozen=True)
class Family:
    """What the releases of a `model_type` share; without a tower they read text alone."""

    architecture: str  # the class of transformers
    decoder: Decoder
    tower: Tower | None = None
    # Tensors of decoder and tower are named under "model.", settings under "text_config".
    nests: bool = False


_SILU = {"hidden_act": "silu"}
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
_WITH_HEAD_DIM = {**_SIZES, "head_dim": "head_dim"}  # of the others it is not always in the file
_TOWER_SIZES = {
    "num_layers": "depth",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_heads",
    "output_size": "out_hidden_size",
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}
_QWEN2 = {"qkv_bias": True, "qk_norm": False}
_QWEN3 = {"qkv_bias": False, "qk_norm": True}
_QWEN3_VL_TOWER = Tower(
    flags={"gated": False},
    fixed={"hidden_act": "gelu_pytorch_tanh"},
    names={
        **_TOWER_SIZES,
        "num_position_embeddings": "num_position_embeddings",
        "deepstack_layers": "deepstack_visual_indexes",
    },
    written={"model_type": "qwen3_vl"},
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    processor="Qwen3VLProcessor",
)

FAMILIES = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        Decoder(
            flags={**_QWEN2, "mrope_interleaved": False},
            fixed={**_SILU, "use_sliding_window": False},
            names=_SIZES,
        ),
        Tower(
            flags={"gated": True},
            fixed=_SILU,
            names={
                **_TOWER_SIZES,
                "window_size": "window_size",
                "full_attention_layers": "fullatt_block_indexes",
            },
            written={"model_type": "qwen2_5_vl_vision", "tokens_per_second": 2},
            image_mean=(0.48145466, 0.4578275, 0.40821073),  # CLIP's
            image_std=(0.26862954, 0.26130258, 0.27577711),
            processor="Qwen2_5_VLProcessor",
            defaults={
                "depth": 32,
                "intermediate_size": 3420,
                "num_heads": 16,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "window_size": 112,
                "out_hidden_size": 3584,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        ),
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        Decoder(
            flags={**_QWEN3, "mrope_interleaved": True},
            fixed={**_SILU, "attention_bias": False},
            names=_WITH_HEAD_DIM,
            written={"model_type": "qwen3_vl_text"},
        ),
        _QWEN3_VL_TOWER,
        nests=True,
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        Decoder(
            flags={**_QWEN3, "mrope_interleaved": True},
            fixed={**_SILU, "attention_bias": False, "norm_topk_prob": True}
            | {"decoder_sparse_step": 1, "mlp_only_layers": []},
            names={
                **_WITH_HEAD_DIM,
                "intermediate_size": "moe_intermediate_size",
                "num_experts": "num_experts",
                "num_experts_per_token": "num_experts_per_tok",
            },
            written={"model_type": "qwen3_vl_moe_text"},
        ),
        dataclasses.replace(_QWEN3_VL_TOWER, written={"model_type": "qwen3_vl_moe"}),
        nests=True,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        Decoder(flags=_QWEN2, fixed={**_SILU, "use_sliding_window": False}, names=_SIZES),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        Decoder(
            flags=_QWEN3,
            fixed={**_SILU, "attention_bias": False, "use_sliding_window": False},
            names=_WITH_HEAD_DIM,
        ),
    ),
    "llama": Family(
        "LlamaForCausalLM",
        Decoder(
            flags={"qkv_bias": False, "qk_norm": False},
            fixed={**_SILU, "attention_bias": False, "mlp_bias": False},
            names=_SIZES,
            defaults={"rope_theta": 1e4},  # of Llama 2
        ),
    ),
}


def family_of(model_type: str) -> Family:
    """The row of `FAMILIES`.

    Raises:
        ValueError: there is none.
    """
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"model_type must be one of {known}, got {model_type!r}; choose another model"
        )
    return FAMILIES[model_type]
