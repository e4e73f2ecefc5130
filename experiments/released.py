"""CARE as the paper has it, as its released code has it, and one arm per difference.

    python -m experiments.sweep --experiment=experiments/released.py --base=repair --seeds=5

The differences are those of `configs/care_released.py`, each alone on the paper's CARE; `tokens`
contains `kl_all`, without which it has no meaning, and `kl_all` the paper's KL. `batch` lies
between: the mean over the batch's S*, under which prompts of every K' have equal credit.
`released_acc` undoes `success`, `released_acc_no_kl` the KL too: what is left of the released
code's settings.

A rule for `batch`, fixed before RL began: `care.mean` is "batch" by default if the 95% interval of
its lead over `care` is above 0 (held-out, mean over the steps, five seeds); else it stays eq:ppo's.
"""

from configs.arms import with_arm
from configs.care_released import DIFFERENCES, RELEASED, with_think_tag

_ACC = RELEASED | {"care.success": "acc"}  # where a wrong answer is a failure
_GRPO = {"rl.objective": "grpo", "rl.learning_rate": 1e-3}  # the rate of experiments/repair.py
ARMS = (
    {"care": {}}
    | DIFFERENCES
    | {
        "kl_all": DIFFERENCES["kl_all"] | {"care.beta": 0.02},  # 0 on the small tasks
        "batch": {"care.mean": "batch"},
        "released": RELEASED,
        "released_acc": _ACC,
        "released_acc_no_kl": _ACC | {"care.beta": 0.0},
        "grpo": _GRPO,
        "grpo_slow": _GRPO | {"rl.learning_rate": 2.5e-4},
    }
)
REFERENCE = "care"
COLUMNS = (
    "acc,gain,held_out_equal_tokens,held_out_equal_tokens:lead,held_out_area,held_out_area:lead,"
    "reflect_success,think_tokens,grad_clipped,decoded_tokens"
)
PANELS = "held_out_by_tokens,held_out_equal_tokens:lead"


def get_config(arm: str = REFERENCE):
    return with_think_tag(with_arm(ARMS, arm))
