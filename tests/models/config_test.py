"""config.json in both layouts, and what is refused."""

import dataclasses

import pytest

from models.config import QWEN2_5_VL_3B, QWEN2_5_VL_7B, BackboneConfig

PRESETS = {"3b": QWEN2_5_VL_3B, "7b": QWEN2_5_VL_7B}


def flat_release() -> dict:
    """The 3B release's config.json, text fields at the top level."""
    return {
        "model_type": "qwen2_5_vl",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }


def test_flat_release_is_the_preset():
    assert BackboneConfig.from_hf(flat_release()) == QWEN2_5_VL_3B


@pytest.mark.parametrize("name", PRESETS)
def test_config_survives_its_own_file_and_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = PRESETS[name]
    assert BackboneConfig.from_hf(config.to_hf()) == config
    opened = transformers.Qwen2_5_VLConfig(**config.to_hf())
    assert opened.text_config.rope_parameters["rope_theta"] == config.text.rope_theta
    assert BackboneConfig.from_hf(opened.to_dict()) == config


def test_transformers_reads_the_flat_release_as_we_do():
    transformers = pytest.importorskip("transformers")
    opened = transformers.Qwen2_5_VLConfig(**flat_release())
    assert BackboneConfig.from_hf(opened.to_dict()) == QWEN2_5_VL_3B


def test_config_is_hashable():
    assert len({QWEN2_5_VL_3B, QWEN2_5_VL_7B, dataclasses.replace(QWEN2_5_VL_3B)}) == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"model_type": "qwen2_vl"}, "family must be 'qwen2_5_vl'"),
        ({"rope_scaling": {"type": "yarn", "mrope_section": [1, 1, 1]}}, "rope type must be"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, "must sum to head_dim"),
        ({"rms_norm_eps": None}, "must have 'rms_norm_eps'"),
        ({"num_key_value_heads": 3}, "num_heads 16 must be a multiple"),
        ({"hidden_size": 4096}, "must equal text hidden_size"),
        ({"head_dim": 64}, "head_dim must be hidden_size"),
    ],
)
def test_what_is_not_implemented_is_refused(change, message):
    config = flat_release() | change
    if "hidden_size" in change:
        config["num_attention_heads"] = 32
    with pytest.raises(ValueError, match=message):
        BackboneConfig.from_hf(config)
