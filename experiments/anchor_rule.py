"""Which success is the anchor: the shortest, or any of them."""

from ml_collections import ConfigDict

from configs.arms import with_arm

ARMS = {rule: {"care.anchor_rule": rule} for rule in ("shortest", "random")}


def get_config(arm: str = "shortest") -> ConfigDict:
    """An arm, see `configs/arms.py`."""
    return with_arm(ARMS, arm)
