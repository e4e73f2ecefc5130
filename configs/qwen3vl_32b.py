"""Qwen3-VL-32B-Instruct: CARE on JSONL files, laid out as in `configs/qwen25vl_32b.py`."""

from ml_collections import ConfigDict

from configs import qwen25vl_32b


def get_config() -> ConfigDict:
    """Cold start, CARE, evaluation and export; <reasoning> tags as in the paper's 8B."""
    config = qwen25vl_32b.get_config("Qwen/Qwen3-VL-32B-Instruct")
    config.data.think_tag = "reasoning"
    return config
