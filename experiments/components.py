"""What the parts of CARE add: GRPO, the anchored contrast, and with reflection (RGR) upon it.

One table per backbone, such as `components.py:anchor@qwen3vl_4b`.
"""

from configs.arms import with_arm

ARMS = {
    "grpo": {"rl.objective": "grpo"},
    "anchor": {"care.reflect": False},
    "anchor_rgr": {"care.reflect": True},
}
REFERENCE = "grpo"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
