"""All-failed groups: skipped, rescued as in the paper (fig:rescue), or at a tenth of the scale."""

from configs.arms import with_arm

ARMS = {
    "off": {"care.rescue": False},
    "full": {"care.rescue_scale": 1.0},
    "weak": {"care.rescue_scale": 0.1},
}
REFERENCE = "off"
COLUMNS = "acc,gain,lead,triggers,acc_at_50,rescue_gain@50,kl_per_trigger"
PANELS = "accuracy,acc_at_50,kl_per_trigger,by_tokens"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
