import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax import logprobs


@pytest.fixture(scope="module")
def score(policy):
    def score(params, prompts, tokens, is_valid, chunk=1000, remat="none"):
        return logprobs.score_responses(
            params,
            prompts,
            tokens,
            is_valid,
            policy.config,
            dtype=jnp.float32,
            chunk=chunk,
            remat=remat,
        )

    return jax.jit(score, static_argnames=("chunk", "remat"))


def of_rows(score, params, prompts, responses, weights):
    """Every row alone behind its own copy of the prompt: the layout others train on."""
    num_rows = responses.tokens.shape[1]
    prompts = jax.tree.map(lambda x: jnp.repeat(x, num_rows, 0), prompts)
    tokens, is_valid, weights = (
        x.reshape(-1, 1, x.shape[-1]) for x in (responses.tokens, responses.is_valid, weights)
    )
    logp, _ = score(params, prompts, tokens, is_valid)
    return (logp * weights).sum(), logp


def test_tree_row_gives_the_log_probabilities_and_gradient_of_replicated_rows(
    score, params, prompts, responses
):
    rng = np.random.default_rng(1)
    weights = responses.is_valid * rng.normal(size=responses.tokens.shape).astype(np.float32)

    def tree(params):
        logp, _ = score(params, prompts, responses.tokens, responses.is_valid)
        return (logp * weights).sum(), logp

    (_, logp), grad = jax.value_and_grad(tree, has_aux=True)(params)
    replicated = functools.partial(
        of_rows, score, prompts=prompts, responses=responses, weights=weights
    )
    (_, expected), expected_grad = jax.value_and_grad(replicated, has_aux=True)(params)
    mask = np.asarray(responses.is_valid)
    np.testing.assert_allclose(
        np.asarray(logp)[mask], np.asarray(expected).reshape(mask.shape)[mask], atol=2e-5
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(grad):
        want = functools.reduce(lambda tree, key: tree[key.key], path, expected_grad)
        np.testing.assert_allclose(leaf, want, atol=1e-4 * np.abs(want).max(), err_msg=str(path))


@pytest.mark.parametrize("chunk", [1, 4, 26, 27])
def test_chunks_change_nothing(score, params, prompts, responses, chunk):
    whole = score(params, prompts, responses.tokens, responses.is_valid)
    parts = score(params, prompts, responses.tokens, responses.is_valid, chunk=chunk)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_padding_changes_nothing(score, params, prompts, responses):
    wide = prompts.replace(
        **{
            name: jnp.pad(getattr(prompts, name), [(0, 0), (7, 0), *[(0, 0)] * (rank - 2)], **fill)
            for name, rank, fill in (
                ("tokens", 2, {}),
                ("is_valid", 2, {}),
                ("positions", 3, {}),
                ("slots", 2, {"constant_values": -1}),
            )
        }
    )
    longer = [jnp.pad(x, ((0, 0), (0, 0), (0, 5))) for x in (responses.tokens, responses.is_valid)]
    mask = np.asarray(responses.is_valid)
    expected, _ = score(params, prompts, responses.tokens, mask)
    logp, _ = score(params, wide, *longer)
    np.testing.assert_allclose(
        np.asarray(logp)[..., : mask.shape[-1]][mask], np.asarray(expected)[mask], atol=1e-5
    )


def test_image_and_video_pad_tokens_have_no_probability(policy, params):
    hidden = jax.random.normal(jax.random.key(0), (5, policy.config.text.hidden_size))
    probability = jax.nn.softmax(logprobs.policy_logits(params, hidden, policy.config))
    pads = [policy.config.image_token_id, policy.config.video_token_id]
    assert np.all(np.asarray(probability)[:, pads] == 0)
    np.testing.assert_allclose(probability.sum(-1), 1, atol=1e-5)


def test_entropy_is_that_of_the_distribution(policy, params):
    hidden = jax.random.normal(jax.random.key(0), (1, 3, policy.config.text.hidden_size))
    logits = np.asarray(logprobs.policy_logits(params, hidden, policy.config), np.float64)
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    logs = np.log(np.maximum(probability, 1e-300))
    targets = jnp.array([[3, 7, 11]])
    logp, entropy = logprobs.token_logprobs(params, hidden, targets, policy.config, chunk=8)
    np.testing.assert_allclose(entropy, -(probability * logs).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(logp[0], logs[0, [0, 1, 2], [3, 7, 11]], rtol=1e-4)
