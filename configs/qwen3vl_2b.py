"""Qwen3-VL-2B-Instruct: CARE on JSONL files, as in `configs/qwen3vl_8b.py`."""

from ml_collections import ConfigDict

from configs import qwen3vl_8b


def get_config() -> ConfigDict:
    """Cold start, CARE, evaluation and export."""
    config = qwen3vl_8b.get_config()
    config.model.path = "Qwen/Qwen3-VL-2B-Instruct"
    config.rl.decode_prompts = 32  # as the 4B: its KV cache per token is twice that of the 7B
    return config
