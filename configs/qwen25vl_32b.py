"""Qwen2.5-VL-32B-Instruct: CARE on JSONL files, as in `configs/qwen25vl_3b.py`."""

from ml_collections import ConfigDict

from configs import qwen25vl_7b


def get_config(path: str = "Qwen/Qwen2.5-VL-32B-Instruct") -> ConfigDict:
    """Cold start, CARE, evaluation and export; `path` is a hub id or folder of the release.

    The four chips of a TPU host hold the weights that decode; on a node of eight GPUs set
    mesh.tensor to 4.
    """
    config = qwen25vl_7b.get_config()
    config.model.path = path
    return config
