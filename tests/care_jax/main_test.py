"""Stages around scripted ones: what each works on and what it hands on; what flags must be."""

import pathlib
import sys

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from care_jax import main
from care_jax.batch import Example
from care_jax.devices import workdir_lock
from care_jax.devices.sharding import make_mesh
from configs import common, tiny

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def opened(monkeypatch):
    """How each source was opened."""
    seen = []

    def open_source(name, **options):
        seen.append(options)
        return [Example("e", name, (), "?", "1", response="1")]

    monkeypatch.setattr(main, "open_source", open_source)
    return seen


def test_stages_hand_their_parameters_on_and_evaluations_are_named_by_them(
    monkeypatch, opened, tmp_path
):
    """Parameters are the names of the stages they went through."""
    seen = []

    def trained(stage):
        return lambda run, params, examples, evaluate: [*params, stage]

    def evaluate(run, params, examples, *, name, **_):
        seen.append((name, params))
        return {"acc": len(params) / 2}

    one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr(main, "make_mesh", lambda **_: one_device)
    monkeypatch.setattr(main, "initial_params", lambda *_, **__: [])
    monkeypatch.setattr(main.sft, "train", trained("sft"))
    monkeypatch.setattr(main.train, "train", trained("rl"))
    monkeypatch.setattr(main.evaluate, "evaluate", evaluate)
    monkeypatch.setattr(main.export, "export", lambda run, params, folder: seen.append(params))
    config = tiny.get_config()
    config.stages = ("evaluate", "sft", "evaluate", "export", "evaluate", "rl", "evaluate")
    results = main.run_stages(config, tmp_path)
    after_sft = ("sft", ["sft"])
    assert seen == [("start", []), after_sft, ["sft"], after_sft, ("rl", ["sft", "rl"])]
    assert results == {"start": {"acc": 0}, "sft": {"acc": 0.5}, "rl": {"acc": 1}}


def test_each_stage_works_on_its_own_examples(opened):
    config = tiny.get_config()
    for section, seed in (("sft", 11), ("train", 12), ("test", 13)):
        config.data[section].seed = seed
    for stage in ("sft", "rl", "evaluate"):
        main.open_stage(config, stage)
    assert [options["seed"] for options in opened] == [11, 12, 13]
    assert [options["split"] for options in opened] == ["train", "train", "test"]
    assert ["teacher_error" in options for options in opened] == [True, False, False]


@pytest.mark.parametrize("stage", ["rl", "evaluate"])
def test_answers_that_are_no_texts_need_a_reward_function(tmp_path, stage):
    path = tmp_path / "boxes.jsonl"
    path.write_text('{"question": "Where?", "answer": [1, 2, 3, 4]}\n')
    config = tiny.get_config()
    config.data.train = config.data.test = common.source("jsonl", path=str(path))
    with pytest.raises(ValueError, match=r"1 x answer is a list .*, which needs verifier\.reward"):
        main.open_stage(config, stage)
    assert main.open_stage(config, stage, has_reward=True)[0].answer == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("test", "is_held_out"),
    [
        ({"source": "", "path": ""}, False),
        ({"source": "jsonl", "path": ""}, False),
        ({"source": "jsonl", "path": "test.jsonl"}, True),
        ({"source": "synthetic", "path": ""}, True),
    ],
)
def test_benchmarks_are_evaluated_beside_held_out_questions_or_alone(
    monkeypatch, opened, tmp_path, test, is_held_out
):
    one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr(main, "make_mesh", lambda **_: one_device)
    monkeypatch.setattr(main, "initial_params", lambda *_, **__: "weights")
    monkeypatch.setattr(main.evaluate, "evaluate", lambda *_, name, **__: {"acc": 0.5})
    monkeypatch.setattr(
        main.evaluate,
        "evaluate_benchmarks",
        lambda run, params, benchmarks, *, name, **_: {
            f"{benchmarks[0][0]}/{name}": float(params == "weights")
        },
    )
    monkeypatch.setattr(main.evaluate, "open_benchmarks", lambda config: config.evaluate.benchmarks)
    config = tiny.get_config()
    config.stages = ("evaluate",)
    config.data.test.update(test)
    config.evaluate.benchmarks = (("mmmu", "releases/MMMU"),)
    results = main.run_stages(config, tmp_path)
    held_out = {"acc": 0.5} if is_held_out else {}
    assert results == {"start": {"mmmu/start": 1.0} | held_out}
    assert len(opened) == is_held_out


@pytest.fixture
def parsed(monkeypatch):
    """What a run would start from that is given these arguments in this folder."""
    monkeypatch.chdir(ROOT)

    def parse(*arguments):
        monkeypatch.setattr(sys, "argv", ["main", *arguments])  # where keys are looked for
        main.parse_flags(sys.argv, config)
        return flags.FLAGS.config

    with flagsaver.flagsaver():
        config = main.define_flags()
        yield parse


def test_an_arm_is_a_config_file_with_an_argument(parsed):
    config = parsed("--config=experiments/anchor_rule.py:random", "--config.seed=7")
    assert (config.care.anchor_rule, config.seed) == ("random", 7)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "experiments/anchor_rule.py:longest",
            "arm must be one of shortest, random, got 'longest'; write arm or arm@base",
        ),
        (
            "experiments/anchor_rule.py:random@huge",
            "'random@huge' names a base that is not in configs/: huge",
        ),
        ("configs/tiny.py:gpt", "configs/tiny.py has qwen2_5_vl and qwen3_vl, not 'gpt'"),
        ("configs/qwen25vl_7b.py:gpt", "get_config() takes 0 positional arguments but 1 was given"),
    ],
)
def test_what_a_config_file_refuses_is_told_in_its_own_words(parsed, file, message):
    """And no more than that, behind the flag it is about."""
    with pytest.raises(SystemExit) as stopped:
        parsed(f"--config={file}")
    assert stopped.value.code == f"error: flag --config={file}: {message}"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--config.care.rul=nearest",
            "no such key: 'rul'; configs/common.py has all of them. "
            'Did you mean "rule" instead of "rul"?',
        ),
        ("--config.qqqq=1", "no such key: 'qqqq'; configs/common.py has all of them."),
        ("--config=configs/huge.py", "No such file or directory: 'configs/huge.py'"),
    ],
)
def test_a_key_or_a_file_that_does_not_exist_is_named(parsed, flag, message):
    with pytest.raises(SystemExit) as stopped:
        parsed("--config=configs/tiny.py", flag)
    line = stopped.value.code
    assert line.startswith("error: ") and line.endswith(message) and "\n" not in line


def test_held_out_questions_are_opened_for_evaluations_inside_stages(monkeypatch, opened, tmp_path):
    """Each training stage may evaluate its weights with them; the run has no stage `evaluate`."""
    seen = []

    def train(run, params, examples, evaluate):
        seen.append(evaluate(params, name="rl", step=3))
        return params

    one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr(main, "make_mesh", lambda **_: one_device)
    monkeypatch.setattr(main, "initial_params", lambda *_, **__: "weights")
    monkeypatch.setattr(main.train, "train", train)
    monkeypatch.setattr(
        main.evaluate,
        "evaluate",
        lambda run, params, examples, *, name, step, **_: {params: examples[0].source, name: step},
    )
    config = tiny.get_config()
    config.stages = ("rl",)
    main.run_stages(config, tmp_path / "without")
    config.rl.eval_every = 3
    main.run_stages(config, tmp_path / "with")
    assert seen == [{}, {"weights": "synthetic", "rl": 3}]
    assert [options["split"] for options in opened] == ["train", "train", "test"]


def test_a_benchmark_whose_files_are_missing_is_told_before_training(monkeypatch, opened, tmp_path):
    one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr(main, "make_mesh", lambda **_: one_device)
    monkeypatch.setattr(main, "policy_of", None)
    config = tiny.get_config()
    config.stages = ("rl", "evaluate")
    config.evaluate.benchmarks = (("mmmu", str(tmp_path)),)
    with pytest.raises(ValueError, match=r"expected validation-\*\.parquet .* got no such file"):
        main.run_stages(config, tmp_path)


def test_a_run_in_a_workdir_that_is_in_use_writes_nothing(monkeypatch, tmp_path):
    one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr(main, "make_mesh", lambda **_: one_device)
    monkeypatch.setattr(main, "initial_params", None)
    config = tiny.get_config()
    config.stages = ("export",)
    with workdir_lock.held(tmp_path), pytest.raises(ValueError, match="is in use by process"):
        main.run_stages(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [workdir_lock.NAME]
