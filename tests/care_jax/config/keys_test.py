"""Every number of a configuration has a range, and what lies outside stops the run at once."""

import jax
import pytest

from care_jax.config.checks import check_config, fill_in
from care_jax.config.keys import check_ranges, lies_in, numbers, range_of
from care_jax.devices.sharding import make_mesh
from configs import common, mixture, qwen3vl_4b, qwen3vl_8b, qwen25vl_3b, qwen25vl_7b, tiny

CONFIGS = common, tiny, qwen25vl_3b, qwen25vl_7b, qwen3vl_4b, qwen3vl_8b


def test_every_number_has_a_range_that_its_default_lies_in():
    for module in CONFIGS:
        check_ranges(module.get_config())
    check_ranges(mixture.get_config())
    keys = [key for key, _ in numbers(common.get_config())]
    assert len(keys) > 90 and not [key for key in keys if range_of(key) is None]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rl.temperature", value) for value in (float("nan"), -1.0, float("inf"))),
        *(("rl.top_p", value) for value in (0.0, 1.01, float("nan"))),
        ("rl.learning_rate", -1.0),
        ("rl.learning_rate", 1e6),
        ("sft.max_grad_norm", 0.0),
        ("care.delta", float("nan")),
        ("care.gamma_pos", 1.5),
        ("verifier.timeout", float("nan")),
        ("data.num_workers", 0),
        ("data.teacher_error", 1.5),
        ("gspo.clip_low", 1.2),
        ("gspo.clip_low", 0.0),
        ("rloo.clip_high", 0.0),
        ("grpo.beta", -0.1),
        ("grpo.ddof", 2),
        ("dapo.max_tries", 0),
        ("dapo.overlong_share", 1.0),
        ("care.gamma_share", 1.0),
        ("care.max_context", 0),
        ("evaluate.num_samples", 0),
        ("evaluate.decode_rows", 0),
        ("evaluate.judge_retries", -1),
        ("verifier.success", 0.0),
        ("report.max_megabytes", 0.5),
        ("model.lora_rank", -1),
        ("seed", -1),
        ("keep_best", -1),
        ("log_every", 0),
        ("sft.num_steps", 0),
        ("rl.num_steps", 0),
        ("rl.eval_every", -1),
        ("rl.num_rollouts", 1),
    ],
)
def test_a_value_outside_stops_the_run_before_anything_is_done(key, value):
    """Whatever the stages are: a number that means nothing is a mistake."""
    config = tiny.get_config()
    config.stages = ("evaluate",)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    check_config(fill_in(config, mesh), mesh)
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=rf"{key} must ") as error:
        check_config(fill_in(config, mesh), mesh)
    assert str(value) in str(error.value) and "\n" not in str(error.value)


def test_bounds_belong_to_a_range_or_not():
    assert lies_in(0, "[0, 1)") and not lies_in(1, "[0, 1)")
    assert lies_in(1, "(0, 1]") and not lies_in(0, "(0, 1]")
    assert not lies_in(float("inf"), "[0, inf)") and not lies_in(float("nan"), "[-1, inf)")


def test_a_gradient_may_go_unclipped():
    config = tiny.get_config()
    config.rl.max_grad_norm = float("inf")
    check_ranges(config)


def test_the_parts_of_a_mixture_are_looked_at():
    config = tiny.get_config()
    part = common.source("synthetic", num_examples=4, weight=-1.0)
    config.data.train = common.source("mixture", parts=(part,))
    with pytest.raises(ValueError, match=r"data\.train\.parts\.0\.weight must lie in \[0, inf\)"):
        check_ranges(config)
