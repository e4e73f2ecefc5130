"""Does CARE lead GRPO where failures have right rationales? A rule fixed before the runs.

    python -m experiments.sweep --experiment=experiments/dose.py --base=repair --seeds=3 \\
        --first_seed=100 --arms=misread_grpo_1.25,...        (the rates, by task and objective)
    python -m experiments.sweep --experiment=experiments/dose.py --base=repair --seeds=8 --arms=...

Four tasks on `configs/repair.py` differ in where failures come from. A tenth of the teacher's
responses are lucky: a wrong reading, a wrong step, the right answer. Of the others, (misread,
error) is the share with a wrong reading, and of those that read rightly the share with a wrong
result, in every kind of question. The cue is not taught, which would favour objectives that give
rationales credit.

1. Rates: 1.25e-4, 2.5e-4 and 5e-4 for every arm and task, on seeds 100 to 102; the one with the
   highest mean over the steps is taken. Then eight other seeds, 100 steps, 2048 sampled questions.
2. Primary: held-out accuracy, mean over the steps, paired by seed; at equal tokens beside it.
3. Expected before the runs: (a) `anchor` less `grpo` rises with the share of failures whose
   rationale is right, and is above 0 at `error_only`; refuted if its interval there includes 0, or
   that of the slope does. (b) With uniform token weights there is no such slope. (c) At `even`, K =
   2, the nearest failures beat the farthest. (d) At `misread`, reflection beats the anchor alone.

Added after the runs of `uniform`, whose rationales vanished: `uniform_random`, with a random
success as the anchor in place of the shortest. Added after (d) held: `resample`, a fresh rollout in
place of the repair, at the rate of `care`.
"""

from configs.arms import with_arm
from configs.care_released import RELEASED, with_think_tag

TASKS = {
    "misread": (0.8, 0.1),
    "even": (0.4, 0.4),
    "error": (0.1, 0.8),
    "error_only": (0.0, 0.8),
}
OBJECTIVES = {
    "grpo": {"rl.objective": "grpo"},
    "anchor": {"care.reflect": False},
    "care": {},
    "resample": {"care.reflect_mode": "resample"},
    "uniform": {"care.reflect": False, "care.region_weights": False},
    "uniform_random": {
        "care.reflect": False,
        "care.region_weights": False,
        "care.anchor_rule": "random",
    },
    "released": RELEASED,
    "nearest": {"care.reflect": False, "care.K": 2, "care.rule": "nearest"},
    "farthest": {"care.reflect": False, "care.K": 2, "care.rule": "farthest"},
}
RATES = ("1.25", "2.5", "5")  # 1e-4
ARMS = {
    f"{task}_{name}_{rate}": {
        "data.misread_share": misread,
        "data.teacher_error": error,
        "data.mixed_errors": True,
        "data.lucky_share": 0.1,
        "data.cue_share": 0.0,
        **changes,
        "rl.learning_rate": float(rate) * 1e-4,
    }
    for task, (misread, error) in TASKS.items()
    for name, changes in OBJECTIVES.items()
    for rate in RATES
}
REFERENCE = "even_grpo_2.5"
COLUMNS = (
    "start,acc,held_out_area,held_out_area:lead,held_out_equal_tokens,reflect_success,think_tokens,"
    "grad_clipped,decoded_tokens"
)
PANELS = "held_out_by_tokens,held_out_area"


def get_config(arm: str = REFERENCE):
    return with_think_tag(with_arm(ARMS, arm))
