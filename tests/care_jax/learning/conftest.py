"""One update of four prompts, and the step that makes it, for all tests of the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from updates import SGD, Update, log_probabilities

from care_jax.learning.logprobs import ForwardOptions
from care_jax.learning.train_step import init_state, train_step
from care_jax.method.objectives import Objective


@pytest.fixture(scope="package")
def update_of(policy, params, image_prompts, responses):
    """Rows that have moved away from the sampler and the reference, one prompt left out.

    The first token of a row has no credit, the first three are no answer.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shape = responses.tokens.shape
    logp, _ = log_probabilities(policy, params, image_prompts, responses)
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
    """In eight rows, so that every microbatch size and mesh below divides them."""
    return update_of.batch(row_tokens=96, microbatch_size=8)


@pytest.fixture(scope="package")
def step(policy):
    def step(state, batch, microbatch_size, beta=0.1, clip_low=0.2, clip_high=0.28, sequence=False):
        return train_step(
            state,
            batch,
            policy.config,
            SGD,
            Objective(None, clip_low, clip_high, beta, has_sequence_ratio=sequence),
            ForwardOptions(jnp.float32, chunk=7),
            microbatch_size=microbatch_size,
        )

    static = ("microbatch_size", "beta", "clip_low", "clip_high", "sequence")
    return jax.jit(step, static_argnames=static)


@pytest.fixture(scope="package")
def whole(step, params, batch):
    """State and metrics after one update on the whole batch at once."""
    return step(init_state(params, SGD), batch, 8)
