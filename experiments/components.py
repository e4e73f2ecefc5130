"""The components of CARE: GRPO, the anchored contrast, and the contrast with reflection (RGR).

tab:ablation_on_care; its backbones are `--base=qwen25vl_3b` and `--base=qwen25vl_7b`.
"""

from configs.arms import with_arm

ARMS = {
    "grpo": {"rl.objective": "grpo"},
    "anchor": {"care.reflect": False},
    "anchor_rgr": {"care.reflect": True},
}
REFERENCE = "grpo"
COLUMNS = "start,acc,gain,lead,benchmarks,response_tokens,decoded_tokens"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
