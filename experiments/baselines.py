"""CARE against its baselines (tab:math_benchmark): same data, verifier, reward and update size.

DAPO samples about twice as many prompts here, to fill an update with mixed groups. Clip ranges and
β are those of tab:train_config, except that `configs/tiny.py` sets β = 0 for CARE and GRPO.
The paper cites Dr. GRPO and RLOO and compares with neither.
"""

from configs.arms import with_arm

ARMS = {
    name: {"rl.objective": name} for name in ("care", "grpo", "dapo", "gspo", "dr_grpo", "rloo")
}
REFERENCE = "care"
COLUMNS = (
    "acc,gain,lead,benchmarks,response_tokens,decoded_tokens,rollout_equal_tokens,"
    "rollout_equal_tokens:lead"
)
PANELS = "accuracy,by_tokens,reward_by_step"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
