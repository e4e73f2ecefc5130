"""The update: its loss and metrics, what it leaves alone, and the loop over microbatches."""

import dataclasses
import functools
import sys
import types
from collections import defaultdict
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import output_with
from packed import take_back
from updates import LAYOUTS, PLANS, SGD, assert_same_update, credited_by

from care_jax.aot.topology import find_topology
from care_jax.devices import sharding
from care_jax.learning import optimizer
from care_jax.learning.logprobs import ForwardOptions
from care_jax.learning.train_step import (
    BROKEN_GRADIENTS,
    init_state,
    map_microbatches,
    split_batch,
    train_step,
    update,
)
from care_jax.method.objectives import Objective
from models import layers, lora
from models.attention.packed import AttentionImpl


def test_loss_and_metrics_are_the_formulas_with_hand_made_sums(scored, update_of, whole):
    logp, entropy = scored
    b = types.SimpleNamespace(
        **{name: np.asarray(value, np.float64) for name, value in update_of.fields.items()}
    )
    logp, total, sums = logp.astype(np.float64), 0.0, defaultdict(list)
    credits = {True: 0.0, False: 0.0}  # by whether a token is of the answer
    for prompt, row, token in np.argwhere(b.is_trained):
        at = prompt, row, token
        ratio, a = np.exp(logp[at] - b.old_logp[at]), b.token_advantage[at]
        total -= b.row_weight[prompt, row] * min(ratio * a, np.clip(ratio, 0.8, 1.28) * a)
        # Tokens are of π_old, from which the one is measured, and to which the loss corrects.
        apart = {"kl_ref": b.ref_logp[at] - logp[at], "kl_old": logp[at] - b.old_logp[at]}
        for name, d in apart.items():
            sums[name].append(np.exp(d) - d - 1)
        sums["entropy"].append(entropy[at])
        credit = b.row_weight[prompt, row] * max(a, 0)
        credits[bool(b.is_answer[at])] += credit
        if a:
            is_clipped = ratio > 1.28 if a > 0 else ratio < 0.8
            sums["clip_rate"].append(is_clipped)
            if a < 0 and b.is_answer[at]:
                sums["clip_rate_negative_answer"].append(is_clipped)
    state, metrics = whole
    expected = {name: np.mean(values) for name, values in sums.items()} | {"policy_loss": total / 3}
    expected["loss"] = expected["policy_loss"] + 0.1 * expected["kl_ref"]
    expected["rationale_share"] = credits[False] / (credits[False] + credits[True])
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    assert metrics.keys() == expected.keys() | {"grad_norm"}
    assert 0 < expected["rationale_share"] < 1
    assert 0 < expected["clip_rate_negative_answer"] != expected["clip_rate"] < 1
    assert state.step == 1


def test_sequence_ratio_is_a_responses_own(step, params, scored, update_of):
    """The loss of GSPO, summed by hand; rows have moved by up to several times the range.

    Its KL is within the mean over responses of the means over their tokens.
    """
    credited = credited_by("gspo", update_of)
    responses = update_of.responses
    logp, _ = scored
    delta = logp.astype(np.float64) - np.asarray(credited.fields["old_logp"])
    apart = np.asarray(credited.fields["ref_logp"]) - logp.astype(np.float64)
    terms, kls, num_tokens, num_clipped = [], [], [], []
    for prompt, row in np.ndindex(4, 3):
        mask = np.asarray(responses.is_valid[prompt, row])
        s = np.exp(delta[prompt, row][mask].mean())
        A = credited.fields["token_advantage"][prompt, row, 0]
        d = apart[prompt, row][mask]
        kls.append((np.exp(d) - d - 1).mean())
        terms.append(min(s * A, np.clip(s, 0.8, 1.28) * A))
        num_tokens.append(mask.sum() * (A != 0))
        num_clipped.append(num_tokens[-1] * (s > 1.28 if A > 0 else s < 0.8))
    batch = credited.batch(LAYOUTS["packed"])
    _, metrics = step(init_state(params, SGD), batch, 2, sequence=True)
    np.testing.assert_allclose(metrics["policy_loss"], -np.mean(terms), rtol=1e-4)
    kl = (metrics["loss"] - metrics["policy_loss"]) / 0.1
    np.testing.assert_allclose(kl, np.mean(kls), rtol=1e-3)
    assert metrics["kl_ref"] != pytest.approx(np.mean(kls), rel=0.01)  # the mean over tokens
    np.testing.assert_allclose(metrics["clip_rate"], sum(num_clipped) / sum(num_tokens), rtol=1e-5)
    assert 0 < sum(num_clipped) < sum(num_tokens)


@pytest.mark.parametrize("name", ["packed", "trees in parts"])
def test_an_update_gives_back_the_log_probabilities_before_it(
    stepped, params, scored, update_of, name
):
    """Of every response, in microbatches of two rows, of which the last are empty."""
    lengths = np.asarray(update_of.responses.is_valid).sum(-1)
    plan = LAYOUTS[name](update_of.tokenized, lengths)
    *_, logp = stepped(init_state(params, SGD), update_of.batch(LAYOUTS[name]), 2)
    assert not logp[plan.token_branches[0] < 0].any()
    np.testing.assert_allclose(take_back(np.asarray(logp), plan, 9), scored[0], atol=1e-5)


@pytest.fixture
def corrected(policy, update_of, monkeypatch):
    """(correction, sequence, drawn_logp [B S]) -> metrics and gradient of an update, and its batch.

    The scorer gives -w for every token, at w = 1. A row of the batch has a prompt's responses.
    """
    batch = update_of.batch(PLANS["a row per prompt"])
    is_compared = batch.is_trained & (batch.rows.branch != 2)  # as if the last were reflected
    batch = batch.replace(is_compared=is_compared, old_logp=-1.1 - (batch.rows.tokens % 7) / 50)
    state = init_state({"w": jnp.ones(())}, SGD)

    def score_rows(params, rows, config, options, routes):
        return *(jnp.where(rows.predictor >= 0, -params["w"], 0.0),) * 2, None

    monkeypatch.setattr(sys.modules[train_step.__module__], "score_rows", score_rows)

    def corrected(correction, sequence, drawn_logp):
        objective = Objective(None, 10.0, 10.0, 0.0, correction=correction, correction_cap=1.5)
        objective = dataclasses.replace(objective, has_sequence_ratio=sequence)
        step = functools.partial(train_step, microbatch_size=4)
        fixed = policy.config, SGD, objective, ForwardOptions(jnp.float32)
        made = batch.replace(drawn_logp=None if drawn_logp is None else drawn_logp(batch))
        after, metrics, _ = jax.jit(lambda *args: step(*args, *fixed))(state, made)
        return metrics, float(1 - after.params["w"]), made

    return corrected


@pytest.mark.parametrize(("is_aged", "share"), [(False, 0.5), (True, 0.0)])
def test_routes_of_older_weights_are_not_compared(policy, update_of, monkeypatch, is_aged, share):
    batch = update_of.batch(PLANS["a row per prompt"])
    text = dataclasses.replace(policy.config.text, num_experts=2)

    def score_rows(params, rows, config, options, routes):
        chosen = jnp.zeros((*rows.tokens.shape, 1, 1), jnp.int16)
        return *(jnp.where(rows.predictor >= 0, -params["w"], 0.0),) * 2, chosen

    monkeypatch.setattr(sys.modules[train_step.__module__], "score_rows", score_rows)
    is_older = jnp.arange(batch.rows.tokens.shape[1]) % 2 == 1  # every second token
    is_older = jnp.broadcast_to(is_older, batch.rows.tokens.shape)
    routes = is_older[..., None, None].astype(jnp.int16)  # they were routed otherwise
    made = batch.replace(routes=routes, is_fresh=~is_older if is_aged else None)
    fixed = dataclasses.replace(policy.config, text=text), SGD, Objective(None, 0.2, 0.2, 0.0)
    step = functools.partial(train_step, microbatch_size=4)
    state = init_state({"w": jnp.ones(())}, SGD)
    run = jax.jit(lambda *args: step(*args, *fixed, ForwardOptions(jnp.float32)))
    assert run(state, made)[1]["routes/differ"] == pytest.approx(share, abs=0.01)


def drawn_otherwise(batch):
    """Ratios e^-1 to e: the first of a prompt's responses mostly above 1, the second below."""
    return batch.old_logp - 0.4 * (1 - 2 * batch.rows.branch) + 0.6 - (batch.rows.tokens % 5) * 0.3


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_correction_weighs_each_token_or_response(corrected, correction, sequence):
    metrics, _, batch = corrected(correction, sequence, drawn_otherwise)
    b, total, weights, num_capped = jax.tree.map(np.asarray, batch), 0.0, [], 0
    for row, branch in np.ndindex(len(b.old_logp), 3):
        is_compared = b.is_compared[row] & (b.rows.branch[row] == branch)
        is_trained = b.is_trained[row] & (b.rows.branch[row] == branch)
        log_ratio = np.where(is_compared, b.old_logp[row] - b.drawn_logp[row], 0.0)
        moved = -1 - b.old_logp[row]
        if sequence and is_trained.any():
            moved = np.full_like(moved, moved[is_trained].mean())
            log_ratio = np.full_like(log_ratio, log_ratio[is_trained].mean())
        ratio = np.exp(log_ratio.astype(np.float64))
        is_capped = (ratio > 1.5) | (ratio < 1 / 1.5) & (correction == "mask")
        weight = np.where(is_capped, 1.5 if correction == "truncate" else 0.0, ratio)
        terms = b.row_weight[row] * weight * np.exp(moved) * b.token_advantage[row]
        total -= terms[is_trained].sum()
        weights += weight[is_compared].tolist()
        num_capped += is_capped[is_compared].sum()
    np.testing.assert_allclose(metrics["policy_loss"], total / b.prompt_weight.sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["correction/weight"], np.mean(weights), rtol=1e-5)
    np.testing.assert_allclose(metrics["correction/capped"], num_capped / len(weights), rtol=1e-5)
    assert 0 < num_capped < len(weights)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_correction_of_equal_probabilities_changes_nothing(corrected, correction, sequence):
    expected, gradient, _ = corrected("none", sequence, None)
    metrics, same, _ = corrected(correction, sequence, lambda batch: batch.old_logp)
    assert (metrics.pop("correction/weight"), metrics.pop("correction/capped")) == (1, 0)
    assert metrics == expected and same == gradient != 0


def test_rows_without_credit_do_not_move_the_loss(step, params, update_of, whole):
    fields, is_trained = update_of.fields, update_of.fields["is_trained"]
    changed = update_of.replace(
        old_logp=np.where(is_trained, fields["old_logp"], -50.0),
        ref_logp=np.where(is_trained, fields["ref_logp"], 0.0),
    )
    batch = changed.batch(PLANS["a row per prompt"])
    assert_same_update(params, step(init_state(params, SGD), batch, 8), whole)


def test_a_batch_without_any_update_leaves_finite_parameters_alone(step, params, batch):
    idle = batch.replace(
        token_advantage=jnp.zeros_like(batch.token_advantage),
        prompt_weight=jnp.zeros_like(batch.prompt_weight),
        is_trained=jnp.zeros_like(batch.is_trained),
    )
    state, metrics = step(init_state(params, SGD), idle, 8)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert all(np.isfinite(value) for value in metrics.values())


def test_kl_alone_pulls_towards_the_reference(step, policy, params, batch):
    idle = batch.replace(token_advantage=jnp.zeros_like(batch.token_advantage))
    state, before = step(init_state(params, optax.sgd(1.0)), idle, 8)
    small = jax.tree.map(lambda old, new: old + 1e-6 * (new - old), params, state.params)
    _, after = step(init_state(small, SGD), idle, 8)
    assert after["kl_ref"] < before["kl_ref"]


ADAMW = optimizer.make_optimizer(lambda step: 1e-3, weight_decay=0.0, max_grad_norm=1e9)


@pytest.fixture(scope="module")
def updated(policy, batch):
    """(state, batch) -> state and metrics after an update by AdamW."""

    def updated(state, batch=batch, freeze_vision=False):
        return train_step(
            state,
            batch,
            policy.config,
            ADAMW,
            Objective(None, clip_low=0.2, clip_high=0.28, beta=0.0),
            ForwardOptions(jnp.float32),
            microbatch_size=8,
            freeze_vision=freeze_vision,
            skip_nonfinite=True,
        )[:2]

    return jax.jit(updated, static_argnames="freeze_vision")


def test_an_update_that_is_not_finite_leaves_the_state_bit_for_bit(params, batch, updated):
    """After a finite update, so that the moments are not zero."""
    state, metrics = updated(init_state(params, ADAMW))
    assert state.step == 1 and not metrics[BROKEN_GRADIENTS].any()
    broken = batch.replace(old_logp=batch.old_logp * jnp.nan)
    skipped, metrics = updated(state, broken)
    jax.tree.map(np.testing.assert_array_equal, skipped, state)
    assert not np.isfinite(metrics["grad_norm"])
    assert metrics[BROKEN_GRADIENTS].all()
    assert len(metrics[BROKEN_GRADIENTS]) == len(jax.tree.leaves(params))


def test_frozen_parameters_stay_and_have_no_state(params, updated, whole):
    state = init_state(params, ADAMW, freeze_vision=True)
    assert len(jax.tree.leaves(state.opt_state)) < 2 * len(jax.tree.leaves(params))
    after, metrics = updated(state, freeze_vision=True)
    jax.tree.map(np.testing.assert_array_equal, after.params["vision"], params["vision"])
    is_moved = jax.tree.map(lambda a, b: bool((a != b).any()), after.params["text"], params["text"])
    assert all(jax.tree.leaves(is_moved))
    assert 0 < metrics["grad_norm"] < whole[1]["grad_norm"]


def test_adapters_learn_and_leave_the_weights_alone(params, updated):
    adapted = lora.add(params, jax.random.key(1), rank=2, alpha=4.0)
    state = init_state(jax.device_put(adapted, jax.devices()[0]), ADAMW)
    after, _ = updated(state)
    jax.tree.map(np.testing.assert_array_equal, lora.without(after.params), params)
    layers = after.params["text"]["layers"]
    assert all(np.abs(layers["mlp"][name]["lora_b"]).max() > 0 for name in ("gate", "up", "down"))


def test_scorer_is_called_as_the_step_was(policy, batch, monkeypatch):
    seen = []

    def score_rows(params, rows, config, options, routes):
        seen.append(options)
        return *(params["w"] * jnp.zeros(rows.tokens.shape),) * 2, None

    monkeypatch.setattr(sys.modules[train_step.__module__], "score_rows", score_rows)
    attention = AttentionImpl("xla", query_block=64)
    options = ForwardOptions(jnp.bfloat16, remat="layer", attention=attention)
    state = init_state({"w": jnp.ones(())}, SGD)
    fixed = policy.config, SGD, Objective(None, clip_low=0.2, clip_high=0.28, beta=0.1), options
    step = functools.partial(train_step, microbatch_size=2)
    jax.eval_shape(lambda state, batch: step(state, batch, *fixed), state, batch)
    assert set(seen) == {options}


@flax.struct.dataclass
class Numbers:
    """A batch of numbers; a row without a predictor holds nothing."""

    rows: Any
    x: jax.Array


def numbers(x, num_empty=0):
    is_used = jnp.arange(len(x)) < len(x) - num_empty
    predictor = jnp.where(is_used, 0, -1)[:, None]
    return Numbers(types.SimpleNamespace(predictor=predictor), x)


jax.tree_util.register_pytree_node(
    types.SimpleNamespace,
    lambda node: ((node.predictor,), None),
    lambda _, children: types.SimpleNamespace(predictor=children[0]),
)


def test_update_descends_the_summed_gradient_and_reports_its_norm():
    """Of Σ w·x / 6 over six rows cut in three, by rate 0.1; x counts from 0 to 11."""
    x = jnp.arange(12.0).reshape(6, 2)

    def loss_fn(params, batch):
        x = batch.x
        return (x @ params["w"]).sum() / 6, ({"mean": (x.sum(), jnp.float32(x.size))}, x)

    sgd = optax.sgd(0.1)
    state = init_state({"w": jnp.ones(2)}, sgd)
    state, metrics, rows = update(state, numbers(x), loss_fn, sgd, microbatch_size=2)
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_allclose(state.params["w"], [1 - 0.5, 1 - 0.6], rtol=1e-6)
    assert metrics["grad_norm"] == pytest.approx((5**2 + 6**2) ** 0.5)
    assert (metrics["loss"], metrics["mean"]) == (pytest.approx(11), pytest.approx(5.5))
    assert state.step == 1


@pytest.fixture(scope="module")
def regression():
    """Weights of two layers and an update of them by AdamW, on 16 rows of inputs in two parts."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": 0.1 * jax.random.normal(keys[0], (32, 64)),
        "out": 0.1 * jax.random.normal(keys[1], (64, 32)),
    }
    batch = numbers(jax.random.normal(keys[2], (16, 32)))

    def loss_fn(params, batch):
        error = jnp.tanh(batch.x @ params["in"]) @ params["out"] - jnp.flip(batch.x, 1)
        ratios = {"error": (jnp.abs(error).sum(), jnp.float32(512))}
        return jnp.square(error).mean() / 2, (ratios, None)

    def updated(state, **settings):
        return update(state, batch, loss_fn, ADAMW, microbatch_size=8, **settings)[:2]

    return params, jax.jit(updated, static_argnames="skip_nonfinite")


def test_a_finite_update_is_the_same_with_skipping_as_without(regression):
    params, updated = regression
    after, metrics = updated(init_state(params, ADAMW))
    same, of_same = updated(init_state(params, ADAMW), skip_nonfinite=True)
    assert not of_same.pop(BROKEN_GRADIENTS).any()
    jax.tree.map(np.testing.assert_array_equal, (same, of_same), (after, metrics))


def test_state_in_bfloat16_keeps_its_type_and_nearly_its_step(regression):
    params, updated = regression
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = init_state(narrow, ADAMW, moments_dtype=jnp.bfloat16)
    after, _ = updated(state)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    exact, _ = updated(init_state(jax.tree.map(jnp.float32, narrow), ADAMW))
    # A step of 1e-3 is below half the distance between bfloat16 neighbours of most weights, so
    # only stochastic rounding lets the weights move, on average as far as in float32.
    ours, theirs = (
        np.concatenate([(s.params[name] - narrow[name].astype(float)).ravel() for name in narrow])
        for s in (after, exact)
    )
    np.testing.assert_allclose((ours * theirs).sum() / (theirs**2).sum(), 1.0, atol=0.05)


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_computed_in_bfloat16_are_summed_in_float32(param_dtype):
    """Over 64 equal microbatches of 256 tokens, against sums in float64.

    The loss is Σ c·y, with y from an embedding, a norm, and a linear layer of the same tokens, so
    that only the sums round. Of equal microbatches, roundings to bfloat16 would not cancel.
    """
    rng = np.random.default_rng(0)
    x, c = np.tile(rng.uniform(0.5, 1.5, (2, 1, 256, 8)).astype(jnp.bfloat16), (64, 1, 1))
    ids = np.tile(rng.integers(0, 4, 256), (64, 1))
    names = {"table": (4, 8), "scale": (8,), "kernel": (8, 8), "bias": (8,)}
    params = {name: jnp.ones(shape, param_dtype) for name, shape in names.items()}

    def loss_fn(params, batch):
        x, c, ids = batch.x
        embedded = params["table"][ids].astype(x.dtype)
        y = embedded, layers.rms_norm(params, x, 1e-6), layers.linear(params, x, (None, None))
        return sum((c * y).sum(dtype=jnp.float32) for y in y), ({}, None)

    keep = optax.GradientTransformation(lambda p: p, lambda grads, *_: (grads, grads))
    state = init_state(params, keep)
    batch = dataclasses.replace(numbers(x), x=tuple(map(jnp.asarray, (x, c, ids))))
    after, *_ = update(state, batch, loss_fn, keep, microbatch_size=1)

    x, c = (a.astype(np.float64).reshape(-1, 8) for a in (x, c))
    exact = {
        "table": np.eye(4)[ids.ravel()].T @ c,
        "scale": (c * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)).sum(0),
        "kernel": x.T @ c,
        "bias": c.sum(0),
    }
    for name, gradient in exact.items():
        np.testing.assert_allclose(after.opt_state[name], gradient, rtol=1e-5, err_msg=name)


def large_update() -> float:
    """Temporaries of an update of bfloat16 kernels, as a multiple of the kernels in float32."""
    D, num_layers = 1024, 16
    chip = jax.sharding.SingleDeviceSharding(find_topology("h100:1").devices[0])

    def loss_fn(params, batch):
        def layer(x, p):
            return jnp.tanh(layers.linear(p, x, (None, None))), None

        return jax.lax.scan(layer, batch.x, params)[0].sum(dtype=jnp.float32), ({}, None)

    def updated(state, batch):
        return update(state, batch, loss_fn, ADAMW, microbatch_size=1)[0]

    def state():
        params = {"kernel": jnp.zeros((num_layers, D, D), jnp.bfloat16)}
        return init_state(params, ADAMW, moments_dtype=jnp.bfloat16)

    batch = jax.eval_shape(lambda: numbers(jnp.zeros((4, 8, D), jnp.bfloat16)))
    jitted = jax.jit(updated, donate_argnums=0, in_shardings=chip, out_shardings=chip)
    traced = jitted.trace(jax.eval_shape(state), batch)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (4 * num_layers * D * D)


@pytest.mark.exhaustive
def test_kernels_in_bfloat16_are_not_copied_to_float32():
    """On GPUs there is room for a microbatch's gradient and the sum; a copy would be as large."""
    folders = [path for path in sys.path if "tests" in path]
    code = f"import sys; sys.path[:0] = {folders}; import train_step_test as test; "
    printed = output_with("cuda", "-c", code + "print(test.large_update())")
    assert float(printed.split()[-1]) < 2.2


def test_moments_on_the_host_give_the_same_update(regression):
    params, updated = regression
    state = init_state(jax.device_put(params, jax.devices()[0]), ADAMW)
    expected = updated(state)
    moments = jax.device_put(state.opt_state, sharding.on_host(sharding.of(state.opt_state)))
    assert jax.tree.leaves(moments)[1].sharding.memory_kind == "pinned_host"
    got = updated(state.replace(opt_state=moments))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_the_tensors_whose_gradient_is_not_finite_are_told():
    """The root of 0 has none."""

    def loss_fn(params, batch):
        return (batch.x * (params["a"] + jnp.sqrt(params["b"]) + params["c"])).sum(), ({}, None)

    state = init_state({"a": jnp.ones(()), "b": jnp.zeros(()), "c": jnp.ones(())}, SGD)
    settings = dict(microbatch_size=2, skip_nonfinite=True)
    after, metrics, _ = update(state, numbers(jnp.ones(4)), loss_fn, SGD, **settings)
    assert metrics["loss"] == 8 and metrics[BROKEN_GRADIENTS].tolist() == [False, True, False]
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_microbatches_that_hold_nothing_are_not_computed():
    """Microbatches of four rows take every second row: the third and the last hold nothing."""
    seen = []

    def note(batch):
        jax.debug.callback(lambda x: seen.append(x.tolist()), batch.x)
        return 2 * batch.x

    is_used = jnp.array([1, 0, 1, 0, 1, 0, 0, 0], bool)
    batch = numbers(jnp.arange(8.0))
    batch.rows.predictor = jnp.where(is_used, 0, -1)[:, None]
    doubled = jax.jit(functools.partial(map_microbatches, note, microbatch_size=4))(batch=batch)
    jax.effects_barrier()
    assert seen == [[0, 2, 4, 6]]
    np.testing.assert_array_equal(doubled, [0, 0, 4, 0, 8, 0, 12, 0])


def test_results_of_microbatches_come_back_in_order():
    batch = numbers(jnp.arange(24.0).reshape(12, 2))
    assert split_batch(batch, 3).x.shape == (4, 3, 2)
    same = map_microbatches(lambda batch: batch.x, batch, 3)
    np.testing.assert_array_equal(same, batch.x)


def test_microbatch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="microbatch size 5 must divide the batch of 12"):
        split_batch(jnp.arange(12), 5)
