"""Qwen2.5-VL-3B-Instruct: CARE on JSONL files of verifiable questions with images.

Set `--config.data.train.path=train.jsonl`, likewise `data.sft.path` and `data.test.path`.
`care_jax/data/readers/jsonl.py` describes a row.

CARE has the paper's values. Where rationales are short and may be wrong,
`--config.care.gamma_share=0.2` did better on small tasks (docs/paper.md), as did uniform weights,
`--config.care.region_weights=False`, with `--config.care.anchor_rule=random`: with the shortest
anchor rationales can vanish.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(path: str = "Qwen/Qwen2.5-VL-3B-Instruct") -> ConfigDict:
    """Cold start, CARE, evaluation and export; `path` is a hub id or folder of the release."""
    config = common.get_config()
    config.stages = ("sft", "evaluate", "rl", "evaluate", "export")
    config.model.path = path
    # Decoding is tensor parallel over both axes, to fit the 16 GB of a v5e. Training is FSDP over
    # the whole mesh.
    config.mesh.tensor = config.mesh.sequence = 2
    for section in ("sft", "train", "test"):
        config.data[section].source = "jsonl"
    return config
