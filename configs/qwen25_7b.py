"""Qwen2.5-7B-Instruct, which reads text alone: CARE on JSONL files of verifiable questions.

Set `--config.data.train.path=train.jsonl`, likewise `data.sft.path` and `data.test.path`. The
releases of GSM8K and MATH are read with `--config.data.train.source=gsm8k` (or `math`),
`--config.data.train.path=openai/gsm8k` and `--config.data.train.split=train`.
"""

from ml_collections import ConfigDict

from configs import qwen25vl_7b


def get_config(path: str = "Qwen/Qwen2.5-7B-Instruct") -> ConfigDict:
    """Cold start, CARE, evaluation and export; `path` is a hub id or folder of the release."""
    config = qwen25vl_7b.get_config()
    config.model.path = path
    config.data.buckets = ((128, 0), (256, 0), (512, 0), (1024, 0))
    config.sft.row_patches = config.rl.row_patches = 0
    return config
