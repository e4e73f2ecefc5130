"""Qwen3-VL-8B-Instruct with LoRA on one GPU of 80 GB, as `configs/lora.py` says."""

from ml_collections import ConfigDict

from configs import lora, qwen3vl_8b

SIZES = {
    "80": {"rl.decode_prompts": 24},
}


def get_config(memory: str = "80") -> ConfigDict:
    """Cold start, CARE, evaluation and export; `memory` of the GPU is in GB."""
    return lora.on_one_gpu(qwen3vl_8b.get_config(), memory, SIZES)
