"""Does the repair help once rationales have credit? The rule was written before the runs.

    python -m experiments.sweep --experiment=experiments/repair_uniform.py --base=repair \\
        --first_seed=5 --seeds=5 --config.data.test.num_examples=8192 --config.rl.eval_every=25

With the paper's weights CARE leaves wrong readings wrong, with a repair and without
(`experiments/repair.py`). There the repair may have had nothing to act through. Here all tokens
weigh alike in every arm, and only the repair differs: `repair` has it, `resample` has a fresh
rollout in its place, `anchor` has neither.

1. Seeds 5 to 9, on which no arm with uniform weights was run before. The learning rate is that of
   `care` in `experiments/repair.py`, whose points 2 to 4 hold here too: sampled accuracy on 8192
   questions, at equal decoded tokens, and a lead is a 95% interval that lies above 0.
2. With uniform weights CARE ended at 97% on seeds 0 to 4, which leaves little room above. So the
   mean accuracy over the steps (`held_out_area`) is compared by the same intervals.
3. `repair` is `uniform` of `experiments/repair.py`, so that with its seeds 0 to 4 there are ten to
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
