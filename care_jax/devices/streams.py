"""The RNG streams of a run.

| stream | key |
|---|---|
| initial weights | `key(seed)` |
| LoRA adapters of a stage | `fold_in(fold_in(key(seed), number), kernel)`, numbers below |
| RL draw n = step + try · 2^24 (see `rl.dynamic_sampling`) | `fold_in(key(seed), n)` |
| evaluation, probe, repairs, gradients | `fold_in(key(seed), number)`, numbers below |
| rounding of updates to bfloat16 (`learning.train_step`) | `fold_in(key(0), step)` |

Streams for many prompts fold in the prompt's index. The data are shuffled by grain, with `seed`.
"""

import jax
from jaxtyping import PRNGKeyArray

EVALUATION = 2**31 - 1
PROBE = 2**31 - 2
REPAIRS = 2**31 - 3
GRADIENTS = 2**31 - 4
ADAPTERS = {"sft": 2**31 - 5, "rl": 2**31 - 6}


def key_of(seed: int, number: int) -> PRNGKeyArray:
    """The key of a stream; `number` is a constant above or an RL draw, which is far smaller."""
    return jax.random.fold_in(jax.random.key(seed), number)
