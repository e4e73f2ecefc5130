"""Selection of the hard negatives by distance to the anchor (fig:selection_side_by_side).

`m_*` are nearest_diverse with that many candidates; with the paper's K = 4 it is `nearest` at M = 4
and `nearest_diverse` at M = 6.
"""

from configs.arms import with_arm

ARMS = {
    rule: {"care.rule": rule}
    for rule in ("nearest", "nearest_diverse", "mixed", "farthest", "random")
} | {f"m_{number}": {"care.M": number} for number in (5, 7)}
REFERENCE = "nearest_diverse"
COLUMNS = "acc,gain,lead,a_raw_anchor,benchmarks,decoded_tokens"
PANELS = "accuracy,a_raw_anchor,by_tokens"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
