"""The update is the same however trees are packed, rows cut into microbatches, and devices used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from updates import ACC, BASELINES, LAYOUTS, SGD, assert_same_update, credited_by

from care_jax.batch import Scores
from care_jax.decoding import reflection
from care_jax.devices import sharding
from care_jax.learning.train_step import init_state, state_shardings
from care_jax.method import credit
from configs import common
from models import backbone


@pytest.fixture(scope="module")
def in_layout(step, params):
    """Makes the update, laid out by name, in up to six microbatches of two rows."""

    def in_layout(update_of, name, **settings):
        return step(init_state(params, SGD), update_of.batch(LAYOUTS[name]), 2, **settings)

    return in_layout


def test_microbatches_change_nothing(in_layout, params, update_of, whole):
    """Of the rows of `whole`: a used row and an empty one in each of four, two without any."""
    assert_same_update(params, in_layout(update_of, "a row per prompt"), whole)


@pytest.mark.parametrize("name", ["packed", "one long row", "trees in parts", "replicated"])
def test_packing_changes_nothing(in_layout, params, update_of, whole, name):
    assert_same_update(params, in_layout(update_of, name), whole)


@pytest.mark.parametrize("name", BASELINES)
def test_packing_and_microbatches_change_nothing_under_any_baseline(
    in_layout, params, update_of, scored, name
):
    """Responses of 1 to 9 tokens lie unevenly in rows and microbatches."""
    # The reference is the policy itself, so that the gradient is the objective's alone.
    credited = credited_by(name, update_of).replace(ref_logp=scored[0])
    sequence = name == "gspo"
    replicated = in_layout(credited, "replicated", sequence=sequence)
    assert replicated[1]["grad_norm"] > 1e-3
    for layout in ("packed", "trees in parts"):
        packed = in_layout(credited, layout, sequence=sequence)
        assert_same_update(params, packed, replicated)


CARE = dict(K=1, s=0.5, s_refl=0.25, delta=0.1, eps=1e-6)
CARE |= dict(equalize=True, rescue=True, rescue_scale=1.0, robust=False, region_weights=True)
CARE |= dict(gamma_pos=0.005, gamma_neg=0.0, gamma_share=0.0, eps_w=1e-6, mean="prompt")
CARE |= dict(kl_rows="subgroup", success="acc", reflect_replaces="success")
CARE = credit.CareSettings(**CARE)


ALL_ROWS = {"mean": "tokens", "kl_rows": "all"}


@pytest.mark.parametrize(
    ("reflect_credit", "changes"),
    [("as_sampled", {}), ("prompt_only", {}), ("as_sampled", ALL_ROWS)],
)
def test_packing_changes_nothing_under_care_with_reflected_rows(
    policy, in_layout, params, log_probabilities, update_of, reflect_credit, changes
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
    select = dict(K=1, M=1, rule="nearest", anchor_rule="shortest", success="acc")
    subgroup = credit.select_subgroups(*group, jax.random.split(jax.random.key(0), 4), **select)
    has_reflection = np.asarray(subgroup.has_update & ~subgroup.is_rescue)
    assert has_reflection.tolist() == [True, True, False, False]
    if reflect_credit == "prompt_only":
        slot = reflection.without_context(*slot, [5], policy.config.pad_token_id)
    responses, scores = jax.tree.map(lambda *x: np.concatenate(x, 1), group, slot)
    settings = dataclasses.replace(CARE, **changes)
    credited = credit.care_credit(responses, scores, subgroup, has_reflection, settings)
    assert (
        credited.is_trained[0, 2].sum() == (responses.is_valid & ~responses.is_forced)[0, 2].sum()
    )
    old_logp, _ = log_probabilities(responses)
    names = ("token_advantage", "row_weight", "is_trained")
    fields = {name: np.asarray(getattr(credited, name)) for name in names}
    fields |= {"is_answer": scores.is_answer, "old_logp": old_logp + 0.3}
    weight = np.asarray(credited.prompt_weight)
    made = dataclasses.replace(update_of, responses=responses).replace(weight, **fields)
    replicated = in_layout(made, "replicated")
    assert replicated[1]["grad_norm"] > 1e-3
    for layout in ("packed", "trees in parts"):
        packed = in_layout(made, layout)
        assert_same_update(params, packed, replicated)


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


def test_eight_devices_give_the_update_of_one(policy, step, params, batch, whole):
    result = on_eight_devices(policy, params, step, batch, common.get_config().sharding_rules)
    assert_same_update(params, result, whole)


TENSOR_PARALLEL = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["qwen3_vl"], indirect=True)
def test_layouts_and_devices_change_nothing_for_qwen3_vl_either(
    policy, step, in_layout, params, update_of, batch
):
    """DeepStack reaches the prompt's image tokens alone, however rows are laid out or sharded."""
    replicated = in_layout(update_of, "replicated")
    moved = jax.tree.map(lambda old, new: jnp.abs(old - new).max(), params, replicated[0].params)
    assert moved["vision"]["deepstack"]["up"]["kernel"] > 1e-6
    assert_same_update(params, in_layout(update_of, "trees in parts"), replicated)
    sharded = on_eight_devices(policy, params, step, batch, TENSOR_PARALLEL)
    assert_same_update(params, sharded, replicated)
