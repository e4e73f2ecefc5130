"""CARE against its baselines: same data, verifier, reward and prompts per update.

DAPO decodes more, to fill an update with prompts that teach: about twice as many here. Each has its
published clip range and β; at the size of `configs/tiny.py` CARE and GRPO do without a KL, as its
demo does.
"""

from ml_collections import ConfigDict

from configs.arms import with_arm

ARMS = {
    name: {"rl.objective": name} for name in ("care", "grpo", "dapo", "gspo", "dr_grpo", "rloo")
}
REFERENCE = "care"


def get_config(arm: str = REFERENCE) -> ConfigDict:
    """An arm, see `configs/arms.py`."""
    return with_arm(ARMS, arm)
