"""Qwen2.5-VL-7B-Instruct with LoRA on one GPU of 48 or 80 GB, as `configs/qwen25vl_3b_lora.py`."""

from ml_collections import ConfigDict

from configs import lora, qwen25vl_7b

SIZES = {
    "48": {"rl.decode_prompts": 8, "rl.decode_rows": 4},
    "80": {"rl.decode_prompts": 32, "rl.decode_rows": 4},
}


def get_config(memory: str = "48") -> ConfigDict:
    """Cold start, CARE, evaluation and export; `memory` of the GPU is in GB."""
    return lora.on_one_gpu(qwen25vl_7b.get_config(), memory, SIZES)
