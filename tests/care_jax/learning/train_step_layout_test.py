"""The update is the same however trees are packed, rows cut into microbatches, and devices used."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import packed_plan, replicated_plan, split_plan
from updates import ACC, BASELINES, SGD, assert_same_update, credited_by, log_probabilities

from care_jax.batch import Scores
from care_jax.decoding import reflection
from care_jax.devices import sharding
from care_jax.learning.train_step import init_state, state_shardings
from care_jax.method import credit
from configs import common
from models import backbone


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gspo" else pytest.mark.exhaustive)
        for name in BASELINES
    ],
)
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
CARE |= dict(gamma_pos=0.005, gamma_neg=0.0, gamma_share=0.0, eps_w=1e-6)
CARE = credit.CareSettings(**CARE)


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
    credited = credit.care_credit(responses, scores, subgroup, has_reflection, CARE)
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


RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
)
SHIPPED = common.get_config().sharding_rules


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


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(RULES, id="tensor parallel", marks=pytest.mark.exhaustive),
        pytest.param(SHIPPED, id="FSDP alone"),
    ],
)
def test_eight_devices_give_the_update_of_one(policy, step, params, batch, whole, rules):
    result = on_eight_devices(policy, params, step, batch, rules)
    assert_same_update(params, result, whole)


@pytest.mark.exhaustive
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
