"""Whole runs, shrunk to seconds: stages, resuming, refusing, real images."""

import json
import os
import pathlib
import re
import subprocess
import sys
import zlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from report_page import data_of
from safetensors.numpy import load_file

from care_jax import main
from care_jax.data.sources import open_source
from care_jax.devices import loaded_programs
from care_jax.devices.sharding import make_mesh
from care_jax.rewards.verifier import Verdict, Verifier
from care_jax.run import weights
from care_jax.run.policy import policy_of
from configs import common, real_images, tiny
from models.config import FAMILIES

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def cpu_mesh(monkeypatch):
    """One device, as on a laptop; the suite has eight virtual ones."""
    monkeypatch.setattr(
        "care_jax.run.run.make_mesh", lambda **_: make_mesh(1, 1, 1, devices=jax.devices()[:1])
    )


def small_config(family="qwen2_5_vl", **changes):
    config = tiny.get_config(family)
    config.stages = ("sft", "rl", "evaluate")
    config.log_every = 1
    config.checkpoint_every = 2
    config.data.test.num_examples = 12
    config.sft.num_steps = 3
    config.sft.batch_size, config.sft.microbatch_size = 8, 2
    config.sft.warmup_steps = 1
    rl = config.rl
    rl.num_steps = 4
    rl.num_rollouts = 4
    rl.prompts_per_step = 8
    rl.prompts_per_update = rl.decode_prompts = 4
    rl.microbatch_size = 2
    rl.warmup_steps = 1
    config.care.beta = config.grpo.beta = 0.02
    config.evaluate.batch_size = 8
    config.update_from_flattened_dict(changes)
    return config


def metrics_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_times(records):
    return [
        {k: v for k, v in record.items() if not re.search("second|device_idle|host/", k)}
        for record in records
    ]


def state_of(workdir):
    """Parameters, optimizer state and step of the last RL checkpoint."""
    return ocp.PyTreeCheckpointer().restore(workdir / "checkpoints" / "rl" / "4" / "state")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four RL steps without a break."""
    workdir = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
        patch.setattr("care_jax.run.run.make_mesh", lambda **_: one_device)
        results = main.run_stages(small_config(), workdir)
    return workdir, results


def test_a_run_leaves_metrics_of_every_step_and_samples(finished):
    workdir, results = finished
    metrics = metrics_of(workdir)
    stages = Counter(record["stage"] for record in metrics)
    assert stages == {"sft": 3, "rl": 4, "evaluate_rl": 1}
    rl = [record for record in metrics if record["stage"] == "rl"]
    assert [record["step"] for record in rl] == [0, 1, 2, 3]
    for name in (
        *("reward", "acc", "fmt", "anchor_rate", "rescue_rate", "skip_rate", "reflect_rate"),
        *("clip_rate", "clip_rate_negative_answer", "kl_ref", "kl_old", "entropy", "grad_norm"),
        "rationale_share",
        *("think_tokens", "answer_tokens", "response_tokens", "truncated_rate", "decoded_tokens"),
        *(
            "verifier/timeouts",
            "rollout_tokens_per_second",
            "train_tokens_per_second",
            "train_tflops_per_second",
        ),
    ):
        assert all(name in record for record in rl), name
    report = data_of(workdir)
    assert [stage["name"] for stage in report["stages"]] == ["sft", "rl", "evaluate_rl"]
    assert [*report["steps"]] == report["logged"] == [0, 1, 2, 3]
    assert all(len(groups) == 4 for groups in report["steps"].values())
    samples = [json.loads(line) for line in (workdir / "samples_rl.jsonl").read_text().splitlines()]
    assert len(samples) == results["rl"]["num_examples"] == 12
    assert np.mean([sample["acc"] for sample in samples]) == pytest.approx(results["rl"]["acc"])
    assert list((workdir / "tensorboard" / "rl").glob("events*"))


def test_a_healthy_run_is_far_from_the_limits_of_its_state_check(finished):
    """Neither its loss nor the norm of its parameters comes near what stops a run."""
    workdir, _ = finished
    files = sorted((workdir / "checkpoints").glob("*/*/progress/metadata"))
    checked = [json.loads(file.read_text())["metadata"]["state_check"] for file in files]
    assert len(checked) == 4  # of each stage the last two
    log_vocabulary = np.log(policy_of(small_config()).config.text.vocab_size)
    assert all(0 < each["loss"] < log_vocabulary for each in checked)
    norms = [each["norm"] for each in checked]
    assert max(norms) < 1.1 * min(norms)


@pytest.mark.parametrize("stages", [("sft", "evaluate", "export"), ("rl", "evaluate", "export")])
def test_a_run_whose_last_state_is_broken_ends_without_an_export(tmp_path, stages):
    """Every step's loss is finite: it is that of the weights before its update."""
    changes = {f"{stages[0]}.{key}": value for key, value in DIVERGES.items()}
    with pytest.raises(FloatingPointError, match=rf"after \d steps of {stages[0]} is broken"):
        main.run_stages(small_config(stages=stages, **changes), tmp_path)
    records = metrics_of(tmp_path)
    assert records and all(np.isfinite(record["loss"]) for record in records)
    assert not list((tmp_path / "checkpoints" / stages[0]).glob("[0-9]*"))
    assert not (tmp_path / "export").exists()


DIVERGES = {"num_steps": 1, "learning_rate": 1.0, "warmup_steps": 0}


def test_a_release_whose_weights_are_no_numbers_is_refused(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        params = start(*args, **kwargs)
        scale = params["text"]["norm"]["scale"]
        params["text"]["norm"]["scale"] = scale.at[0].set(jnp.inf)
        return params

    start = weights.start
    with monkeypatch.context() as patch:
        patch.setattr(weights, "start", broken)
        main.run_stages(small_config(stages=("export",)), tmp_path / "made")
    config = small_config(stages=("evaluate",))
    config.model.path, config.model.backbone = str(tmp_path / "made" / "export"), {}
    with pytest.raises(ValueError, match=r"made/export must .* text\.norm\.scale \(1 values\);"):
        main.run_stages(config, tmp_path / "run")


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
    assert main.run_stages(small_config(), tmp_path) == finished[1]

    unbroken, resumed = (
        without_times([r for r in metrics_of(w) if r["stage"] != "sft"])
        for w in (finished[0], tmp_path)
    )
    assert unbroken == resumed
    jax.tree.map(np.testing.assert_array_equal, state_of(finished[0]), state_of(tmp_path))


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
    jax.tree.map(np.testing.assert_array_equal, state_of(finished[0]), state_of(tmp_path))
    num_steps = sum(small_config()[stage].num_steps for stage in ("sft", "rl"))
    assert dropped["care_jax.run.stage"] == num_steps and dropped["care_jax.stages.answering"]


@pytest.fixture(scope="module")
def evaluated(finished):
    """The same run with evaluations inside its stages, in a workdir beside it."""
    workdir = finished[0].with_name(finished[0].name + "_evaluated")
    with pytest.MonkeyPatch.context() as patch:
        one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
        patch.setattr("care_jax.run.run.make_mesh", lambda **_: one_device)
        results = main.run_stages(small_config(**EVALUATED), workdir)
    return workdir, results


EVALUATED = {"sft.eval_every": 2, "rl.eval_every": 2, "keep_best": 1}


def test_evaluations_inside_stages_change_nothing_else(finished, evaluated):
    """Tokens, metrics and states are those of the run without them."""
    (workdir, results), (plain, expected) = evaluated, finished
    assert results == expected
    records = without_times(metrics_of(workdir))
    stages = ("sft", "rl", "evaluate_rl")
    assert [r for r in records if r["stage"] in stages] == without_times(metrics_of(plain))
    jax.tree.map(np.testing.assert_array_equal, state_of(workdir), state_of(plain))

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


def exported(workdir):
    return load_file(workdir / "export" / "model.safetensors")


@pytest.mark.parametrize(("step", "saved"), [("last", 4), ("2", 2), ("best", None)])
def test_any_saved_step_of_a_finished_run_is_exported(evaluated, monkeypatch, step, saved):
    workdir, _ = evaluated
    accs = {r["step"]: r["acc"] for r in metrics_of(workdir) if r["stage"] == "rl_eval"}
    saved = saved or max((2, 4), key=lambda step: (accs[step], step))
    monkeypatch.setattr(weights, "start", None)  # none are loaded but the checkpoint's
    main.run_stages(small_config(stages=("export",), **{"export.step": step}), workdir)
    assert_exports_step(workdir, saved)


def assert_exports_step(workdir, saved):
    state = ocp.PyTreeCheckpointer().restore(workdir / "checkpoints" / "rl" / str(saved) / "state")
    table = np.asarray(state["params"]["text"]["embed"]["table"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(exported(workdir)["model.embed_tokens.weight"], table)


@pytest.mark.parametrize(("step", "name"), [("last", "rl"), ("2", "rl_step_2")])
def test_any_saved_step_of_a_finished_run_is_evaluated(evaluated, monkeypatch, step, name):
    """As it was during training; the last one is not evaluated again."""
    workdir, expected = evaluated
    during = {r["step"]: r["acc"] for r in metrics_of(workdir) if r["stage"] == "rl_eval"}
    one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr("care_jax.run.run.make_mesh", lambda **_: one_device)
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


def test_adapters_of_both_stages_are_one_beside_the_export(tmp_path):
    """The start's weights and the adapter's product are the exported weights, in bfloat16."""
    main.run_stages(small_config(stages=("export",)), tmp_path / "start")
    sizes = {"sft.num_steps": 2, "rl.num_steps": 2, "checkpoint_every": 1}
    rates = {"sft.learning_rate": 0.01, "rl.learning_rate": 0.01, "care.beta": 0.0}
    lora = {"model.lora_rank": 2, "model.lora_alpha": 3.0}
    config = small_config(**sizes, **rates, **lora, stages=("sft", "rl", "export"))
    main.run_stages(config, tmp_path / "run")
    fields = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"]) == (4, 6)

    def differences():
        """Largest change of any weight by training, and largest error of the adapter's."""
        adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        start, end = exported(tmp_path / "start"), exported(tmp_path / "run")
        changes, errors = [], []
        for name in (name for name in adapter if ".lora_A." in name):
            product = adapter[name.replace("lora_A", "lora_B")] @ adapter[name] * 6 / 4
            module = name.partition("language_model.")[2].replace("lora_A.", "")
            change = end[f"model.{module}"].astype(np.float32) - start[f"model.{module}"]
            changes.append(np.abs(product).max())
            errors.append(np.abs(change - product).max())
        assert len(changes) == 2 * 7
        return min(changes), max(errors)

    change, error = differences()
    assert change > 5e-3 and error < 4e-3  # bfloat16 of weights up to 0.5
    config.stages, config.export.step = ("export",), "1"
    before = exported(tmp_path / "run")
    main.run_stages(config, tmp_path / "run")
    assert any(
        (tensor != before[name]).any() for name, tensor in exported(tmp_path / "run").items()
    )
    change, error = differences()
    assert change > 5e-3 and error < 4e-3


def test_a_finished_run_trains_and_evaluates_no_more(finished, monkeypatch):
    before = metrics_of(finished[0])
    monkeypatch.setattr(main.rl, "draw_groups", None)
    monkeypatch.setattr(main.evaluate, "samples_of", None)  # nothing is decoded
    assert main.run_stages(small_config(), finished[0]) == finished[1]
    assert metrics_of(finished[0]) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"rl.objective": "dapo", "dapo.max_tries": 2},
        *(
            pytest.param(changes, marks=pytest.mark.exhaustive)
            for changes in (
                {
                    **{"care.reflect_credit": "prompt_only", "model.freeze_vision": True},
                    **{"care.rule": "random", "care.anchor_rule": "random"},
                },
                {"model.lora_rank": 2, "model.param_dtype": "bfloat16"},
                {"rl.objective": "grpo"},
                {"rl.objective": "gspo"},
                {"rl.objective": "dr_grpo", "dr_grpo.beta": 0.01},
                {"rl.objective": "rloo"},
                {
                    **{"care.reflect": False, "care.beta": 0.0, "care.region_weights": False},
                    **{"rl.temperature": 0.8, "rl.top_p": 0.9},
                },
                {
                    **{"care.reflect_mode": "no_cue", "rl.old_logp": "trainer"},
                    **{"model.remat": "layer", "family": "qwen3_vl"},
                },
                {"model.offload": ("reference", "optimizer"), "model.moments_dtype": "bfloat16"},
            )
        ),
    ],
)
def test_every_option_of_the_loop_runs(tmp_path, monkeypatch, changes):
    """With one text in three called correct, so that every role occurs."""

    def verify_parsed(self, texts, *_):
        accs = [float(zlib.crc32(text.encode()) % 3 == 0) for text in texts]
        return [Verdict(acc=acc, fmt=0.0, reason="by its bytes") for acc in accs]

    monkeypatch.setattr(Verifier, "verify_parsed", verify_parsed)
    config = small_config(stages=("rl",), **{"rl.num_steps": 2, **changes})
    main.run_stages(config, tmp_path)
    last = metrics_of(tmp_path)[-1]
    assert last["step"] == 1 and np.isfinite(last["loss"]) and last["grad_norm"] > 0
    if config.rl.objective == "care":
        assert last["anchor_rate"] > 0
        assert (last["reflect_rate"] > 0) == config.care.reflect
        assert config.care.reflect or last["signature/alpha"] > 0
    else:
        assert "anchor_rate" not in last


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_policy_is_a_release_that_runs_and_exports_the_same(tmp_path, family):
    first, second = tmp_path / "first", tmp_path / "second"
    main.run_stages(small_config(family, stages=("export",)), first)
    config = small_config(family, stages=("evaluate", "export"))
    config.model.path, config.model.backbone = str(first / "export"), {}
    results = main.run_stages(config, second)
    assert results["start"]["num_examples"] == 12
    for name in ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        one, other = ((folder / "export" / name).read_bytes() for folder in (first, second))
        assert one == other, name


def test_nan_stops_the_run_and_names_the_step(tmp_path, monkeypatch):
    """The first update of the second step goes wrong."""
    make, seen = main.rl.train_batch, Counter()

    def broken(*args):
        batch, plan = make(*args)
        seen["updates"] += 1
        if seen["updates"] == 3:
            batch = batch.replace(old_logp=batch.old_logp * np.nan)
        return batch, plan

    monkeypatch.setattr(main.rl, "train_batch", broken)
    with pytest.raises(FloatingPointError, match=r"rl step 1: expected finite metrics, got .*=nan"):
        main.run_stages(small_config(stages=("rl",)), tmp_path)
    assert [record["step"] for record in metrics_of(tmp_path)] == [0]
    assert not (tmp_path / "checkpoints" / "rl" / "2").exists()


def test_another_backbones_checkpoint_is_refused(finished):
    config = small_config()
    config.model.backbone.text_config.intermediate_size = 128
    with pytest.raises(ValueError, match=r"of another model: text\.intermediate_size"):
        main.run_stages(config, finished[0])


@pytest.mark.exhaustive
def test_real_figures_compile_once_per_bucket_and_shape_of_rows(tmp_path, shared, monkeypatch):
    """304 figures of many sizes go through rollout, verification and update."""
    path = str(shared / "data" / "mathvision_mini" / "testmini.jsonl")
    config = real_images.get_config()
    config.stages = ("rl",)
    config.data.train.path = path
    config.rl.num_rollouts = 2
    config.rl.max_response_tokens = 20
    config.care.beta = 0.0
    programs = {}
    for name in ("compile_rollout", "compile_update"):
        compile_function = getattr(main.rl, name)

        def kept(*args, name=name, compile_function=compile_function):
            programs[name] = compile_function(*args)
            return programs[name]

        monkeypatch.setattr(main.rl, name, kept)
    main.run_stages(config, tmp_path)
    rl = metrics_of(tmp_path)
    assert len(rl) * config.rl.prompts_per_step == 304
    num_buckets = len(config.data.buckets)
    update, rollout = programs["compile_update"], programs["compile_rollout"]
    decoding = rollout.decode.__self__.programs
    counts, num_shapes, num_calls = (
        {name: getattr(owner, name)._cache_size() for name in names}
        for owner, names in (
            (update, ("credit",)),
            (update, ("update", "score")),
            (decoding, ("admit", "advance")),
        )
    )
    assert all(count <= num_buckets for count in counts.values()), counts
    assert rollout.select._cache_size() == 1
    # Two passes, in each of which prompts of one bucket sit beside those of another, and the slots
    # become half and a quarter.
    assert 2 <= num_calls["admit"] <= 2 * (num_buckets + 1)
    assert 2 <= num_calls["advance"] <= 2 * 3 * num_buckets
    # Rows of trees come in few lengths and numbers, whatever is in them.
    assert all(count <= 3 for count in num_shapes.values()), num_shapes
    assert all(0 < record["train_fill"] <= 1 for record in rl)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.rl.learning_rat=1"], "no such key: 'learning_rat'"),
        (["--config=configs/huge.py"], "huge.py"),
        (["--config.rl.decode_prompts=3", "--config.mesh.fsdp=2"], "mesh.fsdp=2"),
        (
            ["--config.rl.row_tokens=64"],
            "rl.row_tokens 64 is too small for the largest of data.buckets (48 tokens, 64 patches) "
            "and a response of 36 tokens; set it to 84 or more",
        ),
        (["--config.rl.objective=grpo", "--config.care.delta=0.2"], "has no effect under"),
        (["--config.rl.objective=ppo"], "rl.objective must be one of care, grpo, dapo, gspo"),
        (["--config.data.train.source=jsonl", "--config.data.train.path=no.jsonl"], "no.jsonl"),
        (["--config.model.path=/nowhere/at/all"], "model.path"),
        (["--config.sft.warmup_steps=1000"], "warmup_steps 1000"),
        (["--num_processes=2"], "--coordinator_address, --num_processes and --process_id together"),
    ],
)
def test_mistakes_of_the_user_are_one_line(tmp_path, flags, message):
    if not any(flag.startswith("--config=") for flag in flags):
        flags = ["--config=configs/tiny.py", *flags]
    result = subprocess.run(
        [sys.executable, "-m", "care_jax.main", *flags, f"--workdir={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and re.search(re.escape(message), lines[0]), result.stderr


def test_a_batch_size_the_mesh_cannot_divide_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "care_jax.run.run.make_mesh", lambda **_: make_mesh(1, 4, 2, devices=jax.devices()[:8])
    )
    config = small_config(**{"rl.microbatch_size": 2, "sft.microbatch_size": 8})
    with pytest.raises(
        ValueError, match=r"rl.microbatch_size 2 must be divisible by 8 devices .* set it to 8"
    ):
        main.run_stages(config, tmp_path)


def test_unusable_rows_are_skipped_and_counted(tmp_path, caplog):
    """In a mixture with drawn questions while training, and before held-out ones are used."""
    data = open_source("synthetic", num_examples=1)[0].images[0]
    data.save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:150])
    good = {
        "question": "<image>How many?",
        "answer": "3",
        "image": "good.png",
        "response": "<think>Count.</think><answer>3</answer>",
    }
    path = tmp_path / "rows.jsonl"
    rows = [good, good | {"image": "cut.png"}, good | {"answer": ""}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = small_config()
    parts = (
        common.source("jsonl", path=str(path), weight=1.0),
        common.source("synthetic", num_examples=16, weight=1.0),
    )
    config.data.sft = config.data.train = common.source("mixture", parts=parts)
    config.data.test = common.source("jsonl", path=str(path))
    config.data.num_workers = 2
    with caplog.at_level("WARNING"):
        results = main.run_stages(config, tmp_path / "run")
    assert results["rl"]["num_examples"] == 1
    assert "data.test: left out 1 rows: no answer (first is row 3)" in caplog.text
    for stage in ("sft", "rl"):
        *_, last = (line for line in metrics_of(tmp_path / "run") if line["stage"] == stage)
        assert last["left_out/no_answer"] > 0
        assert last["left_out/image_unreadable_or_truncated"] > 0


@pytest.mark.exhaustive
def test_a_sweep_runs_its_arms_from_their_cold_start_and_tabulates_them(tmp_path):
    experiment = tmp_path / "one_arm.py"
    experiment.write_text(
        '"""GRPO alone."""\n\nfrom configs.arms import with_arm\n\n'
        'ARMS = {"grpo": {"rl.objective": "grpo"}}\nREFERENCE = "grpo"\n\n\n'
        "def get_config(arm):\n    return with_arm(ARMS, arm)\n"
    )
    sizes = {
        **{
            "sft.num_steps": 2,
            "sft.warmup_steps": 1,
            "sft.batch_size": 8,
            "sft.microbatch_size": 8,
        },
        **{"rl.num_steps": 2, "rl.warmup_steps": 1, "rl.prompts_per_step": 8},
        **{"rl.prompts_per_update": 8, "rl.decode_prompts": 8, "rl.num_rollouts": 4},
        **{"data.test.num_examples": 8, "evaluate.batch_size": 8},
    }
    flags = [f"--config.{key}={value}" for key, value in sizes.items()]
    command = [sys.executable, "-m", "experiments.sweep", f"--experiment={experiment}", "--seeds=1"]
    result = subprocess.run(
        [*command, f"--workdir={tmp_path}", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    stages = [record["stage"] for record in metrics_of(tmp_path / "one_arm/grpo/seed_0")]
    assert stages == ["rl", "rl", "evaluate_rl"]
    assert "| grpo | 1 | " in (tmp_path / "one_arm/table.md").read_text()
    assert (tmp_path / "one_arm/figure.png").stat().st_size > 10000
