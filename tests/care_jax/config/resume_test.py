"""What a resumed run may change, and which changes are refused."""

import json

import jax
import pytest

from care_jax import main
from care_jax.config import resume
from care_jax.run.versions import write_config
from care_jax.run.workdir import open_checkpoints
from configs import common, tiny


def config_of(**changes):
    config = tiny.get_config()
    config.data.train = common.source("jsonl", path="/a/rows.jsonl", images="/a/pictures")
    parts = (common.source("jsonl", path="/a/one.jsonl"), common.source("chartqa", path="/a/two"))
    config.data.sft = common.source("mixture", parts=parts)
    config.model.path = "Qwen/Qwen2.5-VL-3B-Instruct"
    config.update_from_flattened_dict({"rl.num_steps": 100, "sft.num_steps": 50})
    config.update_from_flattened_dict(changes)
    return config


def refusal(changes, stage="rl", step=40):
    """The message of the check of a run resumed with these changes; "" if it passes."""
    saved = json.loads(json.dumps(resume.settings(config_of(), stage)))
    ours = resume.settings(config_of(**changes), stage)
    try:
        resume.check(saved, ours, stage=stage, step=step, folder="w/checkpoints/rl")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", ["sft", "rl"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rl.num_steps": 200},
        {"rl.num_steps": 40},
        {"log_every": 7, "checkpoint_every": 3, "keep_checkpoints": 9, "keep_best": 2},
        {"rl.eval_every": 5, "sft.eval_every": 5, "evaluate.num_samples": 4, "export.step": "2"},
        {"report.groups_per_step": 0, "metrics.wandb_project": "p", "profile_steps": (1, 2)},
        {"mesh.tensor": 4, "sharding_rules": (("batch", "data"),), "data.num_workers": 3},
        {"rl.microbatch_size": 1, "rl.row_tokens": 999, "rl.decode_prompts": 2},
        {"sft.microbatch_size": 1, "sft.row_patches": 999, "model.remat": "layer"},
        {"verifier.num_workers": 9, "verifier.timeout": 1.0, "grpo.beta": 0.7},
        {"model.path": "/new/Qwen2.5-VL-3B-Instruct", "data.train.path": "gs://b/rows.jsonl"},
        {"data.train.images": "/b/pictures", "data.test.path": "other", "stages": ("export",)},
    ],
)
def test_what_changes_no_weight_or_is_listed_may_change(stage, changes):
    assert refusal(changes, stage) == ""


def test_an_evaluation_alone_may_read_longer_prompts():
    longer = {"data.buckets": ((8192, 30720),)}
    assert refusal(longer | {"stages": ("evaluate",)}) == ""
    assert "max_pixels was" in refusal({"data.max_pixels": 9**7, "stages": ("evaluate",)})
    for stages in (("rl",), ("evaluate", "export"), ("evaluate", "rl")):
        assert "data.buckets was" in refusal(longer | {"stages": stages})


@pytest.mark.parametrize("num_steps", [70, 40])
def test_the_number_of_steps_of_the_cold_start_may_change_until_rl_has_checkpoints(num_steps):
    """Else RL would go on with its policy, and another reference of the KL term."""
    changes = {"sft.num_steps": num_steps}
    assert refusal(changes, "sft") == ""
    assert f"sft.num_steps was 50, is {num_steps}; set them back" in refusal(changes, "rl")


MMMU, MATH = ("mmmu", "/a/MMMU"), ("mathvista", "/a/MathVista")


@pytest.mark.parametrize(
    ("metric", "changes", "is_same"),
    [
        ("acc", {}, True),
        ("acc", {"evaluate.benchmarks": (MMMU, MATH), "evaluate.batch_size": 1}, True),
        ("acc", {"data.test.path": "/b/test.jsonl", "verifier.num_workers": 9}, True),
        ("acc", {"data.test.path": "/a/other.jsonl"}, False),
        ("acc", {"data.test.num_examples": 5}, False),
        ("acc", {"verifier.success": 0.9}, False),
        ("acc", {"evaluate.temperature": 1.0}, False),
        ("pass@4", {"evaluate.num_samples": 8}, False),
        ("fmt", {"evaluate.max_response_tokens": 9}, False),
        ("mean/acc", {"evaluate.benchmarks": (("mmmu", "/b/MMMU"),)}, True),
        ("mean/acc", {"evaluate.benchmarks": (MATH, MMMU)}, False),
        ("mmmu/acc", {"evaluate.benchmarks": (MATH, MMMU), "data.test.path": ""}, True),
        ("mmmu/acc", {"evaluate.benchmarks": (("mmmu", "/a/dev"),)}, False),
        ("mmmu/acc", {"evaluate.top_p": 0.9}, False),
        ("mmmu/acc", {"evaluate.judge_model": "other"}, True),
        ("mmmu/acc", {"evaluate.judge_url": "http://judge"}, True),
    ],
)
def test_evaluations_are_the_same_if_what_best_metric_is_of_is(metric, changes, is_same):
    test = common.source("jsonl", path="/a/test.jsonl")
    before = {"best_metric": metric, "evaluate.benchmarks": (MMMU,)}

    def evaluation(**changes):
        config = config_of(**before)
        config.data.test = test.copy_and_resolve_references()
        config.update_from_flattened_dict(changes)
        return resume.evaluation(config)

    assert (evaluation(**changes) == evaluation()) == is_same


# (stage, changes, the first difference that is named)
REFUSED = (
    ("rl", {"rl.objective": "grpo"}, "rl.objective was 'care', is 'grpo'"),
    ("rl", {"care.s": 0.7}, "care.s was 0.5, is 0.7"),
    ("rl", {"rl.num_steps": 39}, "rl.num_steps was 100, is 39"),
    ("rl", {"data.train.path": "/a/rest.jsonl"}, "data.train.path was '/a/rows.jsonl'"),
    ("rl", {"data.buckets": ((9, 9),)}, "data.buckets was [[48, 64]], is [[9, 9]]"),
    ("rl", {"model.path": ""}, "model.path was 'Qwen/Qwen2.5-VL-3B-Instruct', is ''"),
    ("rl", {"verifier.success": 0.9}, "verifier.success was 0.5, is 0.9"),
    ("rl", {"stages": ("rl",)}, "stages (those before 'rl' that train) was ['sft'], is []"),
    ("rl", {"sft.learning_rate": 0.5}, "sft.learning_rate was 0.002, is 0.5"),
    ("rl", {"data.teacher_error": 0.5}, "data.teacher_error was 0.75, is 0.5"),
    ("rl", {"rl.objective": "grpo", "care.cue": "Again."}, "care.cue was ' Wait, that is wrong.'"),
    ("sft", {"seed": 5}, "seed was 0, is 5"),
    ("sft", {"sft.batch_size": 32}, "sft.batch_size was 64, is 32"),
    ("sft", {"care.cue": "Again."}, "care.cue was ' Wait, that is wrong.', is 'Again.'"),
    ("sft", {"data.teacher_error": 0.5}, "data.teacher_error was 0.75, is 0.5"),
    ("sft", {"data.misread_share": 0.5}, "data.misread_share was 0.0, is 0.5"),
    ("sft", {"data.cue_share": 0.0}, "data.cue_share was 0.1, is 0.0"),
    ("sft", {"data.buckets": ((9, 9),)}, "data.buckets was "),  # prompts that fit none are replaced
)


@pytest.mark.parametrize(("stage", "changes", "difference"), REFUSED)
def test_what_the_weights_depend_on_is_refused_by_key_and_values(stage, changes, difference):
    message = refusal(changes, stage)
    assert f"with other settings: {difference}" in message
    assert "w/checkpoints/rl (40 steps" in message


def test_every_key_that_differs_is_named_also_in_the_parts_of_a_mixture():
    message = refusal({"seed": 1, "care.K": 2, "rl.learning_rate": 1.0})
    assert "care.K was 4, is 2; rl.learning_rate was 0.0005, is 1.0; seed was 0, is 1" in message
    parts = (common.source("jsonl", path="/b/one.jsonl"), common.source("chartqa", path="/a/x"))
    message = refusal({"data.sft.parts": parts}, "sft")
    assert "data.sft.parts.1.path was '/a/two', is '/a/x'" in message and "one.jsonl" not in message
    assert "parts.number was 2, is 1" in refusal({"data.sft.parts": parts[:1]}, "sft")


def test_the_cold_start_does_not_depend_on_the_rl_stage():
    """Arms of a sweep share it."""
    changes = {"rl.num_rollouts": 3, "care.s": 0.7, "data.train.seed": 9}
    assert refusal(changes, "sft") == "" != refusal(changes, "rl")


def test_keys_of_another_version_are_not_compared():
    ours = {"rl.new": 1, "seed": 0}
    resume.check({"rl.old": 1, "seed": 0}, ours, stage="rl", step=1, folder="")
    resume.check({}, ours, stage="rl", step=1, folder="")


@pytest.mark.usefixtures("one_device")
def test_another_objective_in_a_finished_workdir_changes_nothing_there(
    run_loop, make_run, monkeypatch, tmp_path
):
    """Before weights are loaded; the export of such a workdir is refused as well."""
    run_loop()
    workdir = tmp_path / "run"
    config = tiny.get_config()
    config.update_from_flattened_dict({"stages": ("export",), "seed": 3})
    monkeypatch.setattr(main.weights, "start", None)
    (workdir / "config.json").write_text("as it was")
    message = r"other settings: .*rl\.objective was 'grpo', is 'care'"
    with pytest.raises(ValueError, match=message):
        main.run_stages(config, workdir)
    assert (workdir / "config.json").read_text() == "as it was"
    assert not (workdir / "export").exists()
    with pytest.raises(ValueError, match=message):
        open_checkpoints(make_run({"seed": 3}), "rl")


def test_config_json_has_the_versions_and_is_whole_at_any_time(tmp_path, monkeypatch):
    config = tiny.get_config()
    write_config(config, tmp_path)
    written = (tmp_path / "config.json").read_text()
    fields = json.loads(written)
    assert fields["versions"]["jax"] == jax.__version__ and "python" in fields["versions"]
    assert fields["rl"]["objective"] == "care"
    config.rl.objective = "grpo"

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("care_jax.devices.whole_file.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_config(config, tmp_path)
    assert (tmp_path / "config.json").read_text() == written
