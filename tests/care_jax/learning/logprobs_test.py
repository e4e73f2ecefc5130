import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import take_back
from updates import LAYOUTS

from care_jax.learning import logprobs
from care_jax.packing.layout import at_tokens, lay_out
from models import backbone


@pytest.fixture(scope="module")
def weighted(policy):
    """Log-probabilities, entropies, and the gradient of Σ weight · logp, for all plans."""
    options = logprobs.ForwardOptions(jnp.float32)

    def total(params, rows, weight):
        logp, entropy, _ = logprobs.score_rows(params, rows, policy.config, options)
        return (logp * weight).sum(), (logp, entropy)

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def test_packed_trees_give_the_log_probabilities_and_gradient_of_replicated_rows(
    weighted, policy, params, image_prompts, responses
):
    rng = np.random.default_rng(1)
    tokens, lengths = np.asarray(responses.tokens), np.asarray(responses.is_valid).sum(-1)
    weights = responses.is_valid * rng.normal(size=tokens.shape).astype(np.float32)

    def found(layout):
        plan = LAYOUTS[layout](image_prompts, lengths)
        rows = lay_out(image_prompts, tokens, plan, policy.prompts)
        (_, scored), grad = weighted(params, rows, at_tokens(np.asarray(weights), plan))
        return [take_back(np.asarray(x), plan, tokens.shape[-1]) for x in scored], grad

    theirs, expected = found("replicated")
    for layout in ("packed", "trees in parts"):
        ours, grad = found(layout)
        for a, b in zip(ours, theirs, strict=True):
            assert (a != 0).sum() == responses.is_valid.sum()
            np.testing.assert_allclose(a, b, atol=2e-5)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grad):
            want = functools.reduce(lambda tree, key: tree[key.key], path, expected)
            atol = 1e-4 * np.abs(want).max()
            np.testing.assert_allclose(leaf, want, atol=atol, err_msg=f"{layout} {path}")


def test_image_and_video_pad_tokens_have_no_probability(policy, params):
    hidden = jax.random.normal(jax.random.key(0), (5, policy.config.text.hidden_size))
    probability = jax.nn.softmax(backbone.policy_logits(params, hidden, policy.config))
    pads = [policy.config.image_token_id, policy.config.video_token_id]
    assert np.all(np.asarray(probability)[:, pads] == 0)
    np.testing.assert_allclose(probability.sum(-1), 1, atol=1e-5)


def test_entropy_is_that_of_the_distribution(policy, params):
    hidden = jax.random.normal(jax.random.key(0), (1, 3, policy.config.text.hidden_size))
    logits = np.asarray(backbone.policy_logits(params, hidden, policy.config), np.float64)
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    logs = np.log(np.maximum(probability, 1e-300))
    targets = jnp.array([[3, 7, 11]])
    is_wanted = targets > 0
    logp, entropy = logprobs.token_logprobs(
        params, hidden, targets, policy.config, is_wanted=is_wanted
    )
    np.testing.assert_allclose(entropy, -(probability * logs).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(logp[0], logs[0, [0, 1, 2], [3, 7, 11]], rtol=1e-4)
