"""Trains a vision tower for the model of `configs/smollm_words.py`, on drawn charts.

    python -m care_jax.main --config=configs/smollm_charts.py --workdir=runs/charts

It starts from that run's export, which has learned the response format. The decoder is frozen; the
random vision tower and its merger are trained, in the cold start and in RL. The run is long: the
same command resumes it.
"""

from ml_collections import ConfigDict

from configs import common, smollm_words


def get_config() -> ConfigDict:
    """Cold start, RL, and an evaluation after each."""
    config = smollm_words.get_config()
    config.stages = ("sft", "evaluate", "rl", "evaluate")
    config.checkpoint_every = 20

    config.model.path = "runs/words/export"
    config.model.freeze_vision, config.model.freeze_decoder = False, True

    data = config.data
    data.sft = common.source("synthetic", num_examples=32768, seed=1)
    data.train = common.source("synthetic", num_examples=32768, seed=2)
    data.test = common.source("synthetic", num_examples=256, seed=3)
    data.cue_share = 0.1
    data.buckets = ((64, 64),)

    sft = config.sft
    sft.num_steps = 600
    sft.batch_size = 32
    sft.learning_rate = 1e-3
    sft.warmup_steps = 20
    sft.answer_weight = 6.0  # rationales name the operation; only the answer depends on the picture
    sft.row_patches = 512

    rl = config.rl
    rl.num_steps = 100
    rl.row_patches = 512
    rl.max_response_tokens = 64
    rl.learning_rate = 1e-4
    config.care.max_context = 24
    config.evaluate.batch_size = 32
    config.evaluate.max_response_tokens = 64
    return config
