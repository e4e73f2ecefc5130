"""CARE as its authors' released code has it, on any other configuration.

`--config=configs/care_released.py:repair` is `configs/repair.py` with the keys below;
`...:qwen25vl_7b`, the default, is the model of their script. Each group of keys is one difference
from the paper, and an arm of `experiments/released.py`.

Two of them can stop the learning, as measured in docs/experiments/released. With `success`, groups
whose wrong answers are well-formed give no update. With `tokens`, the credit of a response is |A|
divided by its length and the KL is not, so that β weighs as many times more as it has tokens.

Read in github.com/yongxinwang-ai/CARE, commit 8c6045ca. Not reproduced: its prompt, which asks for
`\\boxed{}` (ours asks for the answer tag that its second decode forces), its limit of 512 tokens
for a repaired answer, its rescue, whose negatives begin with the farthest failure, and its length
of 15 epochs on images of up to 4194304 pixels. Under `prompt_only` our rows keep the opening think
tag, and our anchors are well-formed wherever a success is. The form has 38 tokens, too many for the
responses of `configs/tiny.py`.
"""

from ml_collections import ConfigDict

from configs.arms import with_arm

# A form at the end of the failed rationale; only the answer is sampled. {tag}: data.think_tag.
CUE = "\n<repair>\nMistake:\nFix:\nCorrected final answer:\n</repair></{tag}><answer>"

DIFFERENCES = {
    # Its prompt does not ask for an answer tag, so that the region weights never act.
    "uniform": {"care.region_weights": False},
    "beta": {"care.beta": 0.01},
    "clip": {"care.clip_high": 0.3, "rl.dual_clip": 3.0},
    "form": {
        "care.cue": CUE,
        "care.reflect_temperature": 0.6,
        "care.reflect_top_p": 0.95,
        "data.cue_share": 0.0,  # the form is not a part of a rationale, which could be taught
    },
    "replaces": {"care.reflect_replaces": "always"},
    "kl_all": {"care.kl_rows": "all"},
    "tokens": {"care.mean": "tokens", "care.kl_rows": "all"},
    "success": {"care.success": "reward"},
    "prompt_only": {"care.reflect_credit": "prompt_only"},
    "old_logp": {"rl.old_logp": "trainer"},
}


RELEASED = {key: value for changes in DIFFERENCES.values() for key, value in changes.items()}


def get_config(base: str = "qwen25vl_7b") -> ConfigDict:
    """The configuration `base`, `file` or `file:argument`, with all differences."""
    return with_think_tag(with_arm({"released": RELEASED}, f"released@{base}"))


def with_think_tag(config: ConfigDict) -> ConfigDict:
    """Writes the configuration's think tag into its form, if it has one."""
    config.care.cue = config.care.cue.replace("{tag}", config.data.think_tag)
    return config
