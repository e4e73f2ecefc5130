"""Qwen3-VL-30B-A3B-Instruct, a sparse model: CARE on JSONL files, as in the 3B's config."""

from ml_collections import ConfigDict

from configs import qwen3vl_8b


def get_config() -> ConfigDict:
    """Cold start, CARE, evaluation and export; experts over tensor x sequence = 4 chips."""
    config = qwen3vl_8b.get_config()
    config.model.path = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    return config
