"""Intervals of accuracies, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence


def wilson_interval(num_correct: float, num_examples: int) -> tuple[float, float]:
    """The 95% Wilson score interval (low, high) of an accuracy in [0, 1].

        (p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n),  z = 1.96

    `num_correct` may include partial credit.
    """
    if num_examples < 1 or not 0 <= num_correct <= num_examples:
        raise ValueError(
            f"expected 0 <= num_correct <= num_examples and at least one example, got "
            f"{num_correct} of {num_examples}"
        )
    z, n, p = 1.959964, num_examples, num_correct / num_examples
    center = p + z**2 / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def pass_rates(num_correct: Sequence[int], num_samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ..., at most `num_samples`: the mean over questions of

        1 - C(n - c, k) / C(n, k),   n samples of a question, c of them correct,

    the unbiased estimator of Chen et al. (arXiv 2107.03374, eq. 1). `num_correct` has c of each
    question, `num_samples` is n; {} for n = 1.
    """
    if num_samples == 1 or not num_correct:
        return {}
    rates = {}
    for k in (2**i for i in range(num_samples.bit_length())):
        wrong = [math.comb(num_samples - c, k) / math.comb(num_samples, k) for c in num_correct]
        rates[f"pass@{k}"] = 1 - sum(wrong) / len(wrong)
    return rates
