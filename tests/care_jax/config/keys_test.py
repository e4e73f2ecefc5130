"""Every key has a row, and a value that its row refuses stops the run before anything is done."""

import pathlib
import re
import runpy

import jax
import pytest

from care_jax.config import keys
from care_jax.config.checks import check_config, fill_in
from care_jax.config.keys import KEYS, check_keys, interval, leaves, row_of
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


def refusal(changes):
    """What is said of a configuration whose stages are evaluated alone."""
    config = tiny.get_config()
    config.stages = ("evaluate",)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    check_config(fill_in(config, mesh), mesh)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=" must ") as error:
        check_config(fill_in(config, mesh), mesh)
    assert "\n" not in str(error.value)
    return str(error.value)


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
        ("data.train.tolerance", 5.0),
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
        ("rl.microbatch_size", False),
    ],
)
def test_a_number_outside_its_interval_is_refused_whatever_the_stages_are(key, value):
    message = refusal({key: value})
    assert message.startswith(f"{key} must lie in ") and f"got {value}; set --config" in message


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("stages", (), "name at least one of sft, rl, evaluate, export, as in"),
        ("stages", ("rl", 5), "name at least one of sft, rl, evaluate, export, as in"),
        ("data.buckets", (), "have the form of ((512, 2048), (1024, 4096)), got ()"),
        ("data.buckets", (48, 64), "have the form of"),
        ("data.buckets", ((48,),), "have the form of"),
        ("data.buckets", ((48, 64, 2),), "have the form of"),
        ("data.buckets", (("a", 2),), "have the form of"),
        ("data.buckets", ((0, 64),), "have the form of"),
        ("sharding_rules", (("batch",),), "have the form of (('batch', ('data', 'fsdp')),)"),
        ("decode_sharding_rules", (("batch", 3),), "have the form of"),
        ("data.train.parts", ("jsonl",), "have the form of"),
        ("model.offload", (None,), "have the form of ('reference', 'optimizer')"),
        ("profile_steps", (3,), "have the form of (3, 5), or be ()"),
        ("profile_steps", (1.5, 2), "have the form of (3, 5), or be ()"),
        ("evaluate.judge_prices", ("free",), "have the form of (0.15, 0.6)"),
        ("evaluate.benchmarks", ("mmmu",), "be pairs (name, path), as in (('mmmu', "),
        ("evaluate.benchmarks", (("chartqa", "x"),), "each name once and one of mathvista, "),
        ("evaluate.benchmarks", (("mmmu", "x"),) * 2, "each name once and one of mathvista, "),
        ("verifier.weights", (), "be pairs of a component and its weight, each component once"),
        ("verifier.weights", ("acc", 1.0), "be pairs of a component and its weight"),
        ("verifier.weights", (("acc", "1"),), "be pairs of a component and its weight"),
        ("verifier.weights", (("acc", float("nan")),), "be pairs of a component and its weight"),
        ("verifier.weights", (("acc", 1.0), ("acc", 2.0)), "each component once, as in (('acc', "),
        ("verifier.weights", (("acc", 1.0), ("fmt", 0.1)), "without fmt, whose weight is rl.form"),
        ("rl.objective", "ppo", "be one of care, grpo, dapo, gspo, dr_grpo, rloo, got 'ppo'"),
        ("care.anchor_rule", "longest", "be one of shortest, random, got 'longest'"),
        ("rl.schedule", "linear", "be one of constant, cosine, got 'linear'"),
        ("data.think_tag", "", "be one word of letters, digits and _, other than 'answer'"),
        ("data.think_tag", "answer", "be one word of letters"),
        ("data.think_tag", "<think>", "be one word of letters"),
        ("export.step", "first", "be 'last', 'best' or the number of a saved step, got 'first'"),
        ("export.step", "-1", "be 'last', 'best' or the number of a saved step, got '-1'"),
        pytest.param("care.K", 10**400, "within ±2147483647, got a number of 1329", id="huge"),
        ("model.backbone.text_config.rms_norm_eps", float("inf"), "be finite, got inf"),
    ],
)
def test_a_value_that_its_row_refuses_is_told_with_one_that_it_takes(key, value, told):
    message = refusal({key: value})
    assert message.startswith(f"{key} must ") and told in message and "got " in message


def test_bounds_belong_to_an_interval_or_not():
    def lies_in(value, text):
        return interval(text).holds(value)

    assert lies_in(0, "[0, 1)") and not lies_in(1, "[0, 1)")
    assert lies_in(1, "(0, 1]") and not lies_in(0, "(0, 1]")
    assert not lies_in(float("inf"), "[0, inf)") and not lies_in(float("nan"), "[-1, inf)")


def test_a_gradient_may_go_unclipped():
    config = tiny.get_config()
    config.rl.max_grad_norm = float("inf")
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
    changes = {"free": "freely", "any number": keys.STEPS, "the folder": keys.MOVED}
    described = dict(changes_in(section))
    assert len(described) > 30
    for pattern, said in described.items():
        change = keys.change_of(pattern)
        if said == "fixed":
            assert change == keys.FIXED, pattern
        else:
            (expected,) = (changes[first] for first in changes if said.startswith(first))
            assert change.startswith(expected), pattern
