"""Every key has a row, and a value that its row refuses stops the run before anything is done."""

import pathlib
import re
import runpy

import jax
import pytest

from care_jax.config import keys
from care_jax.config.checks import check_config, fill_in
from care_jax.config.keys import KEYS, check_keys, interval, leaves, row_of
from care_jax.devices import sharding
from care_jax.devices.sharding import make_mesh
from configs import common, mixture, qwen3vl_4b, qwen3vl_8b, qwen25vl_3b, qwen25vl_7b, tiny

CONFIGS = common, mixture, tiny, qwen25vl_3b, qwen25vl_7b, qwen3vl_4b, qwen3vl_8b
ROOT = pathlib.Path(__file__).resolve().parents[3]


def every_key():
    """Those of the backbone stand in configs/tiny.py."""
    return [key for config in (common, tiny) for key, _ in leaves(config.get_config())]


def test_every_key_has_a_row_and_every_row_a_key():
    assert not [key for key in every_key() if not row_of(key)]
    assert KEYS.keys() == {row_of(key) for key in every_key()}


def test_defaults_pass_their_own_checks():
    for module in CONFIGS:
        check_keys(module.get_config())


def test_every_number_has_an_interval_and_every_tuple_a_form():
    """A row that refuses nothing is for texts and for True and False alone."""
    for key, value in leaves(common.get_config()):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        assert isinstance(KEYS[row_of(key)][0], str) == is_number, key
        assert not isinstance(value, tuple) or KEYS[row_of(key)][0] is not keys._ANY, key


# (key, value, what the message says of it). One row for each condition of a check, whatever key.
REFUSED = (
    ("rl.temperature", float("nan"), "lie in (0, 100]"),
    ("rl.temperature", -1.0, "lie in (0, 100]"),
    ("rl.temperature", float("inf"), "lie in (0, 100]"),
    ("rl.top_p", 0.0, "lie in (0, 1]"),
    ("rl.top_p", 1.01, "lie in (0, 1]"),
    ("care.gamma_share", 1.0, "lie in [0, 1)"),
    ("rl.microbatch_size", False, "lie in [0, inf)"),
    ("report.max_megabytes", 0.5, "lie in [1, inf)"),
    ("rl.num_rollouts", 1, "lie in [2, inf)"),
    ("state_check.max_loss_factor", 0.5, "lie in [1, inf]"),
    pytest.param("care.K", 10**400, "-2147483647 to 2147483647, got a number of 1329", id="huge"),
    ("model.backbone.text_config.rms_norm_eps", float("inf"), "be finite, got inf"),
    ("rl.objective", "ppo", "be one of care, grpo, dapo, gspo, dr_grpo, rloo, got 'ppo'"),
    ("stages", (), "name at least one of sft, rl, evaluate, export, as in"),
    ("stages", ("rl", 5), "name at least one of sft, rl, evaluate, export, as in"),
    ("data.buckets", (), "have the form of ((512, 2048), (1024, 4096)), got ()"),
    ("data.buckets", (48, 64), "have the form of"),
    ("data.buckets", ((48,),), "have the form of"),
    ("data.buckets", (("a", 2),), "have the form of"),
    ("data.buckets", ((0, 64),), "have the form of"),
    ("sharding_rules", (("batch",),), "have the form of (('batch', ('data', 'fsdp')),)"),
    ("decode_sharding_rules", (("batch", 3),), "have the form of"),
    ("data.train.parts", ("jsonl",), "have the form of"),
    ("model.offload", (None,), "have the form of ('reference', 'optimizer', 'rollouts')"),
    ("profile_steps", (3,), "have the form of (3, 5), or be ()"),
    ("evaluate.judge_prices", ("free",), "have the form of (0.15, 0.6)"),
    ("evaluate.benchmarks", ("mmmu",), "be pairs (name, path), as in (('mmmu', "),
    ("evaluate.benchmarks", (("chartqa", "x"),), "each name once and one of mathvista, "),
    ("evaluate.benchmarks", (("mmmu", "x"),) * 2, "each name once and one of mathvista, "),
    ("verifier.weights", (), "be pairs of a component and its weight, each component once"),
    ("verifier.weights", (("acc", "1"),), "be pairs of a component and its weight"),
    ("verifier.weights", (("acc", float("nan")),), "be pairs of a component and its weight"),
    ("verifier.weights", (("acc", 1.0), ("acc", 2.0)), "each component once, as in (('acc', "),
    ("verifier.weights", (("acc", 1.0), ("fmt", 0.1)), "without fmt, whose weight is rl.form"),
    ("data.think_tag", "answer", "be one word of letters, digits and _, other than 'answer'"),
    ("data.think_tag", "<think>", "be one word of letters"),
    ("export.step", "-1", "be 'last', 'best' or the number of a saved step, got '-1'"),
)


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_a_value_is_refused_with_what_it_must_be_whatever_the_stages_are(key, value, message):
    config = tiny.get_config()
    config.stages = ("evaluate",)
    config.update_from_flattened_dict({key: value})
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with pytest.raises(ValueError) as error:
        check_config(fill_in(config, mesh), mesh)
    told = str(error.value)
    assert told.startswith(f"{key} must ") and message in told and "\n" not in told
    assert "got " in told and told.endswith(f"; set --config.{key}")


@pytest.mark.parametrize("key", ["care.cue", "data.test", "export.step", "rl.num_steps"])
def test_none_is_no_value(key):
    """A configuration file may set any key to it."""
    config = tiny.get_config()
    config.update_from_flattened_dict({"model.backbone.text_config.rope_scaling": None})
    check_keys(config)  # a release has null there
    section, _, name = key.rpartition(".")
    (config[section] if section else config).__setattr__(name, None)
    advice = "; write '' or False for none" if key in ("care.cue", "data.test") else ""
    with pytest.raises(ValueError, match=f"^{key} must have a value, got None{advice}$"):
        check_keys(config)


def test_bounds_belong_to_an_interval_or_not():
    def lies_in(value, text):
        return interval(text).holds(value)

    assert lies_in(0, "[0, 1)") and not lies_in(1, "[0, 1)")
    assert lies_in(1, "(0, 1]") and not lies_in(0, "(0, 1]")
    assert not lies_in(float("inf"), "[0, inf)") and not lies_in(float("nan"), "[-1, inf)")


def test_a_bound_may_be_infinite():
    config = tiny.get_config()
    config.rl.max_grad_norm = config.state_check.max_loss_factor = float("inf")
    check_keys(config)


def test_the_parts_of_a_mixture_are_looked_at():
    config = tiny.get_config()
    part = common.source("synthetic", num_examples=4, weight=-1.0)
    config.data.train = common.source("mixture", parts=(part,))
    with pytest.raises(ValueError, match=r"data\.train\.parts\.0\.weight must lie in \[0, inf\)"):
        check_keys(config)


def test_a_batch_without_a_rule_is_one_shard():
    config = tiny.get_config()
    config.sharding_rules = ()
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    assert fill_in(config, mesh).sft.microbatch_size == config.sft.microbatch_size
    config.sft.microbatch_size = 0
    assert fill_in(config, mesh).sft.microbatch_size == 1


@pytest.mark.parametrize(("platform", "num_rows"), [("gpu", 2), ("tpu", 8)])
def test_rows_in_flight_follow_the_platform(monkeypatch, platform, num_rows):
    config = tiny.get_config()
    config.rl.decode_rows = 0
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr(sharding, "platform", lambda _: platform)
    assert fill_in(config, mesh).rl.decode_rows == num_rows
    config.rl.decode_rows = 3
    assert fill_in(config, mesh).rl.decode_rows == 3


def changes_in(text):
    """(pattern of a key, what is said of it) of the rows of a Markdown table."""
    for row in text.splitlines():
        if row.startswith("| `"):
            patterns, change = row.strip("| ").split(" | ")
            yield from ((pattern, change) for pattern in re.findall("`([^`]+)`", patterns))


def test_the_command_prints_every_key_that_may_change_on_resume_and_no_other(capsys):
    """`python -m care_jax.config.keys`."""
    runpy.run_path(keys.__file__, run_name="__main__")
    printed = sorted(changes_in(capsys.readouterr().out))
    assert printed == sorted((pattern, change) for pattern, (_, change) in KEYS.items() if change)
    assert "*.learning_rate" not in dict(printed) and dict(printed)["*.num_steps"] == keys.STEPS


def test_the_documentation_agrees_with_the_rows_on_what_may_change():
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.partition("## What may I change on resume?")[2].partition("\n## ")[0]
    assert "python -m care_jax.config.keys" in section
    changes = {"free": "freely", "at least": keys.STEPS, "the folder": keys.MOVED}
    described = dict(changes_in(section))
    assert len(described) > 30
    for pattern, said in described.items():
        change = keys.change_of(pattern)
        if said == "fixed":
            assert change == keys.FIXED, pattern
        else:
            (expected,) = (changes[first] for first in changes if said.startswith(first))
            assert change.startswith(expected), pattern
