"""The tiny backbone on real images of many sizes: a test of the pipeline.

    python -m care_jax.main --config=configs/real_images.py --config.data.train.path=FILE.jsonl \
        --config.data.test.path=FILE.jsonl --workdir=runs/real

A backbone this small learns nothing from them.
"""

from ml_collections import ConfigDict

from configs import common, tiny


def get_config() -> ConfigDict:
    """RL from random weights, then evaluation."""
    config = tiny.get_config()
    config.stages = ("rl", "evaluate")
    config.log_every = 1
    data = config.data
    for section in ("train", "test"):
        data[section] = common.source("jsonl")
    data.num_workers = 2
    # One image token of this backbone is 16 x 16 pixels.
    data.min_pixels, data.max_pixels = 4096, 36864
    data.buckets = ((384, 576), (1088, 576))
    rl = config.rl
    rl.num_steps = 4
    rl.prompts_per_step = rl.prompts_per_update = 76  # four steps cover all 304 questions
    rl.microbatch_size = 2
    rl.row_tokens, rl.row_patches = 2048, 1152
    rl.decode_prompts = 19
    rl.warmup_steps = 1
    # Random weights never produce the format. β > 0 also exercises the reference policy.
    config.care.beta = config.grpo.beta = 0.02
    config.evaluate.batch_size = 19
    return config
