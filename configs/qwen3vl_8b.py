"""Qwen3-VL-8B-Instruct: CARE on JSONL files, as in `configs/qwen25vl_3b.py`."""

from ml_collections import ConfigDict

from configs import qwen25vl_3b


def get_config() -> ConfigDict:
    """Cold start, CARE, evaluation and export; <reasoning> tags as in the paper's 8B."""
    config = qwen25vl_3b.get_config("Qwen/Qwen3-VL-8B-Instruct")
    config.data.think_tag = "reasoning"
    return config
