"""The batch of an update: its rows, its buckets, and whose log-probabilities it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import B, T, credit_of, groups_of, scripted_update

from care_jax import update_batch
from care_jax.batch import Example
from care_jax.prompt import prompt_sizes
from care_jax.rollout import Groups, Roster


def num_tokens_of(is_valid):
    """Of the longest row of each prompt."""
    return is_valid.sum(-1).max(1)


PARTS = {"rl.prompts_per_step": B, "rl.prompts_per_update": 2}


def test_update_gets_its_part_of_the_rows_in_the_smallest_bucket(make_run, groups, records):
    rollouts, scores = groups.rollouts, groups.scores
    is_valid = rollouts.is_valid.copy()
    is_valid[2:, :, 5:] = False
    is_valid[2, 1, :5] = True
    groups = Groups(
        rollouts.replace(is_valid=is_valid), scores, None, groups.has_reflection, groups.reasons
    )
    credited = credit_of(is_valid.shape)
    run = make_run(PARTS | {"rl.response_buckets": (4, 5, 7, 9)})
    roster = Roster(np.arange(B), prompt_sizes(records), ["made"] * B)
    num_tokens = num_tokens_of(is_valid)
    batch = update_batch.train_batch(run, roster, records, groups, credited, num_tokens, 1)
    expected = {
        "tokens": rollouts.tokens,
        "is_valid": is_valid,
        "token_advantage": credited.token_advantage,
        "old_logp": rollouts.logp,
        "ref_logp": np.zeros(is_valid.shape),
        "is_trained": credited.is_trained,
        "is_answer": scores.is_answer,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(batch, name), value[2:4, :, :5], err_msg=name)
    np.testing.assert_allclose(batch.row_weight, credited.row_weight[2:4])
    np.testing.assert_allclose(batch.prompt_weight, credited.prompt_weight[2:4])
    prompts = run.policy.prompts.batch(records[2:4])
    np.testing.assert_array_equal(batch.prompts.tokens, prompts.tokens)

    first = update_batch.train_batch(run, roster, records, groups, credited, num_tokens, 0)
    assert first.tokens.shape[-1] == (9 if is_valid[:2, :, 7:].any() else 7)


def test_process_gives_an_update_its_own_rows_in_the_bucket_of_all(make_run, responses, policy):
    """It has the second of each two prompts; the long prompts and rows are the other process's."""
    own = np.array([1, 3])
    questions = [Example(f"q{i}", "made", (), "1?" + " 1" * i, "") for i in (15, 0, 15, 0)]
    records = [policy.prompts.tokenize(example) for example in questions]
    sizes = prompt_sizes(records)
    rollouts = jax.tree.map(lambda x: np.asarray(x)[own], responses)
    is_valid = rollouts.is_valid & (np.arange(T) < 4)
    rollouts = rollouts.replace(is_valid=is_valid)
    groups = groups_of(responses)
    scores = jax.tree.map(lambda x: x[own], groups.scores)
    groups = Groups(rollouts, scores, None, np.zeros(2, bool), groups.reasons[own])
    run = make_run(PARTS | {"rl.response_buckets": (4, 9)})
    for index in range(2):
        batch = update_batch.train_batch(
            run,
            Roster(own, sizes, ["made"] * B),
            [records[place] for place in own],
            groups,
            credit_of(is_valid.shape),
            np.array([9, 4, 9, 4]),
            index,
        )
        np.testing.assert_array_equal(batch.tokens, rollouts.tokens[index : index + 1])
        prompts = policy.prompts.batch(records[own[index] : own[index] + 1], sizes)
        assert prompts.tokens.shape[1] > policy.prompts.batch([records[1]]).tokens.shape[1]
        np.testing.assert_array_equal(batch.prompts.tokens, prompts.tokens)


def beta(value):
    return {"care.beta": value, "grpo.beta": value}


@pytest.mark.parametrize(
    ("changes", "is_recomputed"),
    [
        ({}, False),
        ({"rl.old_logp": "trainer"}, True),
        ({"care.reflect_credit": "prompt_only"}, True),
        ({"care.reflect_credit": "prompt_only", "rl.objective": "grpo"}, False),
    ],
)
def test_log_probabilities_come_from_whom_they_should(
    make_run, groups, whole_batch, changes, is_recomputed
):
    """The scorer gives the name of its parameters, a number."""
    run = make_run({"rl.response_buckets": (9,), **beta(0.1), **changes})
    shape = groups.rollouts.tokens.shape
    batch = whole_batch(run, groups)
    programs = scripted_update(score=lambda params, batch: jnp.full(batch.tokens.shape, params))
    sampled = groups.rollouts.logp
    for scored in update_batch.with_logprobs(run, programs, [batch] * 2, 5.0, 7.0):
        np.testing.assert_array_equal(scored.ref_logp, np.full(shape, 7.0))
        np.testing.assert_array_equal(
            scored.old_logp, np.full(shape, 5.0) if is_recomputed else sampled
        )
    without_kl = make_run({"rl.response_buckets": (9,), **beta(0.0), **changes}, "without_kl")
    (scored,) = update_batch.with_logprobs(without_kl, programs, [batch], 5.0, None)
    np.testing.assert_array_equal(scored.ref_logp, np.zeros(shape))


def test_adapters_leave_their_reference_in_place(make_run, groups, whole_batch):
    run = make_run({"rl.response_buckets": (9,), "care.beta": 0.1, "model.lora_rank": 2})
    params = {"text": {"kernel": 3.0, "lora_a": 1.0, "lora_b": 2.0, "lora_scale": 1.0}}
    assert update_batch.copy_reference(run, params) is None
    batch = whole_batch(run, groups)
    seen = []
    programs = scripted_update(score=lambda params, batch: seen.append(params) or batch.ref_logp)
    update_batch.with_logprobs(run, programs, [batch], params, None)
    assert seen == [{"text": {"kernel": 3.0}}]
