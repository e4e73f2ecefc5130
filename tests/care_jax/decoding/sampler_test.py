import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import packed_plan, padded, take_back
from queued import make_answer

from care_jax.decoding import sampler
from care_jax.decoding.rollout_buffer import NO_CONTEXT, Request
from care_jax.decoding.schedule import Sizes
from care_jax.decoding.slots import empty_slots
from care_jax.learning import logprobs
from care_jax.packing.layout import at_tokens, lay_out
from models import backbone

MAX_TOKENS = 14
CLOSING = 5  # the token at this index closes the rationale of `ending`, whatever it is


@pytest.fixture(scope="module")
def decode(policy, params, image_prompts):
    """Decodes three rollouts of all four prompts at once; a `choice` is a program."""

    compiled = {}

    def decode(rng, contexts=(NO_CONTEXT,) * 4, asked=policy, **choice):
        key = (id(asked), *choice.items())
        if key not in compiled:
            sizes = dict(num_slots=4, num_rows=3, num_rollouts=3)
            sizes |= dict(max_tokens=MAX_TOKENS, num_context_tokens=6)
            compiled[key] = asked, make_answer(asked, params, **sizes, **choice)
        requests = map(Request, range(4), image_prompts, contexts)
        return compiled[key][1](list(requests), rng)

    return decode


@pytest.fixture(scope="module")
def ending(policy):
    """The policy with ten ids that end a response, and an automaton that closes at a token.

    As in the releases, one of the ids is the padding. At a high temperature about a row in eight
    meets one.
    """
    config = policy.config
    ends = (*config.eos_token_ids, config.pad_token_id, *range(300, 308))
    return dataclasses.replace(
        policy,
        config=dataclasses.replace(config, eos_token_ids=ends),
        closing_tag=_closing_at_token(policy, CLOSING),
    )


@pytest.fixture(scope="module")
def trainer_logp(policy, params, image_prompts):
    """Log-probabilities of rollouts by the trainer's forward, [B, R, T]."""
    score = jax.jit(
        functools.partial(
            logprobs.score_rows,
            config=policy.config,
            options=logprobs.ForwardOptions(jnp.float32),
        )
    )

    def trainer_logp(rollouts):
        tokens, lengths = np.asarray(rollouts.tokens), np.asarray(rollouts.is_valid).sum(-1)
        plan = packed_plan(image_prompts, lengths, row_tokens=384, row_patches=256)
        plan = padded(plan, num_rows=1, row_tokens=384, row_patches=256)
        logp, *_ = score(params, lay_out(image_prompts, tokens, plan, policy.prompts))
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
    assert (rollouts.drawn_logp is None) == (temperature == top_p == 1)
    assert temperature or not rollouts.drawn_logp.any()  # a greedy choice has probability 1


def test_greedy_rows_take_the_most_likely_token_of_the_full_forward(trainer_logp, decode):
    rollouts = decode(jax.random.key(1), temperature=0.0, top_p=1.0)
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


def test_each_end_of_sequence_id_ends_a_row_and_padding_does_not(
    policy, decode, ending, trainer_logp
):
    ends, seen = ending.config.eos_token_ids, set()
    for seed in range(40):
        rollouts = decode(jax.random.key(seed), temperature=3.0, asked=ending)
        tokens, is_valid = np.asarray(rollouts.tokens), np.asarray(rollouts.is_valid)
        logp = trainer_logp(rollouts)
        np.testing.assert_allclose(np.asarray(rollouts.logp)[is_valid], logp[is_valid], atol=3e-5)
        is_end = np.isin(tokens, ends) & is_valid
        length = is_valid.sum(-1)
        np.testing.assert_array_equal(is_valid, np.arange(MAX_TOKENS) < length[..., None])
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


CONTEXTS = [np.arange(300, 300 + n, dtype=np.int32) for n in (6, 1, 3, 0)]


def test_reflected_rows_hold_their_context_then_what_was_sampled_from_it(
    policy, trainer_logp, decode
):
    """Padding in front of a short context takes none of the row's budget of tokens."""
    rollouts = decode(jax.random.key(2), CONTEXTS, temperature=1.0, top_p=1.0)
    is_forced, is_valid = rollouts.is_forced[:, 0], rollouts.is_valid[:, 0]
    tokens = rollouts.tokens[:, 0]
    for row, context in enumerate(CONTEXTS):
        np.testing.assert_array_equal(tokens[row, : len(context)], context)
        assert is_forced[row].sum() == len(context)
        length = is_valid[row].sum()
        assert is_valid[row, :length].all()
        assert len(context) < length
        assert length == MAX_TOKENS or rollouts.is_complete[row, 0]
    np.testing.assert_array_equal(
        rollouts.is_complete[:, 0], (tokens == policy.config.eos_token_ids[0]).any(1)
    )

    mask = is_valid & ~is_forced
    logp = trainer_logp(rollouts)[:, 0]
    np.testing.assert_allclose(rollouts.logp[:, 0][mask], logp[mask], atol=3e-5)
    assert np.all(rollouts.logp[:, 0][~mask] == 0)


def test_without_a_context_the_reflected_row_is_a_fresh_rollout(decode):
    """From the same keys it is the first row that a plain decode gives."""
    fresh = decode(jax.random.key(5), CONTEXTS, temperature=1.0, top_p=1.0)
    plain = decode(jax.random.key(5), temperature=1.0, top_p=1.0)
    np.testing.assert_array_equal(fresh.tokens[3], plain.tokens[3])
    np.testing.assert_allclose(fresh.logp[3], plain.logp[3], atol=1e-5)
    assert not fresh.is_forced[3].any()


def test_embedding_is_the_mean_state_up_to_the_end_of_the_rationale(
    params, image_prompts, decode, ending
):
    """The token at index 5 closes the span, whatever it is; one row ends before it."""
    config = ending.config
    for seed in range(40):
        rollouts = decode(jax.random.key(seed), temperature=3.0, asked=ending)
        tokens = np.asarray(rollouts.tokens)
        is_end = np.isin(tokens, config.eos_token_ids) & rollouts.is_valid
        end = np.where(is_end.any(-1), is_end.argmax(-1), MAX_TOKENS)
        if end.min() in (1, 2, 3):
            break
    assert end.min() in (1, 2, 3) and (end > CLOSING).sum() > 6
    in_mean = np.arange(MAX_TOKENS) < np.minimum(end, CLOSING + 1)[..., None]
    # All of the rows, also what stands behind their end.
    plan = packed_plan(image_prompts, np.full(tokens.shape[:2], MAX_TOKENS), row_patches=512)

    @jax.jit
    def hidden_states(rows):
        x, features = backbone.embed_with_images(
            params, rows.tokens, rows.images, rows.feature_index, config, dtype=jnp.float32
        )
        mask = backbone.text_mask(rows.reach, config)
        options = {"features": features, "feature_index": rows.feature_index}
        return backbone.forward(params, x, rows.positions, mask, config, **options)[0]

    hidden = hidden_states(lay_out(image_prompts, tokens, plan, ending.prompts))
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


@pytest.mark.parametrize("policy", ["qwen3_vl_moe"], indirect=True)
def test_routes_of_tokens_that_a_step_has_read_are_the_trainers_own(
    policy, params, image_prompts, decode
):
    """Not those of forced tokens, which are prefilled, of the last one, and of padding."""
    contexts = np.arange(5), NO_CONTEXT, NO_CONTEXT, np.arange(2)
    contexts = [np.asarray(context, np.int32) for context in contexts]
    rollouts = decode(jax.random.key(2), contexts, keeps_routes=True)
    is_valid, is_forced = np.asarray(rollouts.is_valid), np.asarray(rollouts.is_forced)
    plan = packed_plan(image_prompts, is_valid.sum(-1), row_tokens=384, row_patches=256)
    rows = lay_out(image_prompts, np.asarray(rollouts.tokens), plan, policy.prompts)
    options = logprobs.ForwardOptions(jnp.float32)
    fixed = {"config": policy.config, "options": options}
    score = jax.jit(functools.partial(logprobs.score_rows, params, **fixed))
    scored = score(rows)
    chosen = np.moveaxis(np.asarray(scored[2]), (2, 3), (0, 1))
    own = np.array([[take_back(x, plan, MAX_TOKENS) for x in layer] for layer in chosen])
    own = np.moveaxis(own, (0, 1), (-2, -1))
    is_last = is_valid & (np.cumsum(is_valid, -1) == is_valid.sum(-1, keepdims=True))
    is_read = is_valid & ~is_forced & ~is_last
    assert is_read.sum() > 50 and len(np.unique(own[is_read])) > 2
    np.testing.assert_array_equal(np.sort(rollouts.routes[is_read]), np.sort(own[is_read]))
    assert (rollouts.routes[~is_read] == -1).all()
    assert decode(jax.random.key(2), contexts).routes is None

    def replayed(routes):
        routes = at_tokens(routes, plan, fill=-1)
        return score(rows, routes=routes)[0]

    np.testing.assert_allclose(replayed(rollouts.routes), scored[0], atol=1e-5)
    others = np.where(rollouts.routes < 0, -1, (rollouts.routes + 1) % 8)
    assert np.abs(replayed(others) - scored[0]).max() > 1e-3
    swapped = rollouts.routes[..., ::-1, :]  # of the two layers
    assert np.abs(replayed(swapped) - scored[0]).max() > 1e-3


@pytest.mark.parametrize("policy", ["qwen3_vl"], indirect=True)
def test_log_probabilities_of_qwen3_vl_are_the_trainers_own(policy, trainer_logp, decode):
    rollouts = decode(jax.random.key(0), temperature=1.0, top_p=1.0)
    mask = np.asarray(rollouts.is_valid)
    logp = trainer_logp(rollouts)
    np.testing.assert_allclose(np.asarray(rollouts.logp)[mask], logp[mask], atol=3e-5)


def test_a_slot_that_takes_over_rollouts_stops_where_the_other_slot_would_have(policy):
    """Slot 2 takes over the last rollout of slot 0's, which end at 5; all of a prompt end at 9."""
    sizes = Sizes(4, 2, 9, 16, num_context_tokens=0, num_shards=1, period=8)
    slots = empty_slots(policy.config, sizes, 4, jnp.float32)
    slots = slots.replace(
        prefix=slots.prefix.replace(first=jnp.arange(36).reshape(4, 9)),
        next_rollout=jnp.array([2, 2, 9, 9]),
        end_rollout=jnp.array([5, 9, 9, 9]),
        rollout=jnp.array([[0, 1], [0, 1], [9, 9], [9, 9]]),
    )
    source, begin, end = jnp.array([[-1, -1, 0, -1], [0, 0, 4, 0], [4, 9, 5, 9]])
    occupy = jax.jit(functools.partial(sampler.occupy, num_shards=1))
    slots = occupy(slots, slots.prefix, source, begin, end)
    assert slots.end_rollout.tolist() == [4, 9, 5, 9]
    assert slots.rollout.tolist() == [[0, 1], [0, 1], [4, 9], [9, 9]]
    assert slots.next_rollout.tolist() == [2, 2, 6, 9]
    assert slots.token[2, 0] == slots.prefix.first[0, 4]


def test_idle_rows_and_free_slots_see_nothing_and_a_row_its_last_positions_of_the_ring(policy):
    slots = empty_slots(policy.config, Sizes(2, 2, 9, 8, 0, num_shards=1, period=2), 4, jnp.float32)
    slots = slots.replace(
        prefix=slots.prefix.replace(is_valid=jnp.arange(4) >= jnp.array([[1], [2]])),
        rollout=jnp.array([[0, 9], [9, 9]]),
        num_read=jnp.array([[3, 0], [0, 0]]),
        num_steps=jnp.int32(17),
    )
    on_prefix, on_suffix = sampler.visible(slots)
    assert on_prefix.tolist() == [[False, True, True, True], [False] * 4]
    assert np.argwhere(on_suffix).tolist() == [[0, 0, j] for j in (0, 1, 6, 7)]
