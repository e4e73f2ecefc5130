"""Qwen3-8B, which reads text alone: CARE on JSONL files, as in `configs/qwen25_7b.py`.

Its own rationales are in <think> tags, as are those that the instruction asks for.
"""

from ml_collections import ConfigDict

from configs import qwen25_7b


def get_config() -> ConfigDict:
    """Cold start, CARE, evaluation and export."""
    return qwen25_7b.get_config("Qwen/Qwen3-8B")
