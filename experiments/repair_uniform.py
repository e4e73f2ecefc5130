"""The effect of the repair under uniform token weights, by a rule fixed before the runs.

    python -m experiments.sweep --experiment=experiments/repair_uniform.py --base=repair \\
        --first_seed=5 --seeds=5 --config.data.test.num_examples=8192 --config.rl.eval_every=25

With the paper's region weights CARE does not correct wrong readings, with or without the repair
(`experiments/repair.py`): rationales may have too little credit for the repair to act on. Here all
tokens have weight 1, and the arms differ in the repair alone: `repair` has it, `resample` has a
fresh rollout instead, `anchor` has neither.

1. Seeds 5 to 9, new to uniform weights. The learning rate is that of `care` in
   `experiments/repair.py`, and its points 2 to 4 apply: sampled accuracy on 8192 questions, equal
   decoded tokens, a lead is a 95% interval above 0.
2. With uniform weights CARE ended at 97% on seeds 0 to 4, close to the maximum. So the mean
   accuracy over the steps (`held_out_area`) is compared too, by the same intervals.
3. `repair` is `uniform` of `experiments/repair.py`. With its seeds 0 to 4 there are ten seeds to
   compare with `care` and `grpo`, each pair at the tokens that both have decoded.
"""

from configs.arms import with_arm

_UNIFORM = {"care.region_weights": False}
ARMS = {
    "repair": _UNIFORM,
    "resample": _UNIFORM | {"care.reflect_mode": "resample"},
    "anchor": _UNIFORM | {"care.reflect": False},
}
REFERENCE = "repair"
COLUMNS = (
    "acc,gain,shared_tokens,held_out_equal_tokens,held_out_equal_tokens:lead,held_out_area,"
    "held_out_area:lead,reflect_success,reflect_first_try,think_tokens,decoded_tokens"
)
PANELS = "held_out_by_tokens,held_out_equal_tokens:lead"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
