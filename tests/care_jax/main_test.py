"""Stages around scripted ones: what each works on and what it hands on."""

import dataclasses
import json
import pathlib
import shutil

import jax
import pytest

from care_jax import main
from care_jax.batch import Example
from care_jax.run import lock
from configs import common, tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("one_device")

EXAMPLE = Example("e", "made", (), "?", "1", response="1")


@pytest.fixture
def opened(monkeypatch):
    """How each source was opened."""
    seen = []

    def open_source(name, *, settings, **options):
        seen.append({**settings, **{key: value for key, value in options.items() if value}})
        return [Example("e", name, (), "?", "1", response="1")]

    monkeypatch.setattr("care_jax.data.sources.open_source", open_source)
    return seen


def test_stages_hand_their_parameters_on_and_evaluations_are_named_by_them(
    monkeypatch, opened, tmp_path
):
    """Parameters are the names of the stages they went through."""
    seen = []

    def trained(stage):
        return lambda run, params, examples, evaluate: [*params, stage]

    def evaluate(evaluator, params, *, name, before):
        seen.append((name, params))
        return {"acc": len(params) / 2}

    monkeypatch.setattr(main.weights, "start", lambda *_, **__: [])
    monkeypatch.setattr(main.sft, "train", trained("sft"))
    monkeypatch.setattr(main.rl, "train", trained("rl"))
    monkeypatch.setattr(main.evaluate.Evaluator, "__call__", evaluate)
    monkeypatch.setattr(main.export, "export", lambda run, params, folder: seen.append(params))
    config = tiny.get_config()
    config.stages = ("evaluate", "sft", "evaluate", "export", "evaluate", "rl", "evaluate")
    results = main.run_stages(config, tmp_path)
    after_sft = ("sft", ["sft"])
    assert seen == [("start", []), after_sft, ["sft"], after_sft, ("rl", ["sft", "rl"])]
    assert results == {"start": {"acc": 0}, "sft": {"acc": 0.5}, "rl": {"acc": 1}}


@pytest.mark.parametrize(
    ("stages", "beta", "is_read"),
    [
        (("sft", "rl"), 0.0, False),
        (("sft", "rl"), 0.02, True),
        (("sft", "evaluate", "rl"), 0.0, True),
    ],
)
def test_a_restart_of_rl_reads_its_cold_start_if_something_needs_it(
    monkeypatch, opened, tmp_path, stages, beta, is_read
):
    """A 7B's takes minutes to read, and its optimizer's state is verified with it."""
    read = []
    for name in ("sft", "rl"):
        step = tmp_path / "checkpoints" / name / "1"
        step.mkdir(parents=True)
        (step / "commit_success.txt").touch()
    monkeypatch.setattr(main, "check_workdir", lambda run: None)
    monkeypatch.setattr(main.weights, "finished", lambda run, stage: read.append(stage))
    monkeypatch.setattr(main.sft, "train", lambda run, params, *_: [])
    monkeypatch.setattr(main.rl, "train", lambda run, params, *_: read.append(params))
    monkeypatch.setattr(main.evaluate, "evaluate_stage", lambda *_, **__: {})
    config = tiny.get_config()
    config.stages, config.care.beta = stages, beta
    main.run_stages(config, tmp_path)
    assert read[:-1] == (["sft", "rl"] if is_read else ["rl"])
    is_shape = all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(read[-1]))
    assert is_shape and bool(jax.tree.leaves(read[-1])) == (not is_read)


@pytest.mark.parametrize("is_dry", [False, True])
def test_unfinished_rollouts_are_checked_before_weights_are_read(
    monkeypatch, opened, tmp_path, is_dry
):
    def check(run):
        raise ValueError("another mesh")

    monkeypatch.setattr(main.carry_over, "check_resumed", check)
    monkeypatch.setattr(main.weights, "start_of", lambda *_: pytest.fail("weights were read"))
    config = tiny.get_config()
    config.stages = ("rl",)
    with pytest.raises(ValueError, match="another mesh"):
        main.run_stages(config, tmp_path, is_dry=is_dry)


@pytest.mark.parametrize(
    ("saved", "expected"), [("", []), ("sft", ["start"]), ("rl", ["start", "sft"])]
)
def test_an_evaluation_ahead_of_checkpoints_is_past(monkeypatch, opened, tmp_path, saved, expected):
    past = []

    def evaluated(run, evaluator, params, *, name, is_past):
        past.extend([name] * is_past)
        return {}

    monkeypatch.setattr(main, "check_workdir", lambda run: None)
    monkeypatch.setattr(main.weights, "start_of", lambda *_: [])
    for stage in (main.sft, main.rl):
        monkeypatch.setattr(stage, "train", lambda run, params, *_: params)
    monkeypatch.setattr(main.evaluate, "evaluate_stage", evaluated)
    config = tiny.get_config()
    config.stages = ("evaluate", "sft", "evaluate", "rl", "evaluate")
    if saved:
        step = tmp_path / "checkpoints" / saved / "1"
        step.mkdir(parents=True)
        (step / "commit_success.txt").touch()
    main.run_stages(config, tmp_path)
    assert past == expected


def test_each_stage_works_on_its_own_examples(opened):
    config = tiny.get_config()
    for section, seed in (("sft", 11), ("train", 12), ("test", 13)):
        config.data[section].seed = seed
    for stage in ("sft", "rl", "evaluate"):
        main.open_examples(config, stage)
    assert [options["seed"] for options in opened] == [11, 12, 13]
    assert [options["split"] for options in opened] == ["train", "train", "test"]
    assert ["teacher_error" in options for options in opened] == [True, False, False]


def test_a_run_without_room_for_a_checkpoint_ends_before_it_trains(monkeypatch, tmp_path, opened):
    usage = shutil._ntuple_diskusage(1, 0, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="and one checkpoint needs"):
        main.run_stages(tiny.get_config(), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("stage", ["rl", "evaluate"])
def test_answers_that_are_no_texts_need_a_reward_function(tmp_path, stage):
    path = tmp_path / "boxes.jsonl"
    path.write_text('{"question": "Where?", "answer": [1, 2, 3, 4]}\n')
    config = tiny.get_config()
    config.data.train = config.data.test = common.source("jsonl", path=str(path))
    with pytest.raises(ValueError, match=r"1 x answer is a list .*, which needs verifier\.reward"):
        main.open_examples(config, stage)
    assert main.open_examples(config, stage, has_reward=True)[0].answer == [1, 2, 3, 4]


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
    monkeypatch.setattr(main.weights, "start", lambda *_, **__: "weights")

    def evaluate(evaluator, params, *, name, before):
        held_out = {} if evaluator._examples is None else {"acc": 0.5}
        (benchmark,) = evaluator._benchmarks
        return held_out | {f"{benchmark[0]}/{name}": float(params == "weights")}

    monkeypatch.setattr(main.evaluate.Evaluator, "__call__", evaluate)
    monkeypatch.setattr(main.evaluate, "open_benchmarks", lambda config: config.evaluate.benchmarks)
    config = tiny.get_config()
    config.stages = ("evaluate",)
    config.data.test.update(test)
    config.evaluate.benchmarks = (("mmmu", "releases/MMMU"),)
    results = main.run_stages(config, tmp_path)
    held_out = {"acc": 0.5} if is_held_out else {}
    assert results == {"start": {"mmmu/start": 1.0} | held_out}
    assert len(opened) == is_held_out


def test_held_out_questions_are_opened_for_evaluations_inside_stages(monkeypatch, opened, tmp_path):
    """Each training stage may evaluate its weights with them; the run has no stage `evaluate`."""
    seen = []

    def train(run, params, examples, evaluate):
        seen.append(evaluate(params, name="rl", step=3))
        return params

    def evaluate(evaluator, params, *, name, step):
        held_out = evaluator._examples
        return {} if held_out is None else {params: held_out[0].source, name: step}

    monkeypatch.setattr(main.weights, "start", lambda *_, **__: "weights")
    monkeypatch.setattr(main.rl, "train", train)
    monkeypatch.setattr(main.evaluate.Evaluator, "__call__", evaluate)
    config = tiny.get_config()
    config.stages = ("rl",)
    main.run_stages(config, tmp_path / "without")
    config.rl.eval_every = 3
    main.run_stages(config, tmp_path / "with")
    assert seen == [{}, {"weights": "synthetic", "rl": 3}]
    assert [options["split"] for options in opened] == ["train", "train", "test"]


def test_config_json_leaves_to_other_devices_what_was_left_to_these(monkeypatch, opened, tmp_path):
    seen = {}

    def train(run, params, *_):
        seen.update(run.config.rl)
        return params

    monkeypatch.setattr(main.weights, "start", lambda *_, **__: "weights")
    monkeypatch.setattr(main.rl, "train", train)
    config = tiny.get_config()
    config.stages = ("rl",)
    config.rl.microbatch_size = config.rl.decode_rows = 0
    main.run_stages(config, tmp_path, {"rl.decode_rows": 0})
    assert seen["microbatch_size"] == 1 and seen["decode_rows"] == 8
    rl = json.loads((tmp_path / "config.json").read_text())["rl"]
    assert rl["microbatch_size"] == rl["decode_rows"] == 0
    (start,) = (tmp_path / "starts.jsonl").read_text().splitlines()
    assert json.loads(start)["changed"] == {"rl.decode_rows": 0}


def test_a_benchmark_whose_files_are_missing_is_told_before_training(monkeypatch, opened, tmp_path):
    config = tiny.get_config()
    config.stages = ("rl", "evaluate")
    config.evaluate.benchmarks = (("mmmu", str(tmp_path)),)
    with pytest.raises(ValueError, match=r"expected validation-\*\.parquet .* got no such file"):
        main.run_stages(config, tmp_path)


def test_a_run_in_a_workdir_that_is_in_use_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(main.weights, "start", None)
    config = tiny.get_config()
    config.stages = ("export",)
    with lock.held(tmp_path), pytest.raises(ValueError, match="is in use by process"):
        main.run_stages(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]


@pytest.mark.parametrize("stages", [("rl",), ("sft", "rl")])
def test_a_source_without_rows_is_told_before_the_cold_start(monkeypatch, tmp_path, stages):
    monkeypatch.setattr(
        "care_jax.data.sources.open_source", lambda name, **_: [] if name == "jsonl" else [EXAMPLE]
    )
    config = tiny.get_config()
    config.stages = stages
    parts = common.source("synthetic", num_examples=1), common.source("jsonl", path="empty.jsonl")
    config.data.train = common.source("mixture", parts=parts)
    with pytest.raises(ValueError, match=r"data\.train\.parts\.1 must have rows, got a source 'js"):
        main.run_stages(config, tmp_path)


@pytest.mark.parametrize(
    ("others", "is_same"), [(("a", "b"), True), (("a",), False), (("a", "c"), False)]
)
def test_processes_must_have_the_same_rows(monkeypatch, others, is_same):
    rows = {name: dataclasses.replace(EXAMPLE, id=name) for name in "abc"}
    first = []

    def gather(value):
        first.append(value)
        return [first[0], value]

    monkeypatch.setattr(main.distributed, "gather_json", gather)
    main._check_same_rows({"evaluate": [rows["a"], rows["b"]]})
    if is_same:
        main._check_same_rows({"evaluate": [rows[name] for name in others]})
    else:
        with pytest.raises(ValueError, match=r"same rows of data\.test on all processes, got 2, "):
            main._check_same_rows({"evaluate": [rows[name] for name in others]})
