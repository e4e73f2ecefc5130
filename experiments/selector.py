"""Selection of the hard negatives by distance to the anchor (fig:selection_side_by_side)."""

from configs.arms import with_arm

ARMS = {
    rule: {"care.rule": rule}
    for rule in ("nearest", "nearest_diverse", "mixed", "farthest", "random")
}
REFERENCE = "nearest_diverse"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
