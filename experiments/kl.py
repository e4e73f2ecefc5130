"""CARE and GRPO at one learning rate, with the paper's KL term (β = 0.02, tab:train_config) or not.

The small tasks have β = 0, where nothing holds the rationales of negatives, to which the region
weights give no credit. `uniform` and `share_20` are CARE with other token weights, added after the
runs of the others.

    python -m experiments.sweep --experiment=experiments/kl.py --base=repair --seeds=5
"""

from configs.arms import with_arm

CARE = {
    "care": {},
    "uniform": {"care.region_weights": False},
    "share_20": {"care.gamma_share": 0.2},
}
ARMS = {
    f"{name}_{beta}": {"rl.objective": "care", **changes, "care.beta": beta}
    for name, changes in CARE.items()
    for beta in (0.0, 0.02)
} | {f"grpo_{beta}": {"rl.objective": "grpo", "grpo.beta": beta} for beta in (0.0, 0.02)}
REFERENCE = "care_0.0"
COLUMNS = "acc,gain,lead,held_out_area,think_tokens,kl,grad_clipped,decoded_tokens"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
