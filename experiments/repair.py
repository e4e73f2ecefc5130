"""CARE against GRPO and ablations on a task made for reflection, by a rule fixed before the runs.

    python -m experiments.sweep --experiment=experiments/repair.py --base=repair --seeds=10 \\
        --config.data.test.num_examples=8192 --config.rl.eval_every=25

1. The learning rate is the one of 2.5e-4, 5e-4 and 1e-3 with the highest accuracy after RL, over
   seeds 100 to 102, which are not used again (`experiments/repair_rates.py`). It is tuned for
   `care` and `grpo`; `grpo_extra_row` uses that of `grpo`, all other arms that of `care`.
2. Seeds 0 to 9 are evaluated on 8192 held-out questions, sampled at temperature 1 as in training.
3. Arms are compared at equal decoded tokens: each seed's accuracy during RL, interpolated at the
   number of tokens that all arms of that seed have decoded.
4. CARE leads an arm if the 95% interval (Student's t over the seeds) of the paired differences is
   above 0, and trails it if the interval is below 0. Otherwise the comparison is undecided.

Accuracy at the three rates, in order: `care` 82.6, 77.2 and 48.9%, so 2.5e-4, the lowest rate;
`grpo` 98.4, 98.8 and 98.8%, for which 1e-3 was chosen.

`grpo_slow` is GRPO at CARE's rate.

`grpo_extra_row` has G = 9, the maximum number of rows of a prompt under CARE. `resample` replaces
the repair by a fresh rollout. `share_*` fixes the rationale's share of a correct rollout's credit;
γ⁺ gives 0.026 at 43 rationale and 8 answer tokens, the lengths of `configs/repair.py`.
"""

from configs.arms import with_arm

_GRPO = {"rl.objective": "grpo", "rl.learning_rate": 1e-3}
ARMS = {
    "care": {},
    "grpo": _GRPO,
    "grpo_slow": {"rl.objective": "grpo"},
    "grpo_extra_row": _GRPO | {"rl.num_rollouts": 9},
    "resample": {"care.reflect_mode": "resample"},
    "anchor": {"care.reflect": False},
    "uniform": {"care.region_weights": False},
    "share_20": {"care.gamma_share": 0.2},
    "share_50": {"care.gamma_share": 0.5},
}
REFERENCE = "care"
COLUMNS = (
    "acc,gain,held_out_equal_tokens,held_out_equal_tokens:lead,lead,reflect_success,"
    "reflect_first_try,think_tokens,grad_clipped,decoded_tokens"
)
PANELS = "held_out_by_tokens,held_out_equal_tokens:lead"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
