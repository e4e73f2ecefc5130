"""Qwen2.5-VL-7B-Instruct: CARE on JSONL files, as in `configs/qwen25vl_3b.py`."""

from ml_collections import ConfigDict

from configs import qwen25vl_3b


def get_config() -> ConfigDict:
    """Cold start, CARE, evaluation and export."""
    config = qwen25vl_3b.get_config("Qwen/Qwen2.5-VL-7B-Instruct")
    # All prompts of a step. Eight rows of each fit v5e:8x8; on h100:8 two are the fastest.
    config.rl.decode_prompts = 512
    config.rl.decode_rows = 0
    return config
