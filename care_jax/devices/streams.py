"""The random streams of a run: who draws with which key.

| who | key |
|---|---|
| initial weights, and the adapters of LoRA | the seed's own |
| RL draw n, `step + try · num_steps` (see `stages.rl`) | number n of the seed |
| evaluation, `commands.probe`, `commands.repairs` | the numbers below |
| rounding of updates to bfloat16 (`learning.train_step`) | number `step` of seed 0 |

What draws for many prompts folds in each one's index. The order of the data is numpy's, by `seed`.
"""

import jax
from jaxtyping import PRNGKeyArray

EVALUATION = 2**31 - 1
PROBE = 2**31 - 2
REPAIRS = 2**31 - 3


def key_of(seed: int, number: int) -> PRNGKeyArray:
    """The key of a stream; `number` is one of those above or a draw of training, far below them."""
    return jax.random.fold_in(jax.random.key(seed), number)
