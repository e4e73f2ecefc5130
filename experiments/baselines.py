"""CARE against its baselines: same data, verifier, reward and prompts per update.

DAPO samples more prompts, about twice as many here, to fill an update with mixed groups. Clip
ranges and β are those of `configs/common.py`, except that CARE and GRPO have no KL (β = 0) in
`configs/tiny.py`, as in the demo.
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
