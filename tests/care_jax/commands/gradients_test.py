"""The comparison of gradients: its statistics, its parts, and its program against autodiff."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from care_jax.batch import Groups, Scores
from care_jax.commands import gradients
from care_jax.learning.logprobs import score_rows
from care_jax.run.stage import forward_options

STEPS, SIZE = 40, 3000


def noisy(direction, noise, seed):
    """A tree per step: the direction and as much noise, of other lengths."""
    rng = np.random.default_rng(seed)
    steps = direction + noise * rng.normal(size=(STEPS, SIZE)) / SIZE**0.5
    return [{"a": jnp.asarray(x[:1000]), "b": jnp.asarray(x[1000:])} for x in steps]


@pytest.mark.parametrize("cosine", [1.0, 0.6, 0.0, -0.6])
def test_the_cosine_is_that_of_the_expectations_whatever_the_noise(cosine):
    """Each gradient has four times as much noise as signal; the plain cosine is a 17th."""
    rng = np.random.default_rng(1)
    one, other = np.linalg.qr(rng.normal(size=(SIZE, 2)))[0].T
    along = cosine * one + (1 - cosine**2) ** 0.5 * other
    found = gradients._measure("care", "", noisy(2 * along, 8.0, 2), noisy(one, 4.0, 3))
    assert found.cosine == pytest.approx(cosine, abs=0.15)
    assert abs(found.cosine - cosine) < 4 * found.error < 0.5
    assert found.norm == pytest.approx(68**0.5, rel=0.05)
    assert found.signal == pytest.approx(4 / 68, abs=0.02)
    assert found.gain == pytest.approx(cosine * 2 / 68**0.5, abs=0.05)


def test_the_gain_under_adam_is_that_along_the_signs():
    rng = np.random.default_rng(1)
    g = rng.normal(size=SIZE) / SIZE**0.5
    u = g * rng.uniform(0.1, 9, SIZE)  # another direction, of the same signs
    found = gradients._measure("care", "", noisy(u, 0.0, 2), noisy(g, 0.0, 3))
    assert found.adam_gain == pytest.approx(np.abs(g).sum(), rel=1e-3)
    assert found.gain == pytest.approx(u @ g / np.linalg.norm(u), rel=1e-3)
    assert found.signal == pytest.approx(1, rel=1e-3)


def test_what_is_lost_in_noise_has_no_cosine():
    g = noisy(np.eye(SIZE)[0], 0.0, 1)
    alternating = [jax.tree.map(lambda x, i=i: x * (-1) ** i, each) for i, each in enumerate(g)]
    found = gradients._measure("care", "", alternating, g)
    assert np.isnan(found.cosine) and found.signal == 0 and found.norm == pytest.approx(1)
    nothing = [jax.tree.map(jnp.zeros_like, each) for each in g]
    found = gradients._measure("care", "rescued groups", nothing, g)
    assert (found.norm, found.gain, found.adam_gain) == (0, 0, 0) and np.isnan(found.cosine)


def test_gains_are_relative_to_the_true_gradients_unless_that_is_noise():
    g = noisy(np.eye(SIZE)[0], 0.0, 1)
    true = gradients._measure("accuracy", "", g, g)._replace(gain=2.0, adam_gain=-1.0)
    first, other = gradients._in_units_of_the_first([true, true._replace(gain=3.0)])
    assert (first.gain, other.gain) == (1, 1.5) and np.isnan(
        [first.adam_gain, other.adam_gain]
    ).all()


@pytest.fixture
def sampled(opened):
    """A run whose steps are two updates of one question each, and three steps."""
    run = gradients._with(opened.run, {"rl.prompts_per_step": 2, "rl.prompts_per_update": 1})
    changes = {"rl.row_lengths": 1, "rl.microbatch_size": 1, "care.beta": 0.0, "seed": 1}
    run = gradients._with(run, changes)
    return run, [*gradients._sampled(run, opened.params, opened.examples, 3)]


def test_a_checkpoint_without_a_mixed_group_has_no_gradient(opened, monkeypatch):
    scores = Scores(**dict.fromkeys(field.name for field in dataclasses.fields(Scores)))
    scores = dataclasses.replace(scores, acc=np.eye(5)[-1:])  # the reflected row alone is right
    groups = Groups(rollouts=None, scores=scores)
    monkeypatch.setattr(gradients, "_sampled", lambda *_: [gradients.Step(groups, [])])
    run = gradients._with(opened.run, {"rl.prompts_per_step": 2, "rl.prompts_per_update": 2})
    with pytest.raises(ValueError, match=r"no group of 8 questions has both right .* --questions"):
        gradients.align(run, opened.params, opened.examples, 8)


@pytest.mark.exhaustive
def test_gradients_are_those_of_autodiff_and_their_parts_add_up(opened, sampled):
    run, steps = sampled
    params = opened.params
    gradient = gradients._compile_gradient(run, jax.tree.map(jnp.copy, params))
    credit_of = gradients._credit_of(run)
    step = next(step for step in steps if credit_of(step.groups).is_trained.any())
    credit = credit_of(step.groups)
    whole = gradient(step, credit)

    def objective(params):
        """The mean over the updates of Σ row_weight Σ a_t log π_t / Σ prompt_weight."""
        total = 0.0
        for number, (batch, plan) in enumerate(step.packed):
            part = jax.tree.map(lambda x, number=number: np.asarray(x)[[number]], credit)
            weight = gradients.at_tokens(part.token_advantage, plan)
            weight = weight * gradients.at_tokens(part.row_weight, plan)
            rows = jax.tree.map(jnp.asarray, batch.rows)
            logp, *_ = score_rows(params, rows, run.policy.config, forward_options(run))
            total += (weight * logp).sum() / max(part.prompt_weight.sum(), 1e-9)
        return total / len(step.packed)

    expected = jax.grad(objective)(params)
    scale = float(optax.tree.norm(expected))
    assert scale > 1e-3
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, whole, expected))) < 1e-4 * scale

    parts = gradients.parts_of(step.groups, run)
    counts = sum(mask.astype(int) for mask in parts.values())
    np.testing.assert_array_equal(counts[np.asarray(credit.is_trained)], 1)
    total = jax.tree.map(jnp.zeros_like, whole)
    for part in parts:
        kept = gradients._part_of(run, credit_of, part, step.groups)
        total = jax.tree.map(jnp.add, total, gradient(step, kept))
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, total, whole))) < 1e-4 * scale


@pytest.mark.exhaustive
def test_the_parts_are_told_by_role_and_span(opened, sampled):
    run, steps = sampled
    for step in steps:
        groups, parts = step.groups, gradients.parts_of(step.groups, run)
        is_answer = np.asarray(groups.scores.is_answer)
        assert not (parts["anchors: answers"] & ~is_answer).any()
        assert not (parts["negatives: rest"] & is_answer).any()
        for row, anchor in enumerate(groups.subgroup.anchor):
            has_anchor = groups.subgroup.has_update[row] & ~groups.subgroup.is_rescue[row]
            tokens = parts["anchors: answers"][row] | parts["anchors: rest"][row]
            expected = np.arange(tokens.shape[0]) == anchor
            np.testing.assert_array_equal(tokens.any(-1), expected & has_anchor)
            assert parts["rescued groups"][row].all() == groups.subgroup.is_rescue[row]
        repairs = parts["repairs: right"] | parts["repairs: wrong"]
        assert not repairs[:, :-1].any()
        np.testing.assert_array_equal(repairs[:, -1].any(-1), groups.has_reflection)


@pytest.mark.exhaustive
def test_an_answer_without_a_verdict_has_no_part(opened, sampled):
    """It is neither right nor wrong, as in training."""
    _, steps = sampled
    groups = steps[0].groups
    components = np.array([[{"acc": acc} for acc in row] for row in groups.scores.acc])
    row = int(groups.rollouts.is_valid[0, :-1].any(-1).argmax())
    components[0, row] = {}
    groups = dataclasses.replace(groups, components=components)
    rloo = gradients._with(opened.run, {"rl.objective": "rloo"})
    for credit in (gradients._accuracy_credit(groups), gradients._credit_of(rloo)(groups)):
        assert np.abs(credit.advantage[0]).max() > 0.1
        assert np.abs(credit.advantage[0, row]) < 1e-6


@pytest.mark.exhaustive
def test_all_objectives_are_measured_on_the_same_rollouts(opened, tmp_path):
    run = gradients._with(opened.run, {"rl.prompts_per_step": 2, "rl.prompts_per_update": 2})
    run = gradients._with(run, {"rl.microbatch_size": 1})
    params = jax.tree.map(jnp.copy, opened.params)
    found = gradients.align(run, params, opened.examples, 6)
    whole = [each.objective for each in found if each.part == gradients.WHOLE]
    assert whole == [gradients.ACCURACY, *gradients.OBJECTIVES]
    parts = {each.part for each in found if each.objective == "care, uniform"}
    assert len(parts) == 8 and "repairs: wrong" in parts
    by_name = {each.objective: each for each in found if each.part == gradients.WHOLE}
    assert by_name["accuracy"].gain == by_name["accuracy"].adam_gain == 1
    assert by_name["accuracy"].cosine in (pytest.approx(1), pytest.approx(np.nan, nan_ok=True))
    assert by_name["dr_grpo"].norm > 0 and by_name["care"].norm != by_name["care, s 1"].norm
    gradients.write_csv(tmp_path / "g.csv", found, "sft 7")
    with (tmp_path / "g.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found) and rows[0]["checkpoint"] == "sft 7"
    assert len(gradients.table(found, "sft 7")) == len(found) + 2


@pytest.mark.parametrize(
    ("changes", "number", "message"),
    [
        ({}, 100, r"--questions must be three or more times rl\.prompts_per_step 64, got 100"),
        ({}, 128, "three or more times"),
        ({"rl.top_p": 0.9}, 192, r"rl\.temperature and rl\.top_p must be 1, got 1\.0 and 0\.9"),
    ],
)
def test_what_cannot_be_compared_is_refused(opened, changes, number, message):
    run = dataclasses.replace(opened.run, config=gradients._with(opened.run, changes).config)
    with pytest.raises(ValueError, match=message):
        gradients.align(run, opened.params, opened.examples, number)
