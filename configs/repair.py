"""The tiny backbone on a task for reflection: rationales state what was read, often wrongly.

In the demo (`configs/tiny.py`) nine rationales of ten are right, so reflection has little to
repair. Here the teacher misreads the figure in half of the kinds of question and answers from its
reading. In the other half it reads correctly and sometimes computes wrongly. See
`care_jax/data/drawn/readings.py`.
`python -m care_jax.commands.probe --config=configs/repair.py` measures what a repair can gain.
"""

from ml_collections import ConfigDict

from configs import common, tiny


def get_config(family: str = "qwen2_5_vl") -> ConfigDict:
    """`family` as in `configs/tiny.py`."""
    config = tiny.get_config(family)
    data = config.data
    data.sft = common.source("readings", num_examples=65536, seed=1)
    data.train = common.source("readings", num_examples=32768, seed=2)
    data.test = common.source("readings", num_examples=1024, seed=3)
    data.misread_share = 0.8
    data.teacher_error = 0.1
    data.cue_share = 0.05
    data.buckets = ((56, 64),)

    sft = config.sft
    sft.num_steps = 1600
    sft.row_tokens = sft.row_patches = 256
    sft.microbatch_size = 4

    rl = config.rl
    rl.row_tokens = 768  # a prompt, eight rollouts of about 57 tokens, and a repair
    rl.row_patches = 128
    rl.microbatch_size = 2
    rl.learning_rate = 2.5e-4  # CARE's, from experiments/repair_rates.py
    rl.max_response_tokens = 136  # two rationales, the cue and the answer
    config.care.max_context = 62
    config.evaluate.max_response_tokens = 136
    # As in training and in the paper (app:exp_details). Greedy readings are right after the cold
    # start.
    config.evaluate.temperature = 1.0
    return config
