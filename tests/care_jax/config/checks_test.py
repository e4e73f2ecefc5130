"""Configurations that cannot run, or say what nobody reads, are refused in one line."""

import jax
import pytest

from care_jax.config.checks import check_config, fill_in
from care_jax.devices.sharding import make_mesh
from care_jax.method.objectives import OBJECTIVES
from care_jax.run.policy import check_policy
from configs import common, tiny

MMMU = (("mmmu", "releases/MMMU"),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmarks": MMMU, "judge_url": "http://x"}, "needs evaluate.judge_model"),
        ({"judge_url": "http://x", "judge_model": "m"}, "needs .* and evaluate.benchmarks"),
    ],
)
def test_an_evaluation_that_cannot_run_is_refused(changes, message):
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    config = common.get_config()
    config.stages = ("evaluate",)
    config.evaluate.benchmarks = MMMU
    check_config(config, mesh)
    config.evaluate.benchmarks = ()
    config.evaluate.update(changes)
    with pytest.raises(ValueError, match=message) as error:
        check_config(config, mesh)
    assert "\n" not in str(error.value)


def check_rl(objective, changes=(), overridden=()):
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    config = tiny.get_config()
    config.stages, config.rl.objective = ("rl",), objective
    config.update_from_flattened_dict(dict(changes))
    check_config(fill_in(config, mesh), mesh, overridden)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_takes_its_own_keys_and_no_others(objective):
    """Clip range and β belong to an objective: GSPO's range says nothing to DAPO."""
    for section in OBJECTIVES:
        for key in common.get_config()[section]:
            if section == objective:
                check_rl(objective, overridden=[f"{section}.{key}"])
                continue
            with pytest.raises(ValueError, match=f"config.{section}.{key} has no effect under"):
                check_rl(objective, overridden=[f"{section}.{key}"])


PUBLISHED = {  # clip range and β
    "care": (0.2, 0.28, 0.02),
    "grpo": (0.2, 0.2, 0.02),
    "dapo": (0.2, 0.28, 0.0),
    "gspo": (3e-4, 4e-4, 0.0),
    "dr_grpo": (0.2, 0.2, 0.0),
    "rloo": (0.2, 0.2, 0.0),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_by_its_name_alone_has_the_published_settings(objective):
    config = common.get_config()[objective]
    assert (config.clip_low, config.clip_high, config.beta) == PUBLISHED[objective]


@pytest.mark.parametrize(
    ("mode", "key"),
    [("no_cue", "care.cue"), ("resample", "care.max_context"), ("resample", "care.reflect_credit")],
)
def test_keys_that_a_reflection_mode_does_not_read_are_refused(mode, key):
    value = {"care.cue": "No.", "care.max_context": 9, "care.reflect_credit": "prompt_only"}[key]
    check_rl("care", {key: value}, overridden=[key])
    with pytest.raises(ValueError, match=rf"config\.{key} has no effect under care\.reflect_mode"):
        check_rl("care", {key: value, "care.reflect_mode": mode}, overridden=[key])


def test_a_reflected_context_that_leaves_no_room_is_refused(policy):
    """The cue counts by its tokens, so only the tokenizer can tell."""
    config = common.get_config()
    config.rl.max_response_tokens = config.care.max_context + 40
    with pytest.raises(ValueError, match=r"a cue of 68 tokens .* care\.max_context to 498 or"):
        check_policy(config, policy)
    config.care.reflect_mode = "no_cue"
    check_policy(config, policy)
    config.care.max_context = config.rl.max_response_tokens
    with pytest.raises(ValueError, match="a cue of 0 tokens"):
        check_policy(config, policy)
    config.care.reflect_mode = "resample"
    check_policy(config, policy)


def test_a_fixed_weight_beside_a_share_is_refused():
    check_rl("care", {"care.gamma_share": 0.2}, overridden=["care.gamma_share"])
    with pytest.raises(ValueError, match=r"gamma_pos has no effect with care\.gamma_share 0\.2"):
        check_rl(
            "care", {"care.gamma_share": 0.2, "care.gamma_pos": 0.1}, overridden=["care.gamma_pos"]
        )


@pytest.mark.parametrize("key", ["care.gamma_pos", "care.gamma_neg", "care.gamma_share"])
def test_rationale_weights_have_no_effect_under_uniform_weights(key):
    check_rl("care", {key: 0.5}, overridden=[key])
    check_rl("care", {"care.region_weights": False}, overridden=["care.region_weights"])
    with pytest.raises(ValueError, match=f"config.{key} has no effect without care.region_weights"):
        check_rl("care", {key: 0.5, "care.region_weights": False}, overridden=[key])


@pytest.mark.parametrize("steps", [(5, 3), (-1, 2), (0, 100)])
def test_steps_that_cannot_be_traced_are_refused(steps):
    check_rl("grpo", {"profile_steps": (3, 99), "rl.num_steps": 100})
    with pytest.raises(ValueError, match=r"must be the first and the last step to trace"):
        check_rl("grpo", {"profile_steps": steps, "rl.num_steps": 100})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 4}, "num_samples 4 needs evaluate.temperature above 0, .* or num_samples"),
        ({"top_p": 0.9}, "top_p 0.9 has no effect at evaluate.temperature 0; set .* to 1"),
    ],
)
def test_sampling_that_means_nothing_is_refused(changes, message):
    """Also where only a stage's inside is evaluated."""
    config = tiny.get_config()
    config.stages, config.rl.eval_every = ("rl",), 5
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    check_config(fill_in(config, mesh), mesh)
    config.evaluate.update({"temperature": 0.6, "top_p": 0.95, "num_samples": 8})
    check_config(fill_in(config, mesh), mesh)
    config.evaluate.update({"temperature": 0.0, "top_p": 1.0, "num_samples": 1} | changes)
    with pytest.raises(ValueError, match=message) as error:
        check_config(fill_in(config, mesh), mesh)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl.eval_every": 0}, "keep_best 1 needs evaluations inside a stage; set rl.eval_every"),
        ({"best_metric": "eval/acc"}, "best_metric must be one of acc, .*, fmt, got 'eval/acc'"),
        ({"best_metric": "pass@2"}, "best_metric must be one of acc, .* got 'pass@2'"),
        ({"best_metric": "mean/acc"}, "best_metric must be one of acc, .* got 'mean/acc'"),
        ({"data.test.source": ""}, "data.test.source"),
        ({"export.step": "101"}, "export.step 101 lies behind the last of rl.num_steps 100"),
        (
            {"export.step": "best", "rl.eval_every": 0, "keep_best": 0},
            "'best' needs rl.eval_every and keep_best above 0, got 0 and 0; set them",
        ),
    ],
)
def test_a_best_checkpoint_that_cannot_be_told_is_refused(changes, message):
    good = {"stages": ("rl", "export"), "rl.eval_every": 5, "keep_best": 1}
    for step in ("best", "100"):
        check_rl("care", good | {"export.step": step})
    check_rl("care", good)
    check_rl("care", good | {"evaluate.benchmarks": MMMU, "best_metric": "mmmu/acc"})
    sampled = {"evaluate.temperature": 1.0, "evaluate.num_samples": 3, "best_metric": "pass@2"}
    check_rl("care", good | sampled)
    with pytest.raises(ValueError, match=message) as error:
        check_rl("care", good | changes)
    assert "\n" not in str(error.value)


def test_a_finished_run_may_be_exported_with_its_own_configuration():
    """What only training reads is not asked of the stage `export` alone."""
    check_rl("care", {"stages": ("export",), "keep_best": 1, "export.step": "12"})


def reward(question, responses, example):
    return [{"acc": 1.0}] * len(responses)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": "no_such:f"}, "expected verifier.reward as module:function"),
    ],
)
def test_a_verifier_that_cannot_be_is_refused(changes, message):
    config = common.get_config()
    config.stages = ("export",)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    config.verifier.reward = f"{__name__}:reward"
    config.verifier.weights = (("acc", 0.5), ("short", -0.5))
    check_config(config, mesh)
    config.verifier.update(changes)
    with pytest.raises(ValueError, match=message) as error:
        check_config(config, mesh)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["weights", "success", "concurrency"])
def test_keys_of_a_reward_function_need_one(key):
    config = common.get_config()
    config.stages = ("export",)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    overridden = [f"verifier.{key}"]
    check_config(config, mesh, overridden, given=["reward"])
    with pytest.raises(
        ValueError, match=rf"config\.verifier\.{key} has no effect without a reward"
    ):
        check_config(config, mesh, overridden)
    config.verifier.reward = f"{__name__}:reward"
    check_config(config, mesh, overridden)
    with pytest.raises(ValueError, match=r"was given beside verifier\.reward .*; clear one"):
        check_config(config, mesh, given=["reward"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ("rl", "sft", "rl")}, r"stages must name 'rl' once, got .*; set rl\.num_steps"),
        ({"stages": ("sft", "sft")}, "stages must name 'sft' once"),
        (
            {"model.freeze_decoder": True, "model.freeze_vision": True},
            "model.freeze_decoder leaves nothing to train with model.freeze_vision True",
        ),
        (
            {"model.freeze_decoder": True, "model.lora_rank": 4},
            "and model.lora_rank 4, whose adapters are the decoder's; set freeze_decoder to False",
        ),
    ],
)
def test_a_run_that_would_train_wrongly_or_fail_late_is_refused(changes, message):
    check_rl("care")
    check_rl("care", {"stages": ("evaluate", "sft", "evaluate", "rl", "export", "evaluate")})
    with pytest.raises(ValueError, match=message) as error:
        check_rl("care", changes)
    assert "\n" not in str(error.value)
