"""Which success is the anchor: the shortest, or a random one."""

from ml_collections import ConfigDict

from configs.arms import with_arm

ARMS = {rule: {"care.anchor_rule": rule} for rule in ("shortest", "random")}
REFERENCE = "shortest"


def get_config(arm: str = REFERENCE) -> ConfigDict:
    """An arm, see `configs/arms.py`."""
    return with_arm(ARMS, arm)
