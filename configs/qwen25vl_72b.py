"""Qwen2.5-VL-72B-Instruct: CARE on JSONL files, laid out as in `configs/qwen25vl_32b.py`."""

from ml_collections import ConfigDict

from configs import qwen25vl_32b


def get_config() -> ConfigDict:
    """Cold start, CARE, evaluation and export."""
    return qwen25vl_32b.get_config("Qwen/Qwen2.5-VL-72B-Instruct")
