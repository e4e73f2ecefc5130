"""Tuples and integers of a configuration: each key's form, and one line where it is another."""

import jax
import pytest

from care_jax.config.checks import fill_in
from care_jax.config.forms import FORMS, check_forms
from care_jax.devices.sharding import make_mesh
from configs import common, tiny

OWN_CHECKS = {"profile_steps", "verifier.weights"}  # in config.checks


def tuples_of(config, prefix=""):
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from tuples_of(value, f"{prefix}{key}.")
        elif isinstance(value, tuple):
            yield f"{prefix}{key}"


def test_every_tuple_has_a_form_and_its_default_has_it():
    assert set(tuples_of(common.get_config())) == FORMS.keys() | OWN_CHECKS
    for make in (common.get_config, tiny.get_config):
        check_forms(make())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stages", ("rl", 5), r"stages must have the form of \('sft', .*\), got \('rl', 5\); set"),
        ("data.buckets", (), r"data.buckets must have the form of .*, got \(\); set --config"),
        ("data.buckets", (48, 64), r"data.buckets must have the form"),
        ("data.buckets", ((48,),), r"data.buckets must have the form"),
        ("data.buckets", ((0, 64),), r"data.buckets must have the form"),
        ("sharding_rules", (("batch",),), "sharding_rules must have the form"),
        ("decode_sharding_rules", (("batch", 3),), "decode_sharding_rules must have the form"),
        ("data.train.parts", ("jsonl",), "data.train.parts must have the form"),
        ("model.offload", (None,), "model.offload must have the form"),
        ("evaluate.benchmarks", ("mmmu",), "evaluate.benchmarks must have the form"),
        ("evaluate.judge_prices", ("free",), "evaluate.judge_prices must have the form"),
        pytest.param("care.K", 10**400, "within ±2147483647, got a number of 1329", id="huge"),
        ("model.backbone.text_config.rms_norm_eps", float("inf"), "rms_norm_eps must be finite"),
        ("rl.microbatch_size", False, "rl.microbatch_size must be a number, got False"),
    ],
)
def test_a_value_of_another_form_is_refused_before_it_is_used(key, value, message):
    config = tiny.get_config()
    config.update_from_flattened_dict({key: value})
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=message) as refused:
        fill_in(config, mesh)
    assert "\n" not in str(refused.value)


def test_a_batch_without_a_rule_is_one_shard():
    config = tiny.get_config()
    config.sharding_rules = ()
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    assert fill_in(config, mesh).sft.microbatch_size == config.sft.microbatch_size
    config.sft.microbatch_size = 0
    assert fill_in(config, mesh).sft.microbatch_size == 1
