"""A 0.6M-parameter backbone on synthetic charts and diagrams: SFT, RL, evaluation; minutes on CPUs.

The cold start's teacher is wrong on purpose: most of its sums and differences are off by two. SFT
learns the error and RL corrects it, see `care_jax/data/drawn/synthetic.py`. The architecture is
Qwen2.5-VL's, or Qwen3-VL's with `--config=configs/tiny.py:qwen3_vl`, or its sparse one with
`:qwen3_vl_moe`.
"""

from ml_collections import ConfigDict

from configs import common

THINK_TAGS = {"qwen2_5_vl": "think", "qwen3_vl": "reasoning", "qwen3_vl_moe": "reasoning"}


def get_config(family: str = "qwen2_5_vl") -> ConfigDict:
    """The configuration of `make demo`."""
    if family not in THINK_TAGS:
        raise ValueError(f"configs/tiny.py has {', '.join(THINK_TAGS)}, not {family!r}")
    config = common.get_config()
    config.stages = ("sft", "evaluate", "rl", "evaluate")
    config.log_every = 10

    config.model.compute_dtype, config.model.remat = "float32", "none"
    config.model.backbone = ConfigDict(_backbone(family))
    config.data.think_tag = THINK_TAGS[family]

    data = config.data
    data.sft = common.source("synthetic", num_examples=32768, seed=1)
    data.train = common.source("synthetic", num_examples=32768, seed=2)
    data.test = common.source("synthetic", num_examples=512, seed=3)
    data.num_workers = 1  # images are drawn in Python, which threads do not speed up
    data.teacher_error = 0.75
    data.cue_share = 0.1
    data.min_pixels, data.max_pixels = 256, 4096
    data.buckets = ((48, 64),)
    data.system_prompt = "Answer."
    data.instruction = ""

    sft = config.sft
    sft.num_steps = 400
    sft.batch_size = 64
    sft.microbatch_size = 8
    sft.learning_rate = 2e-3
    sft.warmup_steps = 20
    sft.answer_weight = 6.0
    sft.row_tokens = sft.row_patches = 128

    rl = config.rl
    rl.num_steps = 100
    rl.prompts_per_step = 64
    rl.prompts_per_update = 32
    rl.microbatch_size = 4
    rl.row_tokens, rl.row_patches = 192, 96
    rl.row_lengths = 1  # another program takes longer to compile than all steps gain by it
    rl.decode_prompts = 64
    rl.max_response_tokens = 36
    rl.learning_rate = 5e-4
    rl.warmup_steps = 15
    rl.schedule = "cosine"
    config.care.beta = config.grpo.beta = 0.0
    config.care.max_context = 11
    # At this size most all-failed prompts are ones that the backbone cannot read. A full-scale
    # rescue would reinforce a guess.
    config.care.rescue_scale = 0.1
    config.care.cue = " Wait, that is wrong."
    config.evaluate.batch_size = 64
    config.evaluate.max_response_tokens = 36
    return config


def _backbone(family: str) -> dict:
    """`config.json` fields of a backbone with about 0.6M parameters."""
    sparse = {}
    if family == "qwen3_vl_moe":
        sparse = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        sparse |= {"norm_topk_prob": True}
    of_family = {
        "qwen2_5_vl": {"hidden_act": "silu", "window_size": 64, "fullatt_block_indexes": [0]},
        "qwen3_vl": {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 64}
        | {"deepstack_visual_indexes": [0]},
    }
    of_family["qwen3_vl_moe"] = of_family["qwen3_vl"]
    return {
        "model_type": family,
        "tie_word_embeddings": True,
        "text_config": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 1e-6}
        | {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 4, 4]}}
        | {"hidden_act": "silu", "max_position_embeddings": 4096, **sparse},
        "vision_config": {"depth": 1, "hidden_size": 96, "intermediate_size": 192, "num_heads": 4}
        | {"out_hidden_size": 96, "patch_size": 8, "temporal_patch_size": 2, "in_channels": 3}
        | {"spatial_merge_size": 2, **of_family[family]},
    }
