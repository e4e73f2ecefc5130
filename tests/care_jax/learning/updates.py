"""Updates of four prompts for tests: their numbers before they are laid out, and what equals what.

Gradients are read off as the change that plain gradient descent makes: at a rate so large that the
parameters' own last bits do not matter.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from packed import packed_plan, padded, replicated_plan, split_plan, train_batch

from care_jax.batch import Rollouts, Scores
from care_jax.method import credit

SGD = optax.sgd(1024.0)


@dataclasses.dataclass(frozen=True)
class Update:
    """An update of four prompts before it is laid out: numbers of their rows [4, 3, 9]."""

    policy: Any
    tokenized: list
    responses: Rollouts
    fields: dict
    prompt_weight: np.ndarray

    def batch(self, make_plan):
        plan = make_plan(self.tokenized, np.asarray(self.responses.is_valid).sum(-1))
        tokens = self.responses.tokens
        return train_batch(
            self.policy, self.tokenized, plan, tokens, self.fields, self.prompt_weight
        )

    def replace(self, prompt_weight=None, **fields):
        weight = self.prompt_weight if prompt_weight is None else prompt_weight
        return dataclasses.replace(self, fields=self.fields | fields, prompt_weight=weight)


PLANS = {
    "a row per prompt": functools.partial(packed_plan, row_tokens=96, microbatch_size=8),
    "packed": packed_plan,
    "one long row": functools.partial(packed_plan, row_tokens=512, row_patches=1024),
    "trees in parts": split_plan,
    "replicated": replicated_plan,
}


def plan_of_one_shape(name, tokenized, lengths):
    """A plan by name; all have the same shape, so that they share a program."""
    plan = PLANS[name](tokenized, lengths)
    return padded(plan, num_rows=12, row_tokens=224, row_patches=256)


LAYOUTS = {name: functools.partial(plan_of_one_shape, name) for name in PLANS}


def assert_same_update(params, result, expected, tolerance=1e-5):
    (state, metrics), (expected_state, expected_metrics) = result, expected
    gradients = [
        jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, s.params)
        for s in (state, expected_state)
    ]
    largest = max(np.abs(x).max() for x in jax.tree.leaves(gradients[1]))
    for grad, want in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(
            grad, want, atol=tolerance * max(np.abs(want).max(), largest * 1e-2)
        )
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


# Advantages of the four prompts: mixed, mixed, all wrong, all right.
ACC = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]], np.float32)
DAPO = dict(eps=1e-6, ddof=0, max_tokens=9, cache_tokens=4)
BASELINES = {
    "grpo": functools.partial(credit.grpo_credit, eps=1e-6, ddof=0),
    "gspo": functools.partial(credit.grpo_credit, eps=1e-6, ddof=0),
    "dapo": functools.partial(credit.dapo_credit, **DAPO),
    "dr_grpo": functools.partial(credit.dr_grpo_credit, max_tokens=9),
    "rloo": credit.rloo_credit,
}


def credited_by(name, update_of):
    """The update with the advantages and weights of a baseline."""
    ones = jnp.ones(ACC.shape)
    scores = Scores(ACC, ones, 0.9 * ACC + 0.1, None, None, ones, ones, ones)
    credited = BASELINES[name](update_of.responses, scores)
    names = ("token_advantage", "row_weight", "prompt_weight", "is_trained")
    return update_of.replace(**{name: np.asarray(getattr(credited, name)) for name in names})
