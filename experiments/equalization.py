"""The number of negatives K, with and without equalisation for K' < K (fig:k_eq_acc_ci)."""

from configs.arms import with_arm

ARMS = {
    f"k_{number}{'' if equalize else '_unequalized'}": {"care.K": number, "care.equalize": equalize}
    for number in (2, 4, 6)
    for equalize in (True, False)
}
REFERENCE = "k_4"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
