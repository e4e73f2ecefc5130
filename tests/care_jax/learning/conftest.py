"""One update of four prompts, and the step that makes it, for all tests of the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import take_back
from updates import LAYOUTS, PLANS, SGD, Update

from care_jax.learning.logprobs import ForwardOptions, score_rows
from care_jax.learning.train_step import init_state, train_step
from care_jax.method.objectives import Objective
from care_jax.packing.layout import lay_out


@pytest.fixture(scope="package")
def log_probabilities(policy, params, image_prompts):
    """Of every response behind its own copy of its prompt, and the entropies, [4, 3, 9]."""
    options = ForwardOptions(jnp.float32)
    score = jax.jit(lambda rows: score_rows(params, rows, policy.config, options)[:2])

    def log_probabilities(responses):
        plan = LAYOUTS["replicated"](image_prompts, np.asarray(responses.is_valid).sum(-1))
        rows = lay_out(image_prompts, np.asarray(responses.tokens), plan, policy.prompts)
        return [take_back(np.asarray(x), plan, responses.tokens.shape[-1]) for x in score(rows)]

    return log_probabilities


@pytest.fixture(scope="package")
def scored(log_probabilities, responses):
    return log_probabilities(responses)


@pytest.fixture(scope="package")
def update_of(policy, scored, image_prompts, responses):
    """Rows that have moved away from the sampler and the reference, one prompt left out.

    The first token of a row has no credit, the first three are no answer.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shape = responses.tokens.shape
    logp, _ = scored
    is_trained = np.asarray(responses.is_valid & (jnp.arange(4) != 2)[:, None, None])
    return Update(
        policy,
        image_prompts,
        responses,
        {
            "token_advantage": is_trained * (jnp.arange(9) > 0) * jax.random.normal(keys[0], shape),
            "old_logp": logp + 0.5 * jax.random.normal(keys[1], shape),
            "ref_logp": logp + 0.3 * jax.random.normal(keys[2], shape),
            "row_weight": jax.random.uniform(keys[3], shape[:2]),
            "is_trained": is_trained,
            "is_answer": responses.is_valid & (jnp.arange(9) > 2),
        },
        np.array([1.0, 1.0, 0.0, 1.0]),
    )


@pytest.fixture(scope="package")
def batch(update_of):
    """Four rows of a prompt and four empty ones; the tests of meshes divide them."""
    return update_of.batch(PLANS["a row per prompt"])


@pytest.fixture(scope="package")
def stepped(policy):
    """`step`, with the log-probabilities before the update.

    Layouts of `LAYOUTS` share a program; the sequence ratio, with the KL of a baseline, is another.
    """

    def step(state, batch, microbatch_size, sequence=False):
        return train_step(
            state,
            batch,
            policy.config,
            SGD,
            Objective(
                None, 0.2, 0.28, beta=0.1, has_token_kl=not sequence, has_sequence_ratio=sequence
            ),
            ForwardOptions(jnp.float32),
            microbatch_size=microbatch_size,
        )

    return jax.jit(step, static_argnames=("microbatch_size", "sequence"))


@pytest.fixture(scope="package")
def step(stepped):
    """(state, batch, microbatch_size, sequence) -> state and metrics after an update."""
    return lambda *arguments, **options: stepped(*arguments, **options)[:2]


@pytest.fixture(scope="package")
def whole(step, params, batch):
    """State and metrics after one update on the whole batch at once."""
    return step(init_state(params, SGD), batch, 8)
