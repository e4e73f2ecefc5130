"""Learning rates for the arms of `experiments/repair.py`, tuned on separate seeds.

    python -m experiments.sweep --experiment=experiments/repair_rates.py --base=repair \\
        --first_seed=100 --seeds=3 --config.data.test.num_examples=2048

The rule chooses among 2.5e-4, 5e-4 and 1e-3. CARE's choice was the lowest, so 1.25e-4 was run
afterwards, to see whether a lower rate is better.
"""

from configs.arms import with_arm

ARMS = {
    f"{objective}_{rate:g}": {"rl.objective": objective, "rl.learning_rate": rate}
    for objective in ("care", "grpo")
    for rate in (2.5e-4, 5e-4, 1e-3)
} | {"care_0.000125": {"rl.objective": "care", "rl.learning_rate": 1.25e-4}}
REFERENCE = "care_0.0005"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
