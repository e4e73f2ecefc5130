"""The flag --config and its keys: what is loaded, and what is said of a wrong file or key."""

import json
import math
import pathlib
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from care_jax import main
from care_jax.config import command_line, config_file
from care_jax.run.versions import write_config
from configs import common

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def parsed(monkeypatch):
    """The configuration of a run with these arguments."""
    monkeypatch.chdir(ROOT)

    def parse(*arguments):
        monkeypatch.setattr(sys, "argv", ["main", *arguments])  # where keys are looked for
        command_line.parse(sys.argv, config, "configs/tiny.py")
        return flags.FLAGS.config

    with flagsaver.flagsaver():
        config = main.define_flags()
        yield parse


@pytest.fixture
def error_of(parsed):
    """The line that ends a run with these arguments."""

    def error_of(*arguments):
        with pytest.raises(ValueError) as stopped:
            parsed(*arguments)
        assert "\n" not in str(stopped.value)
        return str(stopped.value)

    return error_of


def test_an_arm_is_a_config_file_with_an_argument(parsed):
    config = parsed("--config=experiments/anchor_rule.py:random", "--config.seed=7")
    assert (config.care.anchor_rule, config.seed) == ("random", 7)
    config = parsed("--config=configs/care_released.py:tiny:qwen3_vl")
    assert config.rl.dual_clip == 3 and config.care.cue.endswith("</reasoning><answer>")


def test_keys_may_stand_before_their_file_and_apart_from_their_values(parsed):
    config = parsed(
        *("--config.seed", "7", "--config.care.beta", "-1", "--config.care.robust"),
        *("--config.rl.eval_every=3", "--config", "configs/qwen25vl_7b.py"),
    )
    assert (config.seed, config.care.beta, config.care.robust) == (7, -1, True)
    assert config.rl.eval_every == 3 and config.model.path.startswith("Qwen/")


def test_without_a_file_the_default_is_loaded(parsed):
    assert parsed("--config.seed=7").model.backbone.model_type == "qwen2_5_vl"


def test_the_last_of_a_repeated_flag_counts_also_if_it_is_a_tuple(parsed):
    config = parsed(
        *("--config=configs/qwen25vl_7b.py", "--config.stages=('sft',)", "--config.seed=1"),
        *("--config=configs/tiny.py", "--config.stages", "rl", "--config.seed=2"),
    )
    assert (config.stages, config.seed) == (("rl",), 2)
    assert config.model.backbone.model_type == "qwen2_5_vl"


def test_a_run_is_a_configuration_too(parsed, tmp_path):
    """Its tuples, infinite numbers and sources are as in the file that it ran with."""
    for file in ("mixture.py", "smollm_words.py", "care_released.py:tiny"):
        given = config_file.load(f"configs/{file}")
        given.state_check.max_norm_factor = math.inf
        write_config(given, tmp_path)
        config = config_file.load(f"{tmp_path}/config.json")
        assert config.state_check.max_norm_factor == math.inf
        assert config.to_json_best_effort() == given.to_json_best_effort(), file
        assert config.sharding_rules == given.sharding_rules and config.stages == given.stages
    config = parsed(f"--config={tmp_path}/config.json", "--config.stages=('evaluate',)")
    assert config.stages == ("evaluate",) and config.rl.dual_clip == 3


def test_a_folder_may_be_named_by_a_time(parsed, tmp_path):
    folder = tmp_path / "run:2026-10-04T10:00"
    folder.mkdir()
    write_config(parsed(), folder)
    assert config_file.load(f"{folder}/config.json").stages == parsed().stages
    (folder / "mine.py").write_text("from configs.care_released import get_config\n")
    assert config_file.load(f"{folder}/mine.py:tiny").rl.dual_clip == 3


def test_the_run_of_another_version_has_the_defaults_of_new_keys(parsed, error_of, tmp_path):
    write_config(parsed(), tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["rl"].pop("num_steps")
    path.write_text(json.dumps(fields))
    assert parsed(f"--config={path}").rl.num_steps == common.get_config().rl.num_steps
    fields["rl"]["row_lengs"] = 1
    path.write_text(json.dumps(fields))
    assert error_of(f"--config={path}") == (
        f"{path}: no such key: 'row_lengs'. Did you mean row_lengths or row_tokens?"
    )


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"versions": {}, "model": 1}'])
def test_a_file_that_no_run_wrote_is_told(error_of, tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert error_of(f"--config={path}") == (
        f"expected the config.json that a run wrote, got {path}, which is not one; write "
        "--config=FILE.py"
    )


ARM = "experiments/anchor_rule.py"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            f"{ARM}:longest",
            f"{ARM}:12: arm must be one of shortest, random, got 'longest'; write arm or arm@base",
        ),
        (
            f"{ARM}:random@huge",
            f"{ARM}:12: 'random@huge' names a base that is not in configs/: huge",
        ),
        (
            "configs/tiny.py:gpt",
            "configs/tiny.py:19: configs/tiny.py has qwen2_5_vl, qwen3_vl, qwen3_vl_moe, not 'gpt'",
        ),
        (
            "configs/qwen25vl_7b.py:gpt",
            "configs/qwen25vl_7b.py: TypeError: get_config() takes 0 positional arguments but 1 "
            "was given",
        ),
        (
            "configs/huge.py",
            "expected --config=FILE.py, got 'configs/huge.py', which is no file; correct the path",
        ),
        (
            "tiny:qwen3_vl",
            "expected --config=FILE.py, got 'tiny', which is no file; write "
            "--config=configs/tiny.py:qwen3_vl",
        ),
        ("", "expected --config=FILE.py, got '', which is no file; correct the path"),
        ("configs", "expected --config=FILE.py, got 'configs', which is no file; correct the path"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_own_words(error_of, file, message):
    assert error_of(f"--config={file}") == message


GET_CONFIG = "from configs import tiny\ndef get_config():\n    config = tiny.get_config()\n"


def test_a_file_that_is_no_configuration_is_not_run(error_of, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("raise SystemExit")
    message = error_of(f"--config={tmp_path}/metrics.jsonl")
    assert "expected --config=FILE.py or a run's config.json, got" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:\n", ":1: invalid syntax: def get_config(:"),
        ("\nimport not_there\n", ":2: ModuleNotFoundError: No module named 'not_there'"),
        (
            "def get_config():\n    return 1 / 0\n",
            ":2: ZeroDivisionError: division by zero",
        ),
        ("def get_config():\n    return int('x')\n", ":2: invalid literal for int() with base 10"),
        ("config = 1\n", " must define get_config(), which returns a ConfigDict; add it"),
        (GET_CONFIG, ": get_config() must return a ConfigDict, got NoneType; return the"),
        (
            f"{GET_CONFIG}    config.rl.lr = 1\n",
            ":4: no such key: 'lr'. Did you mean learning_rate?",
        ),
        (
            f"{GET_CONFIG}    config.update({{'care': {{'gamma': 1}}}})\n",
            ":4: no such key: 'gamma'. Did you mean gamma_neg or gamma_pos or gamma_share?",
        ),
        (
            f"{GET_CONFIG}    return config.rl.group_sze\n",
            ":4: no such key: 'group_sze'.",
        ),
        (
            f"{GET_CONFIG}    config.rl.num_steps = 'ten'\n",
            ":4: TypeError: Could not override field 'num_steps'",
        ),
    ],
)
def test_a_config_file_that_raises_is_named_with_its_line(error_of, tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    line = error_of(f"--config={path}")
    assert line.startswith(f"{path}{message}") and line.count("mine.py") == 1


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rl.lr", "rl.learning_rate"),
        ("lr", "model.lora_rank or rl.learning_rate or sft.learning_rate"),
        ("care.rul", "care.rule"),
        ("rl.steps", "rl.num_steps"),
        ("train.path", "data.train.path or data.sft.path"),
        ("data.train.paht", "data.train.path"),
        ("data.train.columns.qestion", "data.train.columns.question"),
        ("rll.learning_rate", "rl.learning_rate"),
        ("model.backbone.text_config.hiden_size", "model.backbone.text_config.hidden_size"),
        ("qqqq", ""),
        ("seed.qqqq", ""),
    ],
)
def test_a_key_that_does_not_exist_is_told_with_the_nearest(error_of, key, nearest):
    line = error_of(f"--config.{key}=1")
    assert line.startswith(f"no such key: --config.{key}.") and "configs/common.py" in line
    assert line.count("Did you mean") == bool(nearest)
    assert nearest in line


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--confg=configs/tiny.py", "Unknown command line flag 'confg'. Did you mean: config ?"),
        ("configs/tiny.py", "expected only flags, got 'configs/tiny.py'; write --<flag>=<value>"),
        ("--config.rl.num_steps=ten", "--config.rl.num_steps=ten: invalid literal for int()"),
        ("--config.rl=1", "--config.rl is a section; write --config.rl.<key>=<value>"),
        ("--config", "Missing value for flag --config"),
    ],
)
def test_a_wrong_argument_is_named(error_of, argument, message):
    assert message in error_of(argument)


def test_a_flag_that_a_command_needs_is_told_with_what_it_is(error_of):
    flags.DEFINE_string("chips", None, "Chips and their shape.", required=True)
    assert error_of() == "--chips is missing: Chips and their shape."


def test_a_source_and_the_whole_configuration_take_no_new_keys():
    assert common.get_config().is_locked and common.source("jsonl").is_locked
