"""A 0.6M-parameter backbone on your own JSONL files, on a CPU: do rows, rewards and settings work?

    python -m care_jax.main --config=configs/small.py --workdir=runs/small \
        --config.data.train.path=train.jsonl --config.data.test.path=test.jsonl

`--config=configs/small.py:sft` begins with a cold start on `--config.data.sft.path`, whose rows
have a `response`. Without it the backbone knows no language and no answer is right: the run shows
that everything works, not what can be learned. `care_jax/data/readers/jsonl.py` describes a row.
"""

from ml_collections import ConfigDict

from configs import common, tiny


def get_config(first: str = "rl") -> ConfigDict:
    """RL on `data.train` and an evaluation on `data.test`; `first` is "rl" or "sft"."""
    if first not in ("rl", "sft"):
        raise ValueError(f"configs/small.py has :sft or nothing, not {first!r}")
    config = tiny.get_config()
    config.stages = ("sft", "rl", "evaluate") if first == "sft" else ("rl", "evaluate")

    data, defaults = config.data, common.get_config().data
    data.sft, data.train, data.test = (common.source("jsonl") for _ in range(3))
    data.teacher_error = data.cue_share = 0.0  # of drawn sources
    data.system_prompt, data.instruction = defaults.system_prompt, defaults.instruction
    # An image becomes at most about 64 tokens. The built-in tokenizer has about two
    # characters of English per token.
    data.max_pixels = 128 * 128
    data.buckets = ((512, 1024), (4096, 4096), (16384, 4096))

    sft = config.sft
    sft.num_steps, sft.batch_size, sft.microbatch_size = 100, 16, 1
    sft.learning_rate, sft.warmup_steps, sft.answer_weight = 1e-3, 10, 1.0
    sft.row_tokens, sft.row_patches = 16384 + 1024, 4096
    sft.row_lengths = 4  # a program takes longer to compile than a step

    rl = config.rl
    rl.num_steps, rl.warmup_steps = 20, 2
    rl.prompts_per_step = rl.prompts_per_update = rl.decode_prompts = 8
    rl.microbatch_size = 1
    rl.max_response_tokens = config.evaluate.max_response_tokens = 256
    rl.row_tokens, rl.row_patches = 16384 + 256, 4096
    rl.row_lengths = 4
    config.care.max_context = 96
    config.care.cue = common.CUE
    config.evaluate.batch_size = 8
    config.log_every = 1
    return config
