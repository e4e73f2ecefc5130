"""What the stages share: which section of the configuration each part of a run is made from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract import assert_same
from flax.traverse_util import flatten_dict
from scripted import make_step

from care_jax.devices import placement, sharding
from care_jax.devices.sharding import make_mesh
from care_jax.run.run import (
    Run,
    abstract_params,
    abstract_state,
    make_adamw,
    open_run,
    schedule_of,
    start_state,
)
from configs import tiny
from models import layers, lora


@pytest.fixture
def run(policy, tmp_path):
    """On four devices: training shards its batch over all of them, decoding over two."""
    mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
    return Run(tiny.get_config(), policy, mesh, tmp_path)


@pytest.fixture
def start(run, params):
    """The state that RL starts from."""

    def start():
        where = sharding.of(lora.without(abstract_params(run)))
        adamw = make_adamw(run, "rl")
        return start_state(run, jax.device_put(params, where), adamw, "rl")

    return start


def test_stages_draw_different_adapters(make_run, params):
    """RL's would otherwise lie in the space that the cold start began with."""
    run = make_run({"model.lora_rank": 2})

    def adapters(stage):
        copied = jax.tree.map(jnp.copy, params)
        placed = jax.device_put(copied, sharding.of(lora.without(abstract_params(run))))
        return lora.only(start_state(run, placed, make_adamw(run, stage), stage).params)

    first, same, other = map(adapters, ("sft", "sft", "rl"))
    jax.tree.map(np.testing.assert_array_equal, first, same)
    both = zip(*(flatten_dict(tree).items() for tree in (first, other)), strict=True)
    for (path, one), (_, two) in both:
        assert bool((one != two).all()) == (path[-1] == "lora_a")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_rank": 2},
        {"freeze_vision": True, "moments_dtype": "bfloat16"},
        {"offload": ("optimizer",)},
    ],
)
def test_the_abstract_state_is_that_of_the_start(run, start, changes):
    run.config.model.update(changes)
    adamw = make_adamw(run, "rl")
    jax.tree.map(assert_same, abstract_state(run, adamw), start())


def test_adapters_of_the_start_are_new_and_alone_have_moments(run, start, params):
    run.config.model.update(lora_rank=2, lora_alpha=6.0)
    state = start()
    jax.tree.map(np.testing.assert_array_equal, lora.without(state.params), params)
    trained, _ = run.partition(state.params)
    num_arrays = len(jax.tree.leaves(trained))
    assert num_arrays == 2 * 7  # A and B of each linear layer
    num_moments = sum(x.ndim > 0 for x in jax.tree.leaves(state.opt_state))
    assert num_moments == 2 * num_arrays
    up = state.params["text"]["layers"]["mlp"]["up"]
    assert np.all(up["lora_scale"] == 6.0 / 2) and not np.any(up["lora_b"])
    run.config.seed = 1
    other = start().params["text"]["layers"]["mlp"]["up"]
    assert not np.array_equal(up["lora_a"], other["lora_a"])


def test_what_is_frozen_is_that_of_the_configuration(run, params):
    run.config.model.freeze_vision = True
    assert [list(part) for part in run.partition(params)] == [["text"], ["vision"]]
    run.config.model.freeze_vision = False
    assert [list(part) for part in run.partition(params)] == [["text", "vision"], []]


# By stage: updates in its 10 steps. An RL step of 64 prompts has four updates.
@pytest.mark.parametrize(("stage", "num_updates"), [("sft", 10), ("rl", 40)])
def test_the_schedule_of_a_stage_counts_its_updates(run, stage, num_updates):
    run.config.rl.update(prompts_per_step=64, prompts_per_update=16, learning_rate=3.0)
    run.config.sft.learning_rate = 2.0
    section = run.config[stage]
    section.update(num_steps=10, warmup_steps=4, schedule="cosine")
    learning_rate_at = schedule_of(run, stage)
    assert learning_rate_at(0) == section.learning_rate / 4
    assert learning_rate_at(4) == section.learning_rate
    assert learning_rate_at(num_updates - 1) > 0
    assert learning_rate_at(num_updates) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_decay_and_clipping_are_those_of_the_stage(run, stage):
    """A gradient clipped to Adam's ε = 1e-8 moves a weight by half the learning rate."""
    run.config[stage].update(learning_rate=0.1, warmup_steps=0, schedule="constant")
    run.config[stage].update(weight_decay=0.25, max_grad_norm=1e-8)
    adamw = make_adamw(run, stage)
    weight, gradient = jnp.float32(3), jnp.float32(50)
    update, _ = adamw.update(gradient, adamw.init(weight), weight)
    assert update == pytest.approx(-0.1 * (0.5 + 0.25 * 3), rel=1e-5)


def test_the_objective_is_that_of_its_own_section(run):
    run.config.rl.update(objective="dapo", max_response_tokens=40)
    run.config.dapo.update(clip_high=0.5, overlong_share=0.25, max_tries=3)
    run.config.grpo.clip_high = 0.9
    assert (run.objective.clip_high, run.objective.max_tries) == (0.5, 3)
    assert run.objective.overlong == {"max_tokens": 40, "cache_tokens": 10}


def test_training_and_decoding_shard_by_their_own_rules(run):
    def double(x):
        return layers.constrain(2 * x, "batch", None)

    x = np.ones((8, 3))
    to_decode = placement.placed(double, run.config.decode_sharding_rules, run.mesh)
    trained, decoded = jax.jit(run.placed(double))(x), jax.jit(to_decode)(x)
    assert trained.sharding.is_equivalent_to(run.train_batch_sharding, 2)
    assert decoded.sharding.is_equivalent_to(run.decode_batch_sharding, 2)
    places = run.train_batch_sharding, run.decode_batch_sharding
    assert [sharding.num_shards(place) for place in places] == [4, 2]


def test_a_checkpoint_fits_runs_of_its_backbone_and_rank_alone(run, policy):
    plain = run.fingerprint()
    assert policy.fingerprint().items() <= plain.items()
    run.config.rl.learning_rate = 1.0
    assert run.fingerprint() == plain
    run.config.model.lora_rank = 2
    assert run.fingerprint() != plain


@pytest.mark.usefixtures("one_device")
def test_a_step_to_export_is_looked_for_in_the_workdir(policy, tmp_path):
    config = tiny.get_config()
    config.stages, config.export.step, config.keep_checkpoints = ("rl", "export"), "7", 3
    with pytest.raises(ValueError, match=r"export\.step 7 must be a checkpoint of rl"):
        open_run(config, tmp_path, policy=policy)
    for name in ("7", "9.damaged"):
        make_step(tmp_path, "rl", name)
    assert open_run(config, tmp_path, policy=policy).config.export.step == "7"
