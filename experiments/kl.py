"""CARE and GRPO with the paper's KL term (β = 0.02, tab:train_config) and without.

The small tasks have β = 0, where nothing holds the rationales of negatives, to which the region
weights give no credit.

    python -m experiments.sweep --experiment=experiments/kl.py --base=repair --seeds=5
"""

from configs.arms import with_arm

ARMS = {
    f"{name}_{beta}": {"rl.objective": name, f"{name}.beta": beta}
    for name in ("care", "grpo")
    for beta in (0.0, 0.02)
}
REFERENCE = "care_0.0"
COLUMNS = "acc,gain,lead,held_out_area,think_tokens,kl,grad_clipped,decoded_tokens"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
