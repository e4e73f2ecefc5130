"""Which success is the anchor: the shortest, or a random one."""

from configs.arms import with_arm

ARMS = {rule: {"care.anchor_rule": rule} for rule in ("shortest", "random")}
REFERENCE = "shortest"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
