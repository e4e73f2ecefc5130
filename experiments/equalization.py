"""The number of negatives K, with and without equalisation for K' < K.

fig:k_eq_acc_ci and, for the KL, fig:k_eq_kl_ci; the latter needs `care.beta` above 0.
`*_batch` have the mean over the batch's S*, under which equalisation gives prompts of every K'
equal credit. Under the mean over each prompt's S* a prompt with few negatives has more already.
"""

from configs.arms import with_arm

ARMS = {
    f"k_{number}{mean_suffix}{suffix}": {
        "care.K": number,
        "care.mean": mean,
        "care.equalize": equalize,
    }
    for number in (2, 4, 6)
    for mean, mean_suffix in (("prompt", ""), ("batch", "_batch"))
    for equalize, suffix in ((True, ""), (False, "_unequalized"))
}
REFERENCE = "k_4"
COLUMNS = "acc,gain,lead,kl,benchmarks,decoded_tokens"
PANELS = "accuracy,kl"


def get_config(arm: str = REFERENCE):
    return with_arm(ARMS, arm)
