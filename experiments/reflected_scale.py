"""The advantage scale s_refl of a failed reflection, in units of s = 0.5 (fig:srefl_ablation)."""

from configs.arms import with_arm

ARMS = {f"{share}_s": {"care.s_refl": share * 0.5} for share in (0.25, 0.5, 0.75, 1.0)}
REFERENCE = "0.5_s"
COLUMNS = "acc,gain,lead,reflect_gain@300,reflect_success,decoded_tokens"
PANELS = "accuracy,reflect_gain@300"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
