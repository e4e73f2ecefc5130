"""Token weights by region (RW): uniform, on the answer alone, or as in CARE.

`rw_unmasked` gives the rationale of wrong rows the weight that CARE reserves for correct ones. The
shares fix the rationale's part of a correct row's credit instead of its weight.
Plotted against decoded tokens.
"""

from configs.arms import with_arm

ARMS = {
    "uniform": {"care.region_weights": False},
    "answer_only": {"care.gamma_pos": 0.0},
    "rw": {"care.gamma_pos": 0.005},
    "rw_unmasked": {"care.gamma_pos": 0.005, "care.gamma_neg": 0.005},
    "share_20": {"care.gamma_share": 0.2},
    "share_50": {"care.gamma_share": 0.5},
}
REFERENCE = "rw"
PANELS = "by_tokens,accuracy"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
