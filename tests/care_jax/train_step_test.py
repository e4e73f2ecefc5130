"""The update: equal however the batch is cut, laid out or padded.

Gradients are read off as the change that plain gradient descent of rate 1 makes.
"""

import functools
import sys
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from care_jax import credit, logprobs, optimizer, sharding
from care_jax.batch import Scores, TrainBatch
from care_jax.train_step import (
    init_state,
    join_batch,
    split_batch,
    state_shardings,
    train_step,
    update,
)
from models import backbone, lora
from models.attention import Kernel

SGD = optax.sgd(1.0)
RULES = (
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
)


@pytest.fixture(scope="module")
def batch(policy, params, prompts, responses):
    """Rows that have moved away from the sampler and the reference, one prompt left out.

    The first token of a row has no credit, the first three are no answer.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shape = responses.tokens.shape
    logp, _ = jax.jit(
        functools.partial(
            logprobs.score_responses, config=policy.config, dtype=jnp.float32, chunk=1000
        )
    )(params, prompts, responses.tokens, responses.is_valid)
    is_trained = responses.is_valid & (jnp.arange(4) != 2)[:, None, None]
    return TrainBatch(
        prompts=prompts,
        tokens=responses.tokens,
        is_valid=responses.is_valid,
        token_advantage=is_trained * (jnp.arange(9) > 0) * jax.random.normal(keys[0], shape),
        old_logp=logp + 0.5 * jax.random.normal(keys[1], shape),
        ref_logp=logp + 0.3 * jax.random.normal(keys[2], shape),
        row_weight=jax.random.uniform(keys[3], shape[:2]),
        prompt_weight=jnp.array([1.0, 1.0, 0.0, 1.0]),
        is_trained=is_trained,
        is_answer=responses.is_valid & (jnp.arange(9) > 2),
    )


@pytest.fixture(scope="module")
def step(policy):
    def step(state, batch, microbatch_size, beta=0.1, clip_low=0.2, clip_high=0.28, sequence=False):
        return train_step(
            state,
            batch,
            policy.config,
            SGD,
            microbatch_size=microbatch_size,
            beta=beta,
            clip_low=clip_low,
            clip_high=clip_high,
            chunk=7,
            dtype=jnp.float32,
            remat="none",
            has_sequence_ratio=sequence,
        )

    static = ("microbatch_size", "beta", "clip_low", "clip_high", "sequence")
    return jax.jit(step, static_argnames=static)


@pytest.fixture(scope="module")
def whole(step, params, batch):
    """State and metrics after one update on the whole batch at once."""
    return step(init_state(params, SGD), batch, 4)


def assert_same_update(params, result, expected, tolerance=2e-5):
    (state, metrics), (expected_state, expected_metrics) = result, expected
    gradients = (
        jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, s.params)
        for s in (state, expected_state)
    )
    largest = max(np.abs(x).max() for x in jax.tree.leaves(params))
    for grad, want in zip(*map(jax.tree.leaves, gradients), strict=True):
        # Gradients come as differences of parameters, so their last bits are the parameters'.
        np.testing.assert_allclose(
            grad, want, atol=tolerance * max(np.abs(want).max(), largest * 1e-2)
        )
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_loss_and_metrics_are_the_formulas_with_hand_made_sums(policy, params, batch, whole):
    logp, entropy = logprobs.score_responses(
        params,
        batch.prompts,
        batch.tokens,
        batch.is_valid,
        policy.config,
        dtype=jnp.float32,
        chunk=1000,
    )
    b = jax.tree.map(lambda x: np.asarray(x, np.float64), batch)
    logp, total, sums = np.asarray(logp, np.float64), 0.0, defaultdict(list)
    for prompt, row, token in np.argwhere(b.is_trained):
        at = prompt, row, token
        ratio, a = np.exp(logp[at] - b.old_logp[at]), b.token_advantage[at]
        total -= b.row_weight[prompt, row] * min(ratio * a, np.clip(ratio, 0.8, 1.28) * a)
        for name, other in (("kl_ref", b.ref_logp), ("kl_old", b.old_logp)):
            d = other[at] - logp[at]
            sums[name].append(np.exp(d) - d - 1)
        sums["entropy"].append(entropy[at])
        if a:
            is_clipped = ratio > 1.28 if a > 0 else ratio < 0.8
            sums["clip_rate"].append(is_clipped)
            if a < 0 and b.is_answer[at]:
                sums["clip_rate_negative_answer"].append(is_clipped)
    state, metrics = whole
    expected = {name: np.mean(values) for name, values in sums.items()} | {"policy_loss": total / 3}
    expected["loss"] = expected["policy_loss"] + 0.1 * expected["kl_ref"]
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    assert metrics.keys() == expected.keys() | {"grad_norm"}
    assert 0 < expected["clip_rate_negative_answer"] != expected["clip_rate"] < 1
    assert state.step == 1


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_microbatches_change_nothing(step, params, batch, whole, microbatch_size):
    result = step(init_state(params, SGD), batch, microbatch_size)
    assert_same_update(params, result, whole)


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


def credited_by(name, batch, responses):
    """The batch with the advantages and weights of a baseline."""
    ones = jnp.ones(ACC.shape)
    scores = Scores(ACC, ones, 0.9 * ACC + 0.1, None, None, ones, ones, ones)
    credited = BASELINES[name](responses, scores)
    names = ("token_advantage", "row_weight", "prompt_weight", "is_trained")
    return batch.replace(**{name: getattr(credited, name) for name in names})


@pytest.mark.parametrize("name", BASELINES)
def test_microbatches_change_nothing_under_any_baseline(step, params, batch, responses, name):
    """Rows of 1 to 9 tokens lie unevenly in microbatches of one prompt."""
    batch = credited_by(name, batch, responses)
    settings = dict(beta=0.0, sequence=name == "gspo")
    whole = step(init_state(params, SGD), batch, 4, **settings)
    assert whole[1]["grad_norm"] > 1e-3
    assert_same_update(params, step(init_state(params, SGD), batch, 1, **settings), whole)


def test_sequence_ratio_is_a_rows_own(policy, step, params, batch, responses):
    """The loss of GSPO, summed by hand; rows have moved by up to several times the range."""
    batch = credited_by("gspo", batch, responses)
    b = jax.tree.map(lambda x: np.asarray(x, np.float64), batch)
    scored = batch.prompts, batch.tokens, batch.is_valid, policy.config
    logp, _ = logprobs.score_responses(params, *scored, dtype=jnp.float32, chunk=1000)
    delta = np.asarray(logp, np.float64) - b.old_logp
    terms, num_tokens, num_clipped = [], [], []
    for prompt, row in np.ndindex(4, 3):
        mask = batch.is_valid[prompt, row]
        s, A = np.exp(delta[prompt, row][mask].mean()), b.token_advantage[prompt, row].sum()
        terms.append(min(s * A, np.clip(s, 0.8, 1.28) * A))
        num_tokens.append(mask.sum() * (A != 0))
        num_clipped.append(num_tokens[-1] * (s > 1.28 if A > 0 else s < 0.8))
    _, metrics = step(init_state(params, SGD), batch, 4, beta=0.0, sequence=True)
    np.testing.assert_allclose(metrics["policy_loss"], -np.mean(terms), rtol=1e-4)
    np.testing.assert_allclose(metrics["clip_rate"], sum(num_clipped) / sum(num_tokens), rtol=1e-5)
    assert 0 < sum(num_clipped) < sum(num_tokens)


def test_eight_devices_give_the_update_of_one(policy, step, params, batch, whole):
    mesh = sharding.make_mesh(1, 4, 2, devices=jax.devices()[:8])
    shardings = sharding.param_shardings(backbone.logical_axes(policy.config), params, RULES, mesh)
    is_cut = [not s.is_fully_replicated for s in jax.tree.leaves(shardings)]
    assert sum(is_cut) > len(is_cut) / 2
    state = init_state(jax.device_put(params, shardings), SGD)
    state = jax.device_put(state, state_shardings(state, mesh))
    result = step(state, sharding.put_batch(jax.tree.map(np.asarray, batch), mesh), 4)
    assert_same_update(params, result, whole)


def replicated_rows(batch):
    """Each row alone behind its own prompt; weights and denominators are the same sums."""
    num_rows = batch.tokens.shape[1]

    def alone(x):
        return x.reshape(-1, 1, *x.shape[2:])

    repeated = jax.tree.map(lambda x: jnp.repeat(x, num_rows, 0), batch.prompts)
    first = jnp.arange(4 * num_rows) % num_rows == 0
    weight = jnp.repeat(batch.prompt_weight, num_rows) * first
    rows = jax.tree.map(alone, batch.replace(prompts=None, prompt_weight=None))
    return rows.replace(prompts=repeated, prompt_weight=weight)


def test_tree_rows_give_the_update_of_replicated_rows(step, params, batch, whole):
    result = step(init_state(params, SGD), replicated_rows(batch), 4)
    assert_same_update(params, result, whole)


def test_rows_without_credit_do_not_move_the_loss(step, params, batch, whole):
    changed = batch.replace(
        old_logp=jnp.where(batch.is_trained, batch.old_logp, -50.0),
        ref_logp=jnp.where(batch.is_trained, batch.ref_logp, 0.0),
    )
    assert_same_update(params, step(init_state(params, SGD), changed, 4), whole)


def test_a_batch_without_any_update_leaves_finite_parameters_alone(step, params, batch):
    idle = batch.replace(
        token_advantage=jnp.zeros_like(batch.token_advantage),
        prompt_weight=jnp.zeros_like(batch.prompt_weight),
        is_trained=jnp.zeros_like(batch.is_trained),
    )
    state, metrics = step(init_state(params, SGD), idle, 4)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert all(np.isfinite(value) for value in metrics.values())


def test_kl_alone_pulls_towards_the_reference(step, policy, params, batch):
    idle = batch.replace(token_advantage=jnp.zeros_like(batch.token_advantage))
    state, before = step(init_state(params, optax.sgd(1.0)), idle, 4)
    small = jax.tree.map(lambda old, new: old + 1e-3 * (new - old), params, state.params)
    _, after = step(init_state(small, SGD), idle, 4)
    assert after["kl_ref"] < before["kl_ref"]


def updated(policy, batch, state, adamw, partition=optimizer.partition):
    return jax.jit(
        functools.partial(
            train_step,
            config=policy.config,
            optimizer=adamw,
            microbatch_size=4,
            beta=0.0,
            clip_low=0.2,
            clip_high=0.28,
            chunk=1000,
            dtype=jnp.float32,
            remat="dots",
            partition=partition,
        )
    )(state, batch)


@pytest.fixture(scope="module")
def adamw():
    return optimizer.make_optimizer(lambda step: 1e-3, weight_decay=0.0, max_grad_norm=1e9)


def test_frozen_parameters_stay_and_have_no_state(policy, params, batch, adamw, whole):
    partition = functools.partial(optimizer.partition, freeze_vision=True)
    state = init_state(params, adamw, partition=partition)
    assert len(jax.tree.leaves(state.opt_state)) < 2 * len(jax.tree.leaves(params))
    after, metrics = updated(policy, batch, state, adamw, partition)
    jax.tree.map(np.testing.assert_array_equal, after.params["vision"], params["vision"])
    is_moved = jax.tree.map(lambda a, b: bool((a != b).any()), after.params["text"], params["text"])
    assert all(jax.tree.leaves(is_moved))
    assert 0 < metrics["grad_norm"] < whole[1]["grad_norm"]


def test_adapters_learn_and_leave_the_weights_alone(policy, params, batch, adamw):
    adapted = lora.add(params, jax.random.key(1), rank=2, alpha=4.0)
    state = init_state(jax.device_put(adapted, jax.devices()[0]), adamw)
    after, _ = updated(policy, batch, state, adamw)
    jax.tree.map(np.testing.assert_array_equal, lora.without(after.params), params)
    layers = after.params["text"]["layers"]
    assert all(np.abs(layers["mlp"][name]["lora_b"]).max() > 0 for name in ("gate", "up", "down"))


def test_state_in_bfloat16_keeps_its_type_and_nearly_its_step(policy, params, batch, adamw):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = init_state(narrow, adamw, moments_dtype=jnp.bfloat16)
    after, _ = updated(policy, batch, state, adamw)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    exact, _ = updated(policy, batch, init_state(jax.tree.map(jnp.float32, narrow), adamw), adamw)
    # A step of 1e-3 is below half the distance between bfloat16 neighbours of most weights, so
    # only stochastic rounding lets the weights move, on average as far as in float32.
    moves = [
        jax.tree.map(
            lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), s.params, narrow
        )
        for s in (after, exact)
    ]
    ours, theirs = (np.concatenate([x.ravel() for x in jax.tree.leaves(m["text"])]) for m in moves)
    np.testing.assert_allclose((ours * theirs).sum() / (theirs**2).sum(), 1.0, atol=0.05)


def test_moments_on_the_host_give_the_same_update(policy, params, batch, adamw):
    state = init_state(params, adamw)
    expected = updated(policy, batch, state, adamw)
    moments = jax.device_put(state.opt_state, sharding.on_host(sharding.of(state.opt_state)))
    assert jax.tree.leaves(moments)[1].sharding.memory_kind == "pinned_host"
    got = updated(policy, batch, state.replace(opt_state=moments), adamw)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_scorer_is_called_as_the_step_was(policy, batch, monkeypatch):
    seen = {}

    def score_responses(params, prompts, tokens, is_valid, config, **settings):
        seen.update(settings)
        return (params["w"] * jnp.zeros(tokens.shape),) * 2

    monkeypatch.setattr(sys.modules[train_step.__module__], "score_responses", score_responses)
    settings = dict(chunk=7, dtype=jnp.bfloat16, remat="layer", attention=Kernel("splash"))
    state = init_state({"w": jnp.ones(())}, SGD)
    clip = dict(clip_low=0.2, clip_high=0.28)
    step = functools.partial(train_step, microbatch_size=2, beta=0.1, **clip, **settings)
    jax.eval_shape(lambda state, batch: step(state, batch, policy.config, SGD), state, batch)
    assert seen == settings


def test_update_descends_the_summed_gradient_and_reports_its_norm():
    """Of Σ w·x / 6 over six rows cut in three, by rate 0.1; x counts from 0 to 11."""
    x = jnp.arange(12.0).reshape(6, 2)

    def loss_fn(params, x):
        return (x @ params["w"]).sum() / 6, {"mean": (x.sum(), jnp.float32(x.size))}

    sgd = optax.sgd(0.1)
    state = init_state({"w": jnp.ones(2)}, sgd)
    state, metrics = update(state, x, loss_fn, sgd, microbatch_size=2)
    np.testing.assert_allclose(state.params["w"], [1 - 0.5, 1 - 0.6], rtol=1e-6)
    assert metrics["grad_norm"] == pytest.approx((5**2 + 6**2) ** 0.5)
    assert (metrics["loss"], metrics["mean"]) == (pytest.approx(11), pytest.approx(5.5))
    assert state.step == 1


def test_split_examples_come_back_in_order():
    x = {"a": jnp.arange(12), "b": jnp.arange(24).reshape(12, 2)}
    parts = split_batch(x, 3)
    assert parts["b"].shape == (4, 3, 2)
    jax.tree.map(np.testing.assert_array_equal, join_batch(parts), x)


def test_microbatch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="microbatch size 5 must divide the batch of 12"):
        split_batch(jnp.arange(12), 5)


@pytest.mark.parametrize("policy", ["qwen3_vl"], indirect=True)
def test_layouts_and_devices_change_nothing_for_qwen3_vl_either(policy, step, params, batch, whole):
    """DeepStack reaches the prompt's image tokens alone, however rows are laid out or sharded."""
    moved = jax.tree.map(lambda old, new: jnp.abs(old - new).max(), params, whole[0].params)
    assert moved["vision"]["deepstack"]["up"]["kernel"] > 1e-6
    replicated = step(init_state(params, SGD), replicated_rows(batch), 4)
    assert_same_update(params, replicated, whole)
    mesh = sharding.make_mesh(1, 4, 2, devices=jax.devices()[:8])
    shardings = sharding.param_shardings(backbone.logical_axes(policy.config), params, RULES, mesh)
    state = init_state(jax.device_put(params, shardings), SGD)
    state = jax.device_put(state, state_shardings(state, mesh))
    sharded = step(state, sharding.put_batch(jax.tree.map(np.asarray, batch), mesh), 4)
    assert_same_update(params, sharded, whole)
