"""The backbones that the measurements share, of the Qwen2.5-VL architecture."""

from models.config import BackboneConfig
from models.release import config_json

IMAGE_SIDE = 448  # pixels: 1024 patches of 14, 256 tokens


def medium_config() -> BackboneConfig:
    """107M parameters: 12 decoder layers of width 768; 6 vision layers of 256, 2 full attention."""
    return config_json.from_hf(
        {
            "model_type": "qwen2_5_vl",
            "tie_word_embeddings": True,
            "image_token_id": 31990,
            "video_token_id": 31991,
            "vision_start_token_id": 31992,
            "vision_end_token_id": 31993,
            "eos_token_id": 31994,
            "pad_token_id": 31995,
            "text_config": {
                "vocab_size": 32000,
                "hidden_size": 768,
                "intermediate_size": 2048,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1000000.0,
                "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
                "hidden_act": "silu",
                "max_position_embeddings": 4096,
            },
            "vision_config": {
                "depth": 6,
                "hidden_size": 256,
                "intermediate_size": 684,
                "num_heads": 4,
                "out_hidden_size": 768,
                "patch_size": 14,
                "temporal_patch_size": 2,
                "in_channels": 3,
                "spatial_merge_size": 2,
                "window_size": 112,
                "fullatt_block_indexes": [2, 5],
                "hidden_act": "silu",
            },
        }
    )
