import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import packed_plan, replicated_plan, split_plan, take_back

from care_jax.learning import logprobs
from care_jax.packing.layout import at_tokens, lay_out
from models import backbone


@pytest.fixture(scope="module")
def score(policy):
    """(params, rows) to log-probabilities and entropies at the rows' places."""

    def score(params, rows, chunk=1000, remat="none"):
        options = logprobs.ForwardOptions(jnp.float32, chunk, remat)
        return logprobs.score_rows(params, rows, policy.config, options)

    return jax.jit(score, static_argnames=("chunk", "remat"))


@pytest.fixture(scope="module")
def lay(policy, image_prompts, responses):
    """Plans and lays out the responses to four prompts, packed, split or replicated."""
    tokens, lengths = np.asarray(responses.tokens), np.asarray(responses.is_valid).sum(-1)

    def lay(name):
        make_plan = {"packed": packed_plan, "split": split_plan, "replicated": replicated_plan}
        plan = make_plan[name](image_prompts, lengths)
        return plan, lay_out(image_prompts, tokens, plan, policy.config)

    return lay


@pytest.mark.parametrize("name", ["packed", "split"])
def test_packed_trees_give_the_log_probabilities_and_gradient_of_replicated_rows(
    score, lay, params, responses, name
):
    rng = np.random.default_rng(1)
    weights = responses.is_valid * rng.normal(size=responses.tokens.shape).astype(np.float32)
    found = []
    for layout in (name, "replicated"):
        plan, rows = lay(layout)
        weight = at_tokens(np.asarray(weights), plan)

        def total(params, rows=rows, weight=weight):
            logp, entropy = score(params, rows)
            return (logp * weight).sum(), (logp, entropy)

        (_, scored), grad = jax.value_and_grad(total, has_aux=True)(params)
        back = [take_back(np.asarray(x), plan, responses.tokens.shape[-1]) for x in scored]
        found.append((back, grad))
    (ours, grad), (theirs, expected) = found
    for a, b in zip(ours, theirs, strict=True):
        assert (a != 0).sum() == responses.is_valid.sum()
        np.testing.assert_allclose(a, b, atol=2e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grad):
        want = functools.reduce(lambda tree, key: tree[key.key], path, expected)
        np.testing.assert_allclose(leaf, want, atol=1e-4 * np.abs(want).max(), err_msg=str(path))


@pytest.mark.parametrize("chunk", [1, 4, 26, 27])
def test_chunks_change_nothing(score, lay, params, chunk):
    _, rows = lay("packed")
    for a, b in zip(score(params, rows), score(params, rows, chunk=chunk), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_what_is_recomputed_changes_nothing(score, lay, params, remat):
    _, rows = lay("packed")

    def total(params, remat):
        return score(params, rows, remat=remat)[0].sum()

    ours, theirs = (jax.grad(total)(params, name) for name in (remat, "none"))
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


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
    every = dict(chunk=8, is_wanted=targets > 0)
    logp, entropy = logprobs.token_logprobs(params, hidden, targets, policy.config, **every)
    np.testing.assert_allclose(entropy, -(probability * logs).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(logp[0], logs[0, [0, 1, 2], [3, 7, 11]], rtol=1e-4)
