"""Does the cue's meaning repair, or any words, or sampling again? And whose context is trained?

`resample` is the paper's control, a fresh rollout in place of the reflected row. The last arm
drops the forced tokens from the context that the reflected row is trained in.
"""

from ml_collections import ConfigDict

from configs.arms import with_arm

ARMS = {
    "cue": {"care.reflect_mode": "cue"},
    "no_cue": {"care.reflect_mode": "no_cue"},
    "shuffled": {"care.reflect_mode": "shuffled"},
    "resample": {"care.reflect_mode": "resample"},
    "prompt_only": {"care.reflect_credit": "prompt_only"},
}
REFERENCE = "cue"
COLUMNS = (
    "acc",
    "gain",
    "lead",
    "reflect_success",
    "reflect_first_try",
    "response_tokens",
    "decoded_tokens",
)


def get_config(arm: str = REFERENCE) -> ConfigDict:
    """An arm, see `configs/arms.py`."""
    return with_arm(ARMS, arm)
