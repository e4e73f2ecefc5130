"""LoRA on one GPU: what every such configuration sets, and what depends on the GPU's memory.

The memory decides only how work is divided, so the learned weights do not depend on it, up to
rounding. `python -m care_jax.aot --topology=rtx4090:1` says whether a run fits a GPU.
"""

from typing import Any

from ml_collections import ConfigDict


def on_one_gpu(config: ConfigDict, memory: str, sizes: dict[str, dict[str, Any]]) -> ConfigDict:
    """A configuration of all parameters, changed to train adapters on one GPU.

    Args:
        memory: of the GPU in GB, as it is sold: a key of `sizes`.
        sizes: by memory, keys that only divide the work, such as "rl.decode_prompts".
    """
    if memory not in sizes:
        choices = ", ".join(sizes)
        raise ValueError(
            f"the memory of the GPU must be one of {choices} GB, got {memory!r}; write it after "
            f"the file, as in --config=configs/FILE.py:{next(iter(sizes))}, and for a GPU between "
            "two of them the smaller one"
        )
    config.mesh.tensor = config.mesh.sequence = 1
    model, sft, rl = config.model, config.sft, config.rl
    model.lora_rank = 16
    model.param_dtype = "bfloat16"
    model.freeze_vision = True
    sft.batch_size = 32
    sft.learning_rate = 1e-4  # ten times that of all parameters, as adapters need
    rl.learning_rate = 1e-5
    rl.prompts_per_step = rl.prompts_per_update = 32
    rl.max_response_tokens = 1024
    config.care.max_context = 512
    config.evaluate.max_response_tokens = 1024
    config.update_from_flattened_dict(sizes[memory])
    config.evaluate.batch_size = 2 * rl.decode_prompts
    return config
