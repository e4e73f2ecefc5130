"""A whole run, shrunk to seconds: resumed, evaluated inside its stages, exported from any step."""

import json
import re
import shutil
import sys
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from report_page import data_of
from small_run import (
    exported,
    metrics_of,
    on_one_device,
    small_config,
    state_of,
    without_times,
)

from care_jax import main
from care_jax.devices import compilation, loaded_programs
from care_jax.report import terms
from care_jax.run import terminal, weights
from care_jax.run.policy import policy_of

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four RL steps without a break: its workdir, results and printed lines."""
    workdir, said = tmp_path_factory.mktemp("unbroken"), []
    with on_one_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation.threading, "Timer", OverAtOnce)
        patch.setattr(main, "print_line", said.append)
        results = main.run_stages(small_config(), workdir)
    return workdir, results, said


class OverAtOnce(threading.Timer):
    """A timer whose time is over when it starts."""

    def start(self):
        self.function(*self.args)


def test_a_run_says_what_it_compiles_and_ends_with_what_was_learned(finished):
    workdir, results, (banner, *compiled, ending) = finished
    assert banner.startswith("objective ") and str(workdir) in banner
    expected = terminal.num_programs(small_config())
    assert compiled[0] == f"compiling the cold start's update (1 of {expected})..."
    found = Counter(re.sub(r"compiling (.*) \(.*\)\.\.\.", r"\1", line) for line in compiled)
    assert found.keys() == set(terminal.PROGRAMS.values()) and len(compiled) >= expected
    learned, report, _ = ending.splitlines()
    accuracy = f"{results['rl']['acc']:.1%} after rl"
    assert learned == f"greedy accuracy, held-out questions: {accuracy}"
    assert report == f"report: {workdir / 'report.html'}"


def test_a_run_leaves_metrics_of_every_step_and_samples(finished):
    workdir, results, _ = finished
    metrics = metrics_of(workdir)
    stages = Counter(record["stage"] for record in metrics)
    assert stages == {"sft": 3, "rl": 4, "evaluate_rl": 1}
    rl = [record for record in metrics if record["stage"] == "rl"]
    assert [record["step"] for record in rl] == [0, 1, 2, 3]
    for name in (
        *("reward", "acc", "fmt", "anchor_rate", "rescue_rate", "skip_rate", "reflect_rate"),
        *(
            "clip_rate",
            "clip_rate_negative_answer",
            "kl_ref",
            "kl_old",
            "entropy",
            "grad_norm",
            "grad_clipped",
        ),
        "rationale_share",
        *(f"mismatch/{name}" for name in ("kl", "mean", "p99", "max", "beyond_clip")),
        *("think_tokens", "answer_tokens", "response_tokens", "truncated_rate", "decoded_tokens"),
        *(
            "verifier/timeouts",
            "rollout_tokens_per_second",
            "train_tokens_per_second",
            "train_tflops_per_second",
        ),
    ):
        assert all(name in record for record in rl), name
    written = {name for record in metrics for name in record} - {"stage", "step"}
    assert [name for name in written if not terms.define(name)] == []
    report = data_of(workdir)
    assert ("Objective", "CARE") in map(tuple, report["about"]["facts"])
    assert [stage["name"] for stage in report["stages"]] == ["sft", "rl", "evaluate_rl"]
    assert [*report["steps"]] == report["logged"] == [0, 1, 2, 3]
    assert all(len(groups) == 4 for groups in report["steps"].values())
    samples = [json.loads(line) for line in (workdir / "samples_rl.jsonl").read_text().splitlines()]
    assert len(samples) == results["rl"]["num_examples"] == 12
    assert np.mean([sample["acc"] for sample in samples]) == pytest.approx(results["rl"]["acc"])
    assert list((workdir / "tensorboard" / "rl").glob("events*"))


def test_a_healthy_run_is_far_from_the_limits_of_its_state_check(finished):
    """Neither its loss nor the norm of its parameters comes near what stops a run."""
    workdir, *_ = finished
    files = sorted((workdir / "checkpoints").glob("*/*/progress/metadata"))
    checked = [json.loads(file.read_text())["metadata"]["state_check"] for file in files]
    assert len(checked) == 4  # of each stage the last two
    log_vocabulary = np.log(policy_of(small_config()).config.text.vocab_size)
    assert all(0 < each["loss"] < log_vocabulary for each in checked)
    norms = [each["norm"] for each in checked]
    assert max(norms) < 1.1 * min(norms)


def test_a_resumed_run_continues_bit_for_bit(finished, tmp_path, monkeypatch):
    """Killed in its third RL step, after the checkpoint of the second."""
    update = main.rl.train_batch
    seen = Counter()

    def killed(*args):
        seen["updates"] += 1
        if seen["updates"] > 5:
            raise KeyboardInterrupt
        return update(*args)

    monkeypatch.setattr(main.rl, "train_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        main.run_stages(small_config(), tmp_path)
    monkeypatch.setattr(main.rl, "train_batch", update)
    monkeypatch.setattr(main.sft, "train", None)  # only its weights are read
    assert main.run_stages(small_config(), tmp_path) == finished[1]

    unbroken, resumed = (
        without_times([r for r in metrics_of(w) if r["stage"] != "sft"])
        for w in (finished[0], tmp_path)
    )
    assert unbroken == resumed
    jax.tree.map(np.testing.assert_array_equal, state_of(finished[0], 4), state_of(tmp_path, 4))


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="mappings are counted on Linux")
def test_programs_dropped_at_every_step_change_nothing(finished, tmp_path, monkeypatch):
    """As when a process has all the memory mappings that it may have."""
    (tmp_path / "limit").write_text("1")
    monkeypatch.setattr(loaded_programs, "_MOST_MAPPINGS", tmp_path / "limit")
    monkeypatch.setitem(loaded_programs._counts, "kept", 0)
    dropped, drop = Counter(), loaded_programs.drop_if_many

    def counted():
        caller = sys._getframe(1).f_globals["__name__"]
        dropped[caller] += drop()

    monkeypatch.setattr(loaded_programs, "drop_if_many", counted)
    assert main.run_stages(small_config(), tmp_path) == finished[1]
    records = (without_times(metrics_of(workdir)) for workdir in (finished[0], tmp_path))
    assert next(records) == next(records)
    jax.tree.map(np.testing.assert_array_equal, state_of(finished[0], 4), state_of(tmp_path, 4))
    num_steps = sum(small_config()[stage].num_steps for stage in ("sft", "rl"))
    assert dropped["care_jax.run.stage"] == num_steps and dropped["care_jax.stages.answering"]


@pytest.fixture(scope="module")
def evaluated(finished):
    """The same run with evaluations inside its stages, in a workdir beside it."""
    workdir = finished[0].with_name(finished[0].name + "_evaluated")
    with on_one_device():
        results = main.run_stages(small_config(**EVALUATED), workdir)
    return workdir, results


EVALUATED = {"sft.eval_every": 2, "rl.eval_every": 2, "keep_best": 1}


def test_evaluations_inside_stages_change_nothing_else(finished, evaluated):
    """Tokens, metrics and states are those of the run without them."""
    (workdir, results), (plain, expected, _) = evaluated, finished
    assert results == expected
    records = without_times(metrics_of(workdir))
    stages = ("sft", "rl", "evaluate_rl")
    assert [r for r in records if r["stage"] in stages] == without_times(metrics_of(plain))
    jax.tree.map(np.testing.assert_array_equal, state_of(workdir, 4), state_of(plain, 4))

    evaluations = {
        stage: {
            record["step"]: {k: v for k, v in record.items() if k not in ("stage", "step")}
            for record in records
            if record["stage"] == stage
        }
        for stage in ("sft_eval", "rl_eval")
    }
    assert [*evaluations["sft_eval"]] == [0, 2, 3] and [*evaluations["rl_eval"]] == [0, 2, 4]
    assert evaluations["sft_eval"][3] == evaluations["rl_eval"][0]  # the same weights
    assert evaluations["rl_eval"][4] == results["rl"]
    samples = [f"samples_rl/step_{step}.jsonl" for step in (0, 2, 4)]
    assert (workdir / samples[2]).read_text() == (workdir / "samples_rl.jsonl").read_text()
    assert (workdir / samples[0]).read_text() != (workdir / samples[2]).read_text()
    names = [stage["name"] for stage in data_of(workdir)["stages"]]
    assert names == ["sft", "sft_eval", "rl", "rl_eval", "evaluate_rl"]


@pytest.mark.parametrize(("step", "saved"), [("last", 4), ("2", 2), ("best", None)])
def test_any_saved_step_of_a_finished_run_is_exported(evaluated, monkeypatch, step, saved):
    workdir, _ = evaluated
    accs = {r["step"]: r["acc"] for r in metrics_of(workdir) if r["stage"] == "rl_eval"}
    saved = saved or max((2, 4), key=lambda step: (accs[step], step))
    monkeypatch.setattr(weights, "start", None)  # none are loaded but the checkpoint's
    main.run_stages(small_config(stages=("export",), **{"export.step": step}), workdir)
    assert_exports_step(workdir, saved)


def assert_exports_step(workdir, saved):
    table = np.asarray(state_of(workdir, saved)["params"]["text"]["embed"]["table"])
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(exported(workdir)[name], table.astype(jnp.bfloat16))


@pytest.mark.parametrize(("step", "name"), [("last", "rl"), ("2", "rl_step_2")])
def test_any_saved_step_of_a_finished_run_is_evaluated(evaluated, monkeypatch, step, name):
    """As it was during training; the last one is not evaluated again."""
    workdir, expected = evaluated
    during = {r["step"]: r["acc"] for r in metrics_of(workdir) if r["stage"] == "rl_eval"}
    monkeypatch.setattr(weights, "start", None)
    config = small_config(stages=("evaluate", "export"), **{"export.step": step})
    results = main.run_stages(config, workdir)
    assert results == (expected if step == "last" else {name: results[name]})
    saved = 4 if step == "last" else int(step)
    assert results[name]["acc"] == during[saved]
    assert_exports_step(workdir, saved)  # the same weights
    assert (workdir / f"samples_{name}.jsonl").exists()


def test_rl_without_the_cold_start_of_its_workdir_is_refused(finished):
    with pytest.raises(ValueError, match=r"sft has checkpoints of a cold start, which RL"):
        main.run_stages(small_config(stages=("rl",)), finished[0])


def test_a_step_that_is_not_saved_is_refused_by_those_that_are(evaluated, tmp_path):
    workdir, _ = evaluated
    config = small_config(stages=("export",), **{"export.step": "3"})
    with pytest.raises(ValueError, match=r"'3' must be a saved step of rl: \[2, 4\], the best"):
        main.run_stages(config, workdir)
    config.export.step = "best"
    with pytest.raises(ValueError, match=r"'best' needs a checkpoint, and .* has none"):
        main.run_stages(config, tmp_path)


def test_a_finished_run_trains_and_evaluates_no_more(finished, monkeypatch):
    before = metrics_of(finished[0])
    for stage in (main.sft, main.rl):
        monkeypatch.setattr(stage, "train", None)  # no optimizer state is read, nothing compiled
    monkeypatch.setattr(main.evaluate, "samples_of", None)  # nothing is decoded
    assert main.run_stages(small_config(), finished[0]) == finished[1]
    assert metrics_of(finished[0]) == before


def test_another_backbones_checkpoint_is_refused(finished):
    config = small_config()
    config.model.backbone.text_config.intermediate_size = 128
    with pytest.raises(ValueError, match="of another model: intermediate_size"):
        main.run_stages(config, finished[0])


def test_rl_goes_on_without_its_cold_start_unless_a_stage_needs_it(tmp_path, capfd):
    sizes = {"sft.num_steps": 2, "care.beta": 0.0}
    main.run_stages(small_config(stages=("sft", "rl"), **sizes, **{"rl.num_steps": 2}), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "sft")
    config = small_config(stages=("sft", "evaluate", "rl"), **sizes)
    with pytest.raises(ValueError, match="a stage before RL needs the weights of the cold start"):
        main.run_stages(config, tmp_path)
    capfd.readouterr()
    main.run_stages(small_config(stages=("sft", "rl"), **sizes, **{"rl.num_steps": 3}), tmp_path)
    printed = capfd.readouterr().out
    assert "the cold start's checkpoints are gone; RL goes on from its own" in printed
    assert "sft 0/" not in printed and "rl 2/3" in printed
