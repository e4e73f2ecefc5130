"""The run of `hosts_test.py`: everything small, on eight devices.

The RL learning rate is one at which rounding, which Adam turns into whole steps where a gradient is
0, does not change what is sampled.
"""

import zlib

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    """SFT and two RL steps of two updates and two waves each."""
    config = tiny.get_config()
    config.stages = ("sft", "rl")
    config.log_every = 1
    text, vision = config.model.backbone.text_config, config.model.backbone.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 32, 64, 1
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 2, 1, 16
    text.rope_scaling.mrope_section = [2, 3, 3]
    vision.hidden_size = vision.out_hidden_size = 32
    vision.intermediate_size, vision.num_heads = 64, 2
    data, sft, rl = config.data, config.sft, config.rl
    data.sft.num_examples = data.train.num_examples = 16
    data.sft.seed = data.train.seed
    data.teacher_error = data.cue_share = 0.0
    data.test.num_examples = 12
    sft.num_steps, sft.warmup_steps, sft.learning_rate = 4, 2, 1e-2
    sft.batch_size, sft.microbatch_size = 16, 8
    sft.row_tokens, sft.row_patches = 192, 256
    rl.num_steps, rl.num_rollouts = 2, 4
    rl.prompts_per_step = 16
    rl.prompts_per_update = rl.microbatch_size = rl.decode_prompts = 8
    rl.warmup_steps, rl.schedule, rl.learning_rate = 0, "constant", 2e-5
    config.evaluate.batch_size = 8
    return config


def by_its_bytes(question, responses, example):
    """A reward for weights that have not learned anything: one response in eight is right."""
    return [{"acc": zlib.crc32(text.encode()) % 8 == 0, "fmt": 0.0} for text in responses]


def often_right(question, responses, example):
    """One response in three is right."""
    return [{"acc": zlib.crc32(text.encode()) % 3 == 0, "fmt": 0.0} for text in responses]


def seldom_judges(question, responses, example):
    """No verdict on three questions of four."""
    if zlib.crc32(example.id.encode()) % 4:
        raise LookupError("no judge")
    return often_right(question, responses, example)
