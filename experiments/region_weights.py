"""Token weights by region (RW): uniform, answer only, or CARE's (fig:rw).

`rw_unmasked` also gives failed rationales the weight γ⁺. The paper's uniform arm is GRPO; `uniform`
is CARE with uniform weights. `share_*`, not in the paper, fixes the rationale's share of a correct
rollout's credit.
"""

from configs.arms import with_arm

ARMS = {
    "grpo": {"rl.objective": "grpo"},
    "uniform": {"care.region_weights": False},
    "answer_only": {"care.gamma_pos": 0.0},
    "rw": {"care.gamma_pos": 0.005},
    "rw_unmasked": {"care.gamma_pos": 0.005, "care.gamma_neg": 0.005},
    "share_20": {"care.gamma_share": 0.2},
    "share_50": {"care.gamma_share": 0.5},
}
REFERENCE = "rw"
COLUMNS = "acc,gain,lead,held_out_area,held_out_equal_tokens,think_tokens,decoded_tokens"
PANELS = "held_out_by_tokens,held_out_area"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
