"""Examples that share a row know nothing of each other, and a packed step has the same loss."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.logprobs import score_packed, score_responses
from care_jax.packing import Sample, first_fit, pack
from models import segments

ROW = (128, 256)
SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), max_size=30)


@settings(deadline=None)
@given(SIZES)
def test_every_example_has_one_row_with_room_for_it(sizes):
    rows = first_fit(sizes, (20, 9))
    assert sorted(place for row in rows for place in row) == list(range(len(sizes)))
    for row in rows:
        assert row and sum(sizes[i][0] for i in row) <= 20 and sum(sizes[i][1] for i in row) <= 9
    # No row but the last could have been spared: each was opened for what fitted in none before.
    for first, second in itertools.pairwise(rows):
        tokens, patches = (sum(sizes[i][k] for i in first) for k in (0, 1))
        largest = sizes[second[0]]
        assert tokens + largest[0] > 20 or patches + largest[1] > 9


def test_examples_fill_a_row_longest_first_or_have_one_of_their_own():
    sizes = [(3, 0), (8, 4), (5, 4), (2, 4)]
    assert first_fit(sizes, (10, 8)) == [[1, 3], [2, 0]]
    assert first_fit(sizes, (10, 7)) == [[1], [2, 0], [3]]
    assert first_fit(sizes, (10, 8), shared=False) == [[0], [1], [2], [3]]


@pytest.fixture(scope="module")
def samples(policy, examples):
    rng = np.random.default_rng(3)
    return [
        Sample(
            policy.prompts.tokenize(example),
            rng.integers(0, 600, length).astype(np.int32),
            rng.uniform(1, 3, length).astype(np.float32),
        )
        for example, length in zip(examples, (4, 9, 1, 6), strict=True)
    ]


def packed(samples, policy, row_size=ROW, **kwargs):
    rows = first_fit([sample.size for sample in samples], row_size, **kwargs)
    return rows, pack(samples, rows, row_size, policy.config)


def test_a_row_holds_prompt_and_response_of_each_of_its_examples(policy, samples):
    rows, batch = packed(samples, policy)
    assert 1 < len(rows) < len(samples)
    for row, places in enumerate(rows):
        whole = np.concatenate(
            [x for i in places for x in (samples[i].prompt.tokens, samples[i].response)]
        )
        np.testing.assert_array_equal(batch.tokens[row, : len(whole)], whole)
        np.testing.assert_array_equal(batch.tokens[row, len(whole) :], policy.config.pad_token_id)
        sizes = [samples[i].size[0] for i in places]
        numbers = np.repeat(np.arange(len(places)), sizes)
        np.testing.assert_array_equal(batch.segments[row, : len(whole)], numbers)
        assert (batch.segments[row, len(whole) :] == -1).all()
        is_scored = batch.scored[row] >= 0
        responses = np.concatenate([samples[i].response for i in places])
        np.testing.assert_array_equal(batch.tokens[row][batch.scored[row][is_scored]], responses)
        weights = np.concatenate([samples[i].weight for i in places])
        np.testing.assert_array_equal(batch.weight[row][is_scored], weights)
        assert not batch.weight[row][~is_scored].any()
        assert is_scored[: len(responses)].all()


def logp_by_example(policy, params, samples, rows, batch, **settings):
    score = jax.jit(
        functools.partial(score_packed, config=policy.config, dtype=jnp.float32, **settings)
    )
    logp = np.asarray(score(params, jax.tree.map(jnp.asarray, batch)))
    found = {}
    for row, places in enumerate(rows):
        ends = np.cumsum([len(samples[i].response) for i in places])
        parts = np.split(logp[row, : ends[-1]], ends[:-1])
        found |= dict(zip(places, parts, strict=True))
    return [found[i] for i in range(len(samples))]


@pytest.mark.parametrize("policy", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
@pytest.mark.parametrize("chunk", [5, 1000])
def test_an_example_scores_as_if_it_were_alone(policy, params, samples, chunk):
    """With images of several sizes, two in one prompt, none in another; and as RL scores it."""
    shared = logp_by_example(policy, params, samples, *packed(samples, policy), chunk=chunk)
    own = packed(samples, policy, shared=False)
    alone = logp_by_example(policy, params, samples, *own, chunk=1000)
    longest = max(len(sample.response) for sample in samples)
    tokens, is_valid = np.zeros((4, 1, longest), np.int32), np.zeros((4, 1, longest), bool)
    for i, sample in enumerate(samples):
        tokens[i, 0, : len(sample.response)] = sample.response
        is_valid[i, 0, : len(sample.response)] = True
    prompts = policy.prompts.batch([sample.prompt for sample in samples])
    as_in_rl, _ = jax.jit(
        functools.partial(score_responses, config=policy.config, dtype=jnp.float32, chunk=1000)
    )(params, prompts, tokens, is_valid)
    for i in range(len(samples)):
        np.testing.assert_allclose(shared[i], alone[i], atol=2e-5)
        np.testing.assert_allclose(shared[i], as_in_rl[i, 0][is_valid[i, 0]], atol=2e-5)


@pytest.mark.parametrize("attention_chunk", [512, 16])
def test_gradients_do_not_depend_on_the_packing_either(
    policy, params, samples, attention_chunk, monkeypatch
):
    """In rows whose attention is computed at once, and in chunks that skip other examples."""
    monkeypatch.setattr(segments, "_CHUNK", attention_chunk)
    monkeypatch.setattr(segments, "_WHOLE", attention_chunk)

    def gradient(rows):
        rows = jax.tree.map(jnp.asarray, rows)

        def loss(params):
            logp = score_packed(params, rows, policy.config, dtype=jnp.float32, chunk=5)
            return -(rows.weight * jnp.where(rows.scored >= 0, logp, 0.0)).sum() / rows.weight.sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    (loss, ours), (expected, theirs) = (
        gradient(packed(samples, policy, shared=shared)[1]) for shared in (True, False)
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    difference = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), ours, theirs)
    assert max(jax.tree.leaves(difference)) < 1e-5 * max(
        float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs)
    )
