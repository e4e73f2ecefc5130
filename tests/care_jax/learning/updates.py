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
from packed import packed_plan, replicated_plan, take_back, train_batch

from care_jax.batch import Rollouts, Scores
from care_jax.learning import logprobs
from care_jax.method import credit
from care_jax.packing.layout import lay_out

SGD = optax.sgd(1024.0)


@dataclasses.dataclass(frozen=True)
class Update:
    """An update of four prompts before it is laid out: numbers of their rows [4, 3, 9]."""

    policy: Any
    tokenized: list
    responses: Rollouts
    fields: dict
    prompt_weight: np.ndarray

    def batch(self, make_plan=packed_plan, **settings):
        lengths = np.asarray(self.responses.is_valid).sum(-1)
        plan = make_plan(self.tokenized, lengths, **settings)
        tokens = self.responses.tokens
        return train_batch(
            self.policy, self.tokenized, plan, tokens, self.fields, self.prompt_weight
        )

    def replace(self, prompt_weight=None, **fields):
        weight = self.prompt_weight if prompt_weight is None else prompt_weight
        return dataclasses.replace(self, fields=self.fields | fields, prompt_weight=weight)


def log_probabilities(policy, params, tokenized, responses):
    """Of every response behind its own copy of its prompt, and the entropies, [4, 3, 9]."""
    plan = replicated_plan(tokenized, np.asarray(responses.is_valid).sum(-1))
    rows = lay_out(tokenized, np.asarray(responses.tokens), plan, policy.config)
    options = logprobs.ForwardOptions(jnp.float32, chunk=1000)
    score = functools.partial(logprobs.score_rows, config=policy.config, options=options)
    scored = jax.jit(score)(params, rows)
    return [take_back(np.asarray(x), plan, responses.tokens.shape[-1]) for x in scored]


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
