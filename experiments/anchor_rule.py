"""The anchor: the success with the shortest rationale, or a random one (fig:anchor-ablation)."""

from configs.arms import with_arm

ARMS = {rule: {"care.anchor_rule": rule} for rule in ("shortest", "random")}
REFERENCE = "shortest"
COLUMNS = "acc,gain,lead,think_tokens,benchmarks,decoded_tokens"
PANELS = "accuracy,think_tokens"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
