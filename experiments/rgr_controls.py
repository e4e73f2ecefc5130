"""RGR controls: what repairs a failure, the cue's meaning, any words, or sampling again?

`resample` is the paper's control: a fresh rollout replaces the reflected row. `prompt_only` drops
the forced tokens from the context in which the reflected row is trained.
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
