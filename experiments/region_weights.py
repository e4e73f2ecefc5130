"""Token weights by region (RW): uniform, answer only, or CARE's (fig:rw).

`rw_unmasked` also gives failed rationales the weight γ⁺. `uniform` is CARE with uniform weights;
the paper calls its uniform arm GRPO. `share_*`, not in the paper, fixes the rationale's share of a
correct rollout's credit.
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
