"""Stages around scripted ones: what each works on and what it hands on."""

import jax
import pytest

from care_jax import main
from care_jax.batch import Example
from care_jax.sharding import make_mesh
from configs import tiny


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
        return lambda run, params, examples: [*params, stage]

    def evaluate(run, params, examples, *, name):
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
    monkeypatch.setattr(main.evaluate, "evaluate", lambda *_, name: {"acc": 0.5})
    monkeypatch.setattr(
        main.evaluate,
        "evaluate_benchmarks",
        lambda run, params, *, name: {f"mmmu/{name}": float(params == "weights")},
    )
    config = tiny.get_config()
    config.stages = ("evaluate",)
    config.data.test.update(test)
    config.evaluate.benchmarks = (("mmmu", "releases/MMMU"),)
    results = main.run_stages(config, tmp_path)
    held_out = {"acc": 0.5} if is_held_out else {}
    assert results == {"start": {"mmmu/start": 1.0} | held_out}
    assert len(opened) == is_held_out
