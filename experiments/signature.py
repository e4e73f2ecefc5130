"""The √K' signature: A_raw of an anchor is α·√K' and that of its negatives -α/√K'.

Reflection is off, as a reflected row changes S; see `signature/*` in the metrics. With the
format in the reward, the negatives' rewards differ and α falls below 1; with acc alone it is 1.
"""

from ml_collections import ConfigDict

from configs.arms import with_arm

ARMS = {
    f"k_{number}_{name}": {
        "care.K": number,
        "care.reflect": False,
        "rl.format_weight": weight,
    }
    for number in (2, 4, 6)
    for name, weight in (("acc", 0.0), ("acc_fmt", 0.1))
}
REFERENCE = "k_4_acc"
COLUMNS = (
    "anchor_slope",
    "anchor_r2",
    "negative_slope",
    "negative_r2",
    "alpha",
    "alpha_slope",
    "alpha_r",
)
PANELS = ("anchor", "negative", "alpha")


def get_config(arm: str = REFERENCE) -> ConfigDict:
    """An arm, see `configs/arms.py`."""
    return with_arm(ARMS, arm)
