"""The scale s of negative advantages, with s_refl = s/2 (fig:neg_penalty).

The figure has the differences to s = 1 by step, of the clip rate and of the variance ratio.
"""

from configs.arms import with_arm

ARMS = {f"s_{s}": {"care.s": s, "care.s_refl": s / 2} for s in (1.0, 0.7, 0.5, 0.3)}
REFERENCE = "s_1.0"
COLUMNS = "acc,lead,clip_rate,clip_rate:lead,variance_ratio,variance_ratio:lead,decoded_tokens"
PANELS = "accuracy,clip_rate_difference,variance_ratio_difference"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
