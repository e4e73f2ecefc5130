"""The scale s of negative advantages, with s_refl = s/2 (fig:neg_penalty)."""

from configs.arms import with_arm

ARMS = {f"s_{s}": {"care.s": s, "care.s_refl": s / 2} for s in (1.0, 0.7, 0.5, 0.3)}
REFERENCE = "s_0.5"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
