"""Qwen3-VL-4B-Instruct with LoRA on one GPU of 48 or 80 GB, as `configs/lora.py` says."""

from ml_collections import ConfigDict

from configs import lora, qwen3vl_4b

SIZES = {
    "48": {"rl.decode_prompts": 12},
    "80": {"rl.decode_prompts": 32},
}


def get_config(memory: str = "48") -> ConfigDict:
    """Cold start, CARE, evaluation and export; `memory` of the GPU is in GB."""
    return lora.on_one_gpu(qwen3vl_4b.get_config(), memory, SIZES)
