"""The √K' signature: A_raw of an anchor is α·√K', that of its negatives -α/√K' (eq:sqrtK-cont).

fig:k2to7. Reflection is off, because a reflected row changes S. With acc as the only reward all
negatives are equal and α is 1. With format (`acc_fmt`) or partial credit for wrong numbers
(`graded`) their rewards differ and α falls below 1. Only right answers are successes. The sample is
every contrasted group in rollouts.jsonl, see `experiments.sweep.signature`.
"""

from configs.arms import with_arm

_REWARDS = {
    "acc": {"rl.format_weight": 0.0},
    "acc_fmt": {"rl.format_weight": 0.1},
    "graded": {
        "rl.format_weight": 0.0,
        "verifier.reward": "care_jax.rewards.partial_credit:relative_error",
        "verifier.success": 1.0,
    },
}
ARMS = {
    f"k_{number}_{name}": {
        "care.K": number,
        "care.M": max(number, 6),
        "care.reflect": False,
        **keys,
    }
    for number in (2, 4, 6, 7)
    for name, keys in _REWARDS.items()
}
REFERENCE = "k_4_graded"
COLUMNS = (
    "groups,anchor_sample_slope,anchor_sample_r2,negative_sample_slope,negative_sample_r2,"
    "alpha_text,alpha_text_slope,alpha_text_r2,alpha_text_error,alpha_appendix,"
    "alpha_appendix_slope,alpha_appendix_r2,alpha_appendix_error"
)
PANELS = "anchor_buckets,negative_buckets,alpha_buckets"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
