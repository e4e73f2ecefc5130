"""RGR controls: no cue, a shuffled cue, or a fresh rollout instead of the repair.

In fig:rgr_ablation `no_cue` is No-Cue-Resample and `resample`, a fresh rollout in place of the
reflected row, is Random-Resample. `prompt_only` trains the reflected row without its forced tokens.
"""

from configs.arms import with_arm

ARMS = {
    "cue": {"care.reflect_mode": "cue"},
    "no_cue": {"care.reflect_mode": "no_cue"},
    "shuffled": {"care.reflect_mode": "shuffled"},
    "resample": {"care.reflect_mode": "resample"},
    "prompt_only": {"care.reflect_credit": "prompt_only"},
}
REFERENCE = "cue"
COLUMNS = "acc,gain,lead,reflect_success,reflect_first_try,response_tokens,decoded_tokens"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
