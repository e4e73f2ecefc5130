"""Qwen2.5-VL-3B-Instruct with LoRA on one GPU of 24, 48 or 80 GB: CARE on JSONL files.

    python -m care_jax.main --config=configs/qwen25vl_3b_lora.py:24 --workdir=runs/3b_lora ...

The data are set as in `configs/qwen25vl_3b.py`.
"""

from ml_collections import ConfigDict

from configs import lora, qwen25vl_3b

SIZES = {
    "24": {"rl.decode_prompts": 6},
    "48": {"rl.decode_prompts": 32},
    "80": {"rl.decode_prompts": 32, "rl.decode_rows": 8, "model.remat": "dots"},
}


def get_config(memory: str = "24") -> ConfigDict:
    """Cold start, CARE, evaluation and export; `memory` of the GPU is in GB."""
    return lora.on_one_gpu(qwen25vl_3b.get_config(), memory, SIZES)
