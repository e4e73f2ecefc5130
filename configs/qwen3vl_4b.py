"""Qwen3-VL-4B-Instruct: CARE on a file of verifiable questions with images.

Name the data on the command line: `--config.data.train.path=train.jsonl`, likewise `data.sft` and
`data.test`; `data/jsonl.py` says how a row looks. The rationale stands in <reasoning> tags.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Cold start, CARE, evaluation and export."""
    config = common.get_config()
    config.stages = ("sft", "evaluate", "rl", "evaluate", "export")
    config.model.path = "Qwen/Qwen3-VL-4B-Instruct"
    # Shards the policy that decodes, for the 16 GB of a v5e; training is FSDP over the whole mesh.
    config.mesh.tensor = config.mesh.sequence = 2
    config.rl.decode_prompts = 32  # its keys and values are 2.6 times those of Qwen2.5-VL-7B
    config.data.think_tag = "reasoning"
    for section in ("sft", "train", "test"):
        config.data[section].source = "jsonl"
    return config
