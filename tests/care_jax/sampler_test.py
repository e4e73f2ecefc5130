import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import packed_plan

from care_jax import logprobs, reflect, sampler
from care_jax.tree_rows import lay_out, take_back
from models import backbone

MAX_TOKENS = 14


@pytest.fixture(scope="module")
def decode_params(policy, params):
    return backbone.to_decode_layout(params, policy.config, jnp.float32)


@pytest.fixture(scope="module")
def prefix(policy, decode_params, prompts):
    return sampler.prefill(decode_params, prompts, policy.config, dtype=jnp.float32)


@pytest.fixture(scope="module")
def decode(policy, decode_params, prefix):
    @functools.partial(jax.jit, static_argnames=("num_rows", "temperature", "top_p", "stops"))
    def decode(rng, forced=None, num_rows=3, temperature=1.0, top_p=1.0, stops=True):
        return sampler.decode(
            decode_params,
            prefix,
            jax.random.split(rng, len(prefix.is_valid)),
            jnp.asarray(policy.closing_tag),
            policy.config,
            num_rows=num_rows,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            top_p=top_p,
            dtype=jnp.float32,
            forced=forced,
            stops=stops,
        )

    return decode


@pytest.fixture(scope="module")
def trainer_logp(policy, params, image_records):
    """Log-probabilities of rollouts by the trainer's forward, [B, R, T]."""
    score = jax.jit(
        functools.partial(logprobs.score_rows, config=policy.config, dtype=jnp.float32, chunk=1000)
    )

    def trainer_logp(rollouts):
        tokens, lengths = np.asarray(rollouts.tokens), np.asarray(rollouts.is_valid).sum(-1)
        plan = packed_plan(image_records, lengths, row_tokens=512, row_patches=512)
        logp, _ = score(params, lay_out(image_records, tokens, plan, policy.config))
        return take_back(np.asarray(logp), plan, tokens.shape[-1])

    return trainer_logp


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (0.0, 1.0)])
def test_log_probabilities_are_the_trainers_own_whatever_the_sampling(
    trainer_logp, decode, temperature, top_p
):
    rollouts = decode(jax.random.key(1), temperature=temperature, top_p=top_p)
    mask = np.asarray(rollouts.is_valid)
    assert mask.sum() > 50
    logp = trainer_logp(rollouts)
    np.testing.assert_allclose(np.asarray(rollouts.logp)[mask], logp[mask], atol=3e-5)
    assert np.all(np.asarray(rollouts.logp)[~mask] == 0)


def test_greedy_rows_take_the_most_likely_token_of_the_full_forward(trainer_logp, decode):
    rollouts = decode(jax.random.key(1), num_rows=1, temperature=0.0)
    tokens = np.asarray(rollouts.tokens)
    for position in range(4):
        best = np.zeros_like(tokens[:, 0, 0])
        highest = np.full(len(best), -np.inf)
        for token in set(tokens[:, 0, position]) | set(range(0, 600, 37)):
            changed = tokens.copy()
            changed[:, 0, position] = token
            logp = trainer_logp(rollouts.replace(tokens=changed))
            is_better = logp[:, 0, position] > highest
            best = np.where(is_better, token, best)
            highest = np.where(is_better, logp[:, 0, position], highest)
        np.testing.assert_array_equal(best, tokens[:, 0, position])


def test_rows_end_with_their_first_eos(policy, decode_params, decode, prefix):
    (eos,) = policy.config.eos_token_ids
    seen = 0
    for seed in range(30):
        rollouts = decode(jax.random.key(seed), temperature=3.0)
        tokens, is_valid = np.asarray(rollouts.tokens), np.asarray(rollouts.is_valid)
        for row, mask, is_complete in zip(
            tokens.reshape(-1, MAX_TOKENS),
            is_valid.reshape(-1, MAX_TOKENS),
            np.asarray(rollouts.is_complete).ravel(),
            strict=True,
        ):
            length = mask.sum()
            assert mask[:length].all()
            ends = np.flatnonzero(row[:length] == eos)
            assert list(ends) == ([length - 1] if is_complete else [])
            assert is_complete or length == MAX_TOKENS
            assert np.all(row[length:] == policy.config.pad_token_id)
            seen += is_complete
    assert seen > 0


def test_each_end_of_sequence_id_ends_a_row_and_padding_does_not(
    policy, decode_params, prefix, trainer_logp
):
    """As in the releases, rows are padded with one of the ids that end them."""
    # Ten ids of which one is the padding: at a high temperature about a row in eight meets one.
    ends = (*policy.config.eos_token_ids, policy.config.pad_token_id, *range(300, 308))
    decode = jax.jit(
        functools.partial(
            sampler.decode,
            config=dataclasses.replace(policy.config, eos_token_ids=ends),
            num_rows=3,
            max_tokens=MAX_TOKENS,
            temperature=3.0,
            top_p=1.0,
            dtype=jnp.float32,
        )
    )
    seen = set()
    for seed in range(40):
        rngs = jax.random.split(jax.random.key(seed), len(prefix.is_valid))
        rollouts = decode(decode_params, prefix, rngs, jnp.asarray(policy.closing_tag))
        tokens, is_valid = np.asarray(rollouts.tokens), np.asarray(rollouts.is_valid)
        logp = trainer_logp(rollouts)
        np.testing.assert_allclose(np.asarray(rollouts.logp)[is_valid], logp[is_valid], atol=3e-5)
        is_end = np.isin(tokens, ends) & is_valid
        length = is_valid.sum(-1)
        is_complete = np.asarray(rollouts.is_complete)
        np.testing.assert_array_equal(is_end.sum(-1), is_complete)
        last = np.take_along_axis(tokens, length[..., None] - 1, -1)[..., 0]
        assert np.isin(last[is_complete], ends).all()
        assert (length[~is_complete] == MAX_TOKENS).all()
        assert (tokens[~is_valid] == policy.config.pad_token_id).all()
        seen |= set(last[is_complete].tolist())
    assert policy.config.pad_token_id in seen and len(seen) > 5


def test_rows_go_on_past_eos_when_told_not_to_stop(decode):
    assert np.asarray(decode(jax.random.key(0), temperature=3.0, stops=False).is_valid).all()


def test_each_token_of_each_row_is_drawn_anew(decode):
    """At a high temperature all ids are about as likely, so equal draws would give like ids."""
    tokens = np.asarray(decode(jax.random.key(0), temperature=3.0, stops=False).tokens)
    for one, other in (
        (tokens[:, :, :-1], tokens[:, :, 1:]),
        (tokens[:, :-1], tokens[:, 1:]),
        (tokens[:-1], tokens[1:]),
    ):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.35


@pytest.fixture(scope="module")
def forced(policy):
    context = reflect.forced_context(
        ["Count the circles.", None, "Add.", "x"],
        " Wait.",
        functools.partial(policy.tokenizer.encode, add_special_tokens=False),
        think_tag="think",
        max_context=6,
        pad_token_id=policy.config.pad_token_id,
    )
    return jax.tree.map(jnp.asarray, context)


def test_reflected_rows_hold_their_context_then_what_was_sampled_from_it(
    policy, trainer_logp, decode, forced
):
    rollouts = decode(jax.random.key(2), forced=forced, num_rows=1)
    is_forced, is_valid = (np.asarray(x)[:, 0] for x in (rollouts.is_forced, rollouts.is_valid))
    tokens = np.asarray(rollouts.tokens)[:, 0]
    for row in (0, 2, 3):
        context = forced.tokens[row][forced.is_valid[row]]
        np.testing.assert_array_equal(tokens[row, : len(context)], context)
        assert is_forced[row].sum() == len(context)
        length = is_valid[row].sum()
        assert is_valid[row, :length].all()
        assert len(context) < length <= MAX_TOKENS
    assert not is_valid[1].any()
    np.testing.assert_array_equal(
        np.asarray(rollouts.is_complete)[:, 0], (tokens == policy.config.eos_token_ids[0]).any(1)
    )

    mask = is_valid & ~is_forced
    logp = trainer_logp(rollouts)[:, 0]
    np.testing.assert_allclose(np.asarray(rollouts.logp)[:, 0][mask], logp[mask], atol=3e-5)
    assert np.all(np.asarray(rollouts.logp)[:, 0][~mask] == 0)


def test_reflected_rows_are_charged_their_real_context(policy, decode, forced):
    """Padding in front of a short context takes none of the row's budget of tokens."""
    rollouts = decode(jax.random.key(2), forced=forced, num_rows=1, stops=False)
    is_forced, is_valid = (np.asarray(x)[:, 0] for x in (rollouts.is_forced, rollouts.is_valid))
    lengths = forced.is_valid.sum(1).tolist()
    assert len(set(lengths)) > 2 and lengths[1] == 0
    assert is_forced.sum(1).tolist() == lengths
    assert is_valid.sum(1).tolist() == [MAX_TOKENS, 0, MAX_TOKENS, MAX_TOKENS]


def test_without_a_context_the_reflected_row_is_a_fresh_rollout(decode):
    """From the same keys it is the row that a plain decode of one row per prompt gives."""
    is_active = np.array([True, False, True, True])
    forced = jax.tree.map(jnp.asarray, reflect.no_context(is_active))
    fresh = decode(jax.random.key(5), forced=forced, num_rows=1)
    plain = decode(jax.random.key(5), num_rows=1)
    np.testing.assert_array_equal(fresh.tokens[is_active], plain.tokens[is_active])
    np.testing.assert_allclose(fresh.logp[is_active], plain.logp[is_active], atol=1e-6)
    assert not fresh.is_forced.any() and not fresh.is_valid[~is_active].any()


def test_forced_tokens_beyond_the_budget_are_refused(policy, decode_params, prefix):
    tokens = jnp.zeros((4, MAX_TOKENS), jnp.int32)
    forced = sampler.Forced(tokens, tokens == 0, jnp.ones(4, bool))
    with pytest.raises(ValueError, match=r"set care\.max_context lower"):
        sampler.decode(
            decode_params,
            prefix,
            jax.random.split(jax.random.key(0), 4),
            jnp.asarray(policy.closing_tag),
            policy.config,
            num_rows=1,
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            top_p=1.0,
            dtype=jnp.float32,
            forced=forced,
        )


def test_embedding_is_the_mean_state_up_to_the_end_of_the_rationale(
    policy, params, decode_params, image_records, prefix, decode
):
    """The token at index 5 closes the span, whatever it is; one row ends with EOS before it.

    EOS is what that row takes at index 3, so a first decode must tell.
    """
    closing, rng = 5, jax.random.key(3)
    eos = int(decode(rng).tokens[1, 2, 3])
    rollouts = jax.jit(
        functools.partial(
            sampler.decode,
            config=dataclasses.replace(policy.config, eos_token_ids=(eos,)),
            num_rows=3,
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            top_p=1.0,
            dtype=jnp.float32,
        )
    )(
        decode_params,
        prefix,
        jax.random.split(rng, 4),
        jnp.asarray(_closing_at_token(policy, closing)),
    )
    tokens = np.asarray(rollouts.tokens)
    is_eos = tokens == eos
    end = np.where(is_eos.any(-1), is_eos.argmax(-1), MAX_TOKENS)
    assert end[1, 2] <= 3 and (end > closing).sum() > 6
    in_mean = np.arange(MAX_TOKENS) < np.minimum(end, closing + 1)[..., None]
    # All of the rows, also what stands behind their end.
    plan = packed_plan(image_records, np.full(tokens.shape[:2], MAX_TOKENS), row_patches=512)
    rows = jax.tree.map(jnp.asarray, lay_out(image_records, tokens, plan, policy.config))
    settings = {"dtype": jnp.float32}
    features = backbone.encode_images(params, rows.images, policy.config, **settings)
    hidden = backbone.forward(
        params,
        backbone.embed(params, rows.tokens, features=features, slots=rows.slots, **settings),
        rows.positions,
        backbone.text_mask(rows.reach, policy.config),
        policy.config,
        features=features,
        slots=rows.slots,
    )
    hidden = np.stack(
        [take_back(x, plan, MAX_TOKENS) for x in np.moveaxis(np.asarray(hidden), -1, 0)], -1
    )
    mean = (hidden * in_mean[..., None]).sum(2)
    expected = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    np.testing.assert_allclose(rollouts.embedding, expected, atol=1e-5)


def _closing_at_token(policy, count: int) -> np.ndarray:
    """An automaton that closes with the token at index `count`, whatever it is."""
    states = np.minimum(np.arange(count + 2) + 1, count + 1)
    return np.repeat(states[:, None], policy.config.text.vocab_size, 1).astype(np.uint8)


def test_nucleus_is_the_least_set_that_reaches_top_p():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]]))
    for top_p, expected in (
        (0.5, [[0, 1, 0, 0], [1, 0, 0, 0]]),
        (0.51, [[0, 1, 0, 1], [1, 0, 0, 0]]),
        (0.9, [[0, 1, 1, 1], [1, 0, 0, 0]]),
        (0.95, [[1, 1, 1, 1], [1, 0, 0, 0]]),
    ):
        np.testing.assert_array_equal(sampler.is_nucleus(logits, top_p=top_p), expected)


def test_tokens_are_sampled_in_proportion_within_the_nucleus():
    logits = jnp.tile(jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25])), (20000, 1))
    tokens = sampler.sample_token(logits, jax.random.key(0), temperature=1.0, top_p=0.9)
    shares = np.bincount(tokens, minlength=4) / len(tokens)
    np.testing.assert_allclose(shares, np.array([0, 0.5, 0.15, 0.25]) / 0.9, atol=0.015)
    hot = sampler.sample_token(logits, jax.random.key(0), temperature=2.0, top_p=1.0)
    root = np.sqrt([0.1, 0.5, 0.15, 0.25])
    np.testing.assert_allclose(np.bincount(hot) / len(hot), root / root.sum(), atol=0.015)


def test_nucleus_is_that_of_the_distribution_at_the_temperature():
    """At temperature 1/2 the odds 10:50:15:25 are 4:100:9:25, and 0.9 of it is the two largest."""
    logits = jnp.tile(jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25])), (4000, 1))
    tokens = sampler.sample_token(logits, jax.random.key(0), temperature=0.5, top_p=0.9)
    shares = np.bincount(tokens, minlength=4) / len(tokens)
    np.testing.assert_allclose(shares, [0, 0.8, 0, 0.2], atol=0.03)


def test_sampling_never_takes_what_has_no_probability():
    """Across blocks of ids, some of them without any weight, and at the vocabulary's end."""
    allowed = np.array([3, 255, 256, 700, 1030])
    logits = np.full((4000, 1031), -np.inf, np.float32)
    logits[:, allowed] = np.log([0.3, 0.1, 0.2, 0.15, 0.25])
    tokens = sampler.sample_token(
        jnp.asarray(logits), jax.random.key(1), temperature=1.0, top_p=1.0
    )
    ids, counts = np.unique(tokens, return_counts=True)
    np.testing.assert_array_equal(ids, allowed)
    np.testing.assert_allclose(counts / len(tokens), [0.3, 0.1, 0.2, 0.15, 0.25], atol=0.03)


@pytest.mark.parametrize("policy", ["qwen3_vl"], indirect=True)
def test_log_probabilities_of_qwen3_vl_are_the_trainers_own(policy, trainer_logp, decode):
    rollouts = decode(jax.random.key(0))
    mask = np.asarray(rollouts.is_valid)
    logp = trainer_logp(rollouts)
    np.testing.assert_allclose(np.asarray(rollouts.logp)[mask], logp[mask], atol=3e-5)
