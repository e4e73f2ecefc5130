"""The update: equal however trees are packed into rows, and rows into microbatches and on devices.

Gradients are read off as the change that plain gradient descent makes: at a rate so large that the
parameters' own last bits do not matter.
"""

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
from packed import packed_plan, replicated_plan, split_plan, train_batch

from care_jax.batch import Rollouts, Scores
from care_jax.decoding import reflection
from care_jax.devices import sharding
from care_jax.learning import logprobs, optimizer
from care_jax.learning.train_step import (
    init_state,
    map_microbatches,
    split_batch,
    state_shardings,
    train_step,
    update,
)
from care_jax.method import credit
from care_jax.packing.layout import lay_out, take_back
from configs import common
from models import backbone, lora
from models.attention_mask import AttentionImpl

SGD = optax.sgd(1024.0)
RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
)


@dataclasses.dataclass(frozen=True)
class Update:
    """An update of four prompts before it is laid out: numbers of their rows [4, 3, 9]."""

    policy: Any
    tokenized: list
    responses: Rollouts
    fields: dict
    prompt_weight: np.ndarray

    def batch(self, make_plan=packed_plan, **settings):
        lengths = np.asarray(self.responses.is_valid).sum(-1)
        plan = make_plan(self.tokenized, lengths, **settings)
        tokens = self.responses.tokens
        return train_batch(
            self.policy, self.tokenized, plan, tokens, self.fields, self.prompt_weight
        )

    def replace(self, prompt_weight=None, **fields):
        weight = self.prompt_weight if prompt_weight is None else prompt_weight
        return dataclasses.replace(self, fields=self.fields | fields, prompt_weight=weight)


def log_probabilities(policy, params, tokenized, responses):
    """Of every response behind its own copy of its prompt, and the entropies, [4, 3, 9]."""
    plan = replicated_plan(tokenized, np.asarray(responses.is_valid).sum(-1))
    rows = lay_out(tokenized, np.asarray(responses.tokens), plan, policy.config)
    settings = dict(config=policy.config, dtype=jnp.float32, chunk=1000)
    scored = jax.jit(functools.partial(logprobs.score_rows, **settings))(params, rows)
    return [take_back(np.asarray(x), plan, responses.tokens.shape[-1]) for x in scored]


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def batch(update_of):
    """In eight rows, so that every microbatch size and mesh below divides them."""
    return update_of.batch(row_tokens=96, microbatch_size=8)


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
    return step(init_state(params, SGD), batch, 8)


def assert_same_update(params, result, expected, tolerance=1e-5):
    (state, metrics), (expected_state, expected_metrics) = result, expected
    gradients = [
        jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, s.params)
        for s in (state, expected_state)
    ]
    largest = max(np.abs(x).max() for x in jax.tree.leaves(gradients[1]))
    for grad, want in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(
            grad, want, atol=tolerance * max(np.abs(want).max(), largest * 1e-2)
        )
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_loss_and_metrics_are_the_formulas_with_hand_made_sums(
    policy, params, image_prompts, responses, update_of, whole
):
    logp, entropy = log_probabilities(policy, params, image_prompts, responses)
    b = types.SimpleNamespace(
        **{name: np.asarray(value, np.float64) for name, value in update_of.fields.items()}
    )
    logp, total, sums = logp.astype(np.float64), 0.0, defaultdict(list)
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
    """Half of the rows are empty; a microbatch of them is not computed."""
    result = step(init_state(params, SGD), batch, microbatch_size)
    assert_same_update(params, result, whole)


LAYOUTS = {
    "one long row": functools.partial(packed_plan, row_tokens=512, row_patches=1024),
    "trees in parts": split_plan,
    "replicated": replicated_plan,
}


@pytest.mark.parametrize("make_plan", LAYOUTS.values(), ids=LAYOUTS)
def test_packing_changes_nothing(step, params, update_of, whole, make_plan):
    result = step(init_state(params, SGD), update_of.batch(make_plan), 1)
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


def credited_by(name, update_of):
    """The update with the advantages and weights of a baseline."""
    ones = jnp.ones(ACC.shape)
    scores = Scores(ACC, ones, 0.9 * ACC + 0.1, None, None, ones, ones, ones)
    credited = BASELINES[name](update_of.responses, scores)
    names = ("token_advantage", "row_weight", "prompt_weight", "is_trained")
    return update_of.replace(**{name: np.asarray(getattr(credited, name)) for name in names})


@pytest.mark.parametrize("name", BASELINES)
def test_packing_and_microbatches_change_nothing_under_any_baseline(step, params, update_of, name):
    """Responses of 1 to 9 tokens lie unevenly in rows and microbatches."""
    credited = credited_by(name, update_of)
    settings = dict(beta=0.0, sequence=name == "gspo")
    replicated = step(init_state(params, SGD), credited.batch(replicated_plan), 1, **settings)
    assert replicated[1]["grad_norm"] > 1e-3
    for make_plan in (packed_plan, split_plan):
        packed = step(init_state(params, SGD), credited.batch(make_plan), 1, **settings)
        assert_same_update(params, packed, replicated)


CARE = dict(K=1, s=0.5, s_refl=0.25, delta=0.1, eps=1e-6)
CARE |= dict(equalize=True, rescue=True, rescue_scale=1.0, robust=False, region_weights=True)
CARE |= dict(gamma_pos=0.005, gamma_neg=0.0, eps_w=1e-6)


@pytest.mark.parametrize("reflect_credit", ["as_sampled", "prompt_only"])
def test_packing_changes_nothing_under_care_with_reflected_rows(
    policy, step, params, image_prompts, update_of, reflect_credit
):
    """The third rows are reflected: up to three of their tokens were forced, and stay or go."""
    responses, tokens = update_of.responses, np.arange(9)
    num_forced = np.where(np.arange(3) == 2, 3, 0)[:, None]
    responses = responses.replace(is_forced=responses.is_valid & (tokens < num_forced))
    ones, is_think = np.ones(ACC.shape, np.float32), responses.is_valid & (tokens < 2)
    is_answer = responses.is_valid & ~is_think
    count = np.ones(ACC.shape, np.int32)
    scores = Scores(ACC, ones, 0.9 * ACC + 0.1, is_think, is_answer, count, count, ones > 0)
    group, slot = (
        jax.tree.map(lambda x, part=part: np.asarray(x)[:, part], (responses, scores))
        for part in (slice(2), slice(2, 3))
    )
    select = dict(K=1, M=1, rule="nearest", anchor_rule="shortest")
    subgroup = credit.select_subgroups(*group, jax.random.split(jax.random.key(0), 4), **select)
    has_reflection = np.asarray(subgroup.has_update & ~subgroup.is_rescue)
    assert has_reflection.tolist() == [True, True, False, False]
    if reflect_credit == "prompt_only":
        slot = reflection.without_context(*slot, policy.config.pad_token_id)
    responses, scores = jax.tree.map(lambda *x: np.concatenate(x, 1), group, slot)
    credited = credit.care_credit(responses, scores, subgroup, has_reflection, **CARE)
    assert (
        credited.is_trained[0, 2].sum() == (responses.is_valid & ~responses.is_forced)[0, 2].sum()
    )
    old_logp, _ = log_probabilities(policy, params, image_prompts, responses)
    names = ("token_advantage", "row_weight", "is_trained")
    fields = {name: np.asarray(getattr(credited, name)) for name in names}
    fields |= {"is_answer": scores.is_answer, "old_logp": old_logp + 0.3}
    weight = np.asarray(credited.prompt_weight)
    made = dataclasses.replace(update_of, responses=responses).replace(weight, **fields)
    replicated = step(init_state(params, SGD), made.batch(replicated_plan), 1)
    assert replicated[1]["grad_norm"] > 1e-3
    for make_plan in (packed_plan, split_plan):
        packed = step(init_state(params, SGD), made.batch(make_plan), 1)
        assert_same_update(params, packed, replicated)


def test_sequence_ratio_is_a_responses_own(policy, step, params, image_prompts, update_of):
    """The loss of GSPO, summed by hand; rows have moved by up to several times the range."""
    credited = credited_by("gspo", update_of)
    responses = update_of.responses
    logp, _ = log_probabilities(policy, params, image_prompts, responses)
    delta = logp.astype(np.float64) - np.asarray(credited.fields["old_logp"])
    terms, num_tokens, num_clipped = [], [], []
    for prompt, row in np.ndindex(4, 3):
        mask = np.asarray(responses.is_valid[prompt, row])
        s = np.exp(delta[prompt, row][mask].mean())
        A = credited.fields["token_advantage"][prompt, row].sum()
        terms.append(min(s * A, np.clip(s, 0.8, 1.28) * A))
        num_tokens.append(mask.sum() * (A != 0))
        num_clipped.append(num_tokens[-1] * (s > 1.28 if A > 0 else s < 0.8))
    _, metrics = step(init_state(params, SGD), credited.batch(), 1, beta=0.0, sequence=True)
    np.testing.assert_allclose(metrics["policy_loss"], -np.mean(terms), rtol=1e-4)
    np.testing.assert_allclose(metrics["clip_rate"], sum(num_clipped) / sum(num_tokens), rtol=1e-5)
    assert 0 < sum(num_clipped) < sum(num_tokens)


def on_eight_devices(policy, params, step, batch, rules):
    """The update on a mesh of fsdp 4 x tensor 2."""
    mesh = sharding.make_mesh(1, 4, 2, devices=jax.devices()[:8])
    shardings = sharding.param_shardings(backbone.logical_axes(policy.config), params, rules, mesh)
    is_sharded = [not s.is_fully_replicated for s in jax.tree.leaves(shardings)]
    assert sum(is_sharded) > len(is_sharded) / 2
    state = init_state(jax.device_put(params, shardings), SGD)
    state = jax.device_put(state, state_shardings(state, mesh))
    place = sharding.batch_sharding(mesh, rules)
    return step(state, sharding.put_batch(jax.tree.map(np.asarray, batch), place), 8)


SHIPPED = common.get_config().sharding_rules


@pytest.mark.parametrize("rules", [RULES, SHIPPED], ids=["tensor parallel", "FSDP alone"])
def test_eight_devices_give_the_update_of_one(policy, step, params, batch, whole, rules):
    result = on_eight_devices(policy, params, step, batch, rules)
    assert_same_update(params, result, whole)


def test_rows_without_credit_do_not_move_the_loss(step, params, update_of, whole):
    fields, is_trained = update_of.fields, update_of.fields["is_trained"]
    changed = update_of.replace(
        old_logp=np.where(is_trained, fields["old_logp"], -50.0),
        ref_logp=np.where(is_trained, fields["ref_logp"], 0.0),
    )
    assert_same_update(params, step(init_state(params, SGD), changed.batch(), 1), whole)


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


def updated(policy, batch, state, adamw, partition=optimizer.partition):
    return jax.jit(
        functools.partial(
            train_step,
            config=policy.config,
            optimizer=adamw,
            microbatch_size=8,
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

    def score_rows(params, rows, config, **settings):
        seen.update(settings)
        return (params["w"] * jnp.zeros(rows.tokens.shape),) * 2

    monkeypatch.setattr(sys.modules[train_step.__module__], "score_rows", score_rows)
    attention = AttentionImpl("xla", query_block=64)
    settings = dict(chunk=7, dtype=jnp.bfloat16, remat="layer", attention=attention)
    state = init_state({"w": jnp.ones(())}, SGD)
    clip = dict(clip_low=0.2, clip_high=0.28)
    step = functools.partial(train_step, microbatch_size=2, beta=0.1, **clip, **settings)
    jax.eval_shape(lambda state, batch: step(state, batch, policy.config, SGD), state, batch)
    assert seen == settings


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
        return (x @ params["w"]).sum() / 6, {"mean": (x.sum(), jnp.float32(x.size))}

    sgd = optax.sgd(0.1)
    state = init_state({"w": jnp.ones(2)}, sgd)
    state, metrics = update(state, numbers(x), loss_fn, sgd, microbatch_size=2)
    np.testing.assert_allclose(state.params["w"], [1 - 0.5, 1 - 0.6], rtol=1e-6)
    assert metrics["grad_norm"] == pytest.approx((5**2 + 6**2) ** 0.5)
    assert (metrics["loss"], metrics["mean"]) == (pytest.approx(11), pytest.approx(5.5))
    assert state.step == 1


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


@pytest.mark.parametrize("policy", ["qwen3_vl"], indirect=True)
def test_layouts_and_devices_change_nothing_for_qwen3_vl_either(
    policy, step, params, update_of, batch, whole
):
    """DeepStack reaches the prompt's image tokens alone, however rows are laid out or sharded."""
    moved = jax.tree.map(lambda old, new: jnp.abs(old - new).max(), params, whole[0].params)
    assert moved["vision"]["deepstack"]["up"]["kernel"] > 1e-6
    for make_plan in (replicated_plan, split_plan):
        result = step(init_state(params, SGD), update_of.batch(make_plan), 1)
        assert_same_update(params, result, whole)
    sharded = on_eight_devices(policy, params, step, batch, RULES)
    assert_same_update(params, sharded, whole)
