"""The model of `configs/smollm_words.py` learns to see drawn charts, in several sittings.

    python -m care_jax.main --config=configs/smollm_charts.py --workdir=runs/charts

It starts from the export of the run on words, which knows the format of an answer. The decoder is
frozen and the random vision tower is trained with its merger, in the cold start as in RL, so that
what is learned is reading pictures. The same command goes on where a sitting has ended.
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
    sft.answer_weight = 6.0  # rationales name the operation, only answers need the picture
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
