"""The number of negatives K, with and without equalisation for K' < K.

fig:k_eq_acc_ci and, for the KL, fig:k_eq_kl_ci; the latter needs `care.beta` above 0.
`k_4_batch` has the mean over the batch's S*, under which prompts of every K' have equal credit.
"""

from configs.arms import with_arm

ARMS = {
    f"k_{number}{'' if equalize else '_unequalized'}": {"care.K": number, "care.equalize": equalize}
    for number in (2, 4, 6)
    for equalize in (True, False)
} | {"k_4_batch": {"care.mean": "batch"}}
REFERENCE = "k_4"
COLUMNS = "acc,gain,lead,kl,benchmarks,decoded_tokens"
PANELS = "accuracy,kl"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
