"""Does the cue's meaning repair, or any words, or sampling again? And whose context is trained?

The last arm drops the forced tokens from the context that the reflected row is trained in.
"""

from ml_collections import ConfigDict

from configs.arms import with_arm

ARMS = {
    "cue": {"care.reflect_mode": "cue"},
    "no_cue": {"care.reflect_mode": "no_cue"},
    "random": {"care.reflect_mode": "random"},
    "prompt_only": {"care.reflect_credit": "prompt_only"},
}
REFERENCE = "cue"
COLUMNS = ("acc", "gain", "lead", "reflect_success", "response_tokens", "decoded_tokens")


def get_config(arm: str = REFERENCE) -> ConfigDict:
    """An arm, see `configs/arms.py`."""
    return with_arm(ARMS, arm)
