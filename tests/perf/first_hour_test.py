"""The first hour on a device, tried on a CPU with tiny shapes: all of it, and what it counts."""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax.config.checks import check_config, fill_in
from care_jax.devices import flops, sharding
from care_jax.run.run import compile_to_decode_layout, open_run
from configs import smollm_words, tiny
from models.attention.packed import AttentionImpl
from perf.first_hour import __main__ as first_hour
from perf.first_hour import (
    backbone,
    decoding,
    demo,
    kernels,
    parts,
    rates,
    running,
    smollm,
    tables,
    tracing,
    updating,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run():
    config = backbone.configuration("qwen25vl_3b", 0, is_small=True)
    config.care.beta = 0.02
    devices = jax.devices
    try:
        jax.devices = lambda *_: devices()[:1]
        return open_run(config, pathlib.Path())
    finally:
        jax.devices = devices


@pytest.mark.exhaustive
def test_all_of_it_on_a_cpu(tmp_path):
    """Every step gives rows, and only TRL, which the tests do not install, is missing."""
    command = [sys.executable, "-m", "perf.first_hour", "--small", "--minutes=80"]
    command += [f"--out={tmp_path}"]
    compiler = pathlib.Path(sys.prefix, "cuda")
    own = {"PYTHONPATH": f"{compiler}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    own |= {"JAX_OPTIMIZATION_LEVEL": "O0"}
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own})
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("cpu-small-20")
    found = first_hour.Results(folder).latest()
    log = (folder / "log.txt").read_text()[-3000:]
    assert list(found) == ["device", *first_hour.STEPS], result.stderr + log
    failed = [(name, row) for name, rows in found.items() for row in rows if "failed" in row]
    if not compiler.is_dir():
        failed = [(name, row) for name, row in failed if "predicted for" not in row]
    assert [(name, row["failed"].split(";")[0]) for name, row in failed] == [
        ("trl", "TRL's side: trl is not installed")
    ], log
    assert result.returncode == 1
    reached = {row["stage"] for row in found["run_3b"] if row.get("device_last") is not None}
    assert reached == {"sft", "rl"}
    assert [row["kernel"] for row in found["kernels"][:-1]] == [
        *("experts", "text", "images", "decode") * 2
    ]
    assert {row.get("part") for row in found["decode_3b"]} >= {"prefill", "decode"}
    assert sum(row["share"] for row in found["decode_3b"] if "share" in row) == pytest.approx(1)
    for name in ("update_3b", "update_7b"):
        (predicted,) = (row["programs"] for row in found[name] if "programs" in row)
        assert predicted["rl update"] > 0
    assert found["update_7b"][0]["lora_rank"] == 4
    metrics = {(row["stage"], row["metric"]): row for row in found["demo"] if "metric" in row}
    first = metrics["sft", "loss"]
    assert first["device_first"] == pytest.approx(first["cpu_first"], rel=1e-3)
    assert metrics["evaluate_rl", "acc"]["cpu_last"] is not None
    assert {row.get("case") for row in found["trl"]} >= {"equal", "lognormal"}
    assert any(row.get("metric") == "reward" for row in found["smollm"])
    text = (folder / "results.md").read_text()
    assert text in result.stdout and all(f"## {name}" in text for name in first_hour.STEPS)


RAISES = "import json, sys; print('before'); raise KeyError('gone')"
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_a_step_that_raises_or_hangs_is_a_line_and_the_next_one_runs(tmp_path, capsys):
    results = first_hour.Results(tmp_path)
    add = "from perf.first_hour.__main__ import Results; import pathlib; "
    add += f"Results(pathlib.Path({str(tmp_path)!r})).add"
    codes = {
        "raises": RAISES,
        "hangs": f"{add}('hangs', {{'value': 1}})\n{HANGS}",
        "dies": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "works": f"{add}('works', {{'value': 2}})",
    }
    command = lambda name, _: [sys.executable, "-c", codes[name]]  # noqa: E731
    minutes = lambda name: 8 / 60 if name == "hangs" else 1  # noqa: E731
    first_hour.run_steps(list(codes), results, time.time() + 600, command, minutes)
    found = results.latest()
    assert found["raises"] == [{"step": "raises", "failed": "exit status 1: KeyError: 'gone'"}]
    assert [row.get("value", row.get("failed")) for row in found["hangs"]] == [
        1,
        "killed after 8 s",
    ]
    assert found["dies"][0]["failed"].startswith("exit status -11: ")
    assert found["works"][0]["value"] == 2 and found["works"][1]["took"] > 0
    child = int(results.log.read_text().partition("child ")[2].split()[0])
    time.sleep(0.5)
    stat = pathlib.Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"  # killed too
    assert "- killed after 8 s" in (tmp_path / "results.md").read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == "works"


def test_what_time_does_not_suffice_for_is_not_started(tmp_path):
    results = first_hour.Results(tmp_path)
    first_hour.run_steps(
        ["rates"], results, time.time() + 5, lambda *_: pytest.fail(), lambda _: 1.0
    )
    (row,) = results.latest()["rates"]
    assert row["failed"] == "not started: out of time"


def test_a_later_measurement_of_a_step_replaces_the_earlier(tmp_path):
    results = first_hour.Results(tmp_path)
    for value in (1, 2):
        results.add("demo", {"began": "now"})
        results.add("demo", {"value": value})
    assert results.latest() == {"demo": [{"step": "demo", "value": 2}]}
    assert len(results.rows.read_text().splitlines()) == 4


def test_an_unknown_step_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        first_hour.parse(["--steps=rates,fly"])
    assert ended.value.code == 2
    assert "--steps has no step 'fly', only rates, kernels, run_3b" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_machine_without_an_accelerator_is_told_so_in_one_line():
    result = subprocess.run(
        [sys.executable, "-m", "perf.first_hour"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("no accelerator: JAX finds a CPU alone; run")
    assert result.stderr.count("\n") == 1


@pytest.mark.exhaustive
def test_decoding_counts_what_did_not_compile(run):
    """Responses of 40 tokens, 4 prompts of 4 rollouts."""
    params = compile_to_decode_layout(run)(backbone.random_params(run))
    programs = decoding.programs_of(run)
    with parts.Compilations() as compilations:
        prefill, decode = decoding.decode(run, programs, params, None, compilations)
        assert (prefill["part"], decode["part"]) == ("prefill", "decode")
        assert compilations.number > 0
        assert decode["tokens"] < 4 * run.config.rl.num_rollouts * 40  # the first call compiled
        prefill, decode = decoding.decode(run, programs, params, None, compilations)
        assert decode["tokens"] == 4 * run.config.rl.num_rollouts * 40
        assert decode["hbm_bytes"] > 0 and decode["seconds"] > 0
        sizes, responses = backbone.draw(run, 4, run.config.rl.num_rollouts, 12.0)
        _, decode = decoding.decode(run, programs, params, 12.0, compilations)
        assert 0 < decode["tokens"] <= responses.sum() and (sizes[:, 0] <= 128).all()


@pytest.mark.exhaustive
def test_scoring_and_update_count_the_tokens_of_an_update(run):
    with parts.Compilations() as compilations:
        update = updating.Update(run, compilations)
        (score,), (worst,) = update.score(None), update.update(None)
        num_rows = run.config.rl.num_rollouts + 1
        assert worst["tokens"] == score["tokens"] == 4 * num_rows * 40
        assert worst["calls"] == 1 and worst["seconds"] > 0
        assert worst["flops"] == pytest.approx(3 * score["flops"])
        (mean,) = update.update(12.0)
        assert mean["tokens"] < worst["tokens"] and 0 < mean["fill"] <= 1


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_runs_of_the_steps_suit_the_devices_of_a_host(tmp_path, num_devices):
    model = smollm_words.get_config()
    for flag in smollm.FLAGS:
        key, _, value = flag.removeprefix("--config.").partition("=")
        model.update_from_flattened_dict({key: int(value)})
    run_3b = running.configuration("qwen25vl_3b", str(tmp_path), 80e9, is_small=False)
    for config in (model, run_3b, tiny.get_config()):
        mesh = sharding.make_mesh(**config.mesh, devices=jax.devices()[:num_devices])
        check_config(fill_in(config, mesh), mesh)


def test_compilations_are_counted_inside_of_with_alone():
    with parts.Compilations() as compilations:
        jax.jit(lambda x: x + 1.5)(2.5)
    assert compilations.number and compilations.seconds
    counted = compilations.number, compilations.seconds
    jax.jit(lambda x: x - 1.5)(2.5)
    assert (compilations.number, compilations.seconds) == counted


def test_a_part_that_fails_or_comes_too_late_is_named():
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nmore")

    labels = {"part": "score"}
    (row,) = parts.attempt(labels, fail, time.time() + 600)
    assert row == {"part": "score", "failed": "JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GiB"}
    (row,) = parts.attempt(labels, lambda: pytest.fail(), time.time() - 1)
    assert row == {"part": "score", "failed": "not started: out of time"}
    (row,) = parts.attempt(labels, lambda: [{"x": 1}], time.time() + 600, parts.Compilations())
    assert row == {"part": "score", "x": 1, "compiled": 0, "compiled_s": 0.0, "peak_bytes": None}


def test_kernels_of_a_trace_are_summed_by_name():
    class Event:
        def __init__(self, name, duration_ns):
            self.name, self.duration_ns = name, duration_ns

    class Line:
        def __init__(self, name, events):
            self.name, self.events = name, [Event(*event) for event in events]

    plane = Line("/device:GPU:0", ())
    plane.lines = [
        Line("Stream #7", [("gemm", 3e6), ("copy", 1e6), ("gemm", 3e6)]),
        Line("XLA Modules", [("jit_step", 9e6)]),
    ]
    host = Line("/host:CPU", ())
    host.lines = [Line("python", [("call", 1e9)])]
    rows = tracing.by_kernel([host, plane], "gpu")
    assert [(row["kernel"], row["calls"]) for row in rows] == [("gemm", 2), ("copy", 1)]
    assert rows[0]["seconds"] == pytest.approx(6e-3) and rows[0]["share"] == pytest.approx(6 / 7)
    with pytest.raises(ValueError, match="no events of tpu kernels"):
        tracing.by_kernel([host], "tpu")


def test_metrics_of_both_runs_stand_side_by_side():
    steps = [{"stage": "rl", "step": step, "reward": float(step)} for step in range(20)]
    (row,) = demo.compared(steps, steps[:1])
    assert row == {
        **{"stage": "rl", "metric": "reward", "device_first": 0.0, "device_last": 14.5},
        **{"cpu_first": 0.0, "cpu_last": 0.0},
    }


def test_adapters_are_trained_where_all_parameters_do_not_fit():
    large = backbone.configuration("qwen25vl_7b", 141e9, is_small=False)
    assert large.model.lora_rank == backbone.LORA_RANK and large.model.param_dtype == "bfloat16"
    assert backbone.configuration("qwen25vl_7b", 8 * 80e9, is_small=False).model.lora_rank == 0
    assert large.rl.max_response_tokens == 2048


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_kernel_is_compared_with_dense_attention(run, monkeypatch, is_wrong):
    """A kernel whose weights sum to 1.1 is off, forward and backward."""
    attend = kernels.attend
    if is_wrong:
        wrong = lambda q, k, v, mask: 1.1 * attend(q, k, v, mask)  # noqa: E731
        monkeypatch.setattr(kernels, "attend", wrong)
    monkeypatch.setattr(sharding, "attention_impl", lambda *_: AttentionImpl("xla", run.mesh))
    for kernel in ("text", "images"):
        row = kernels.KERNELS[kernel](run, kernels.heads_of(kernel, run))
        assert (row["forward"] > 1e-2) == (row["backward"] > 1e-2) == is_wrong, row
        assert row["seconds"] > 0 and row["xla_seconds"] > 0


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_product_of_experts_is_compared_with_one_in_float32(monkeypatch, is_wrong):
    if is_wrong:
        wrong = lambda lhs, kernels, sizes: 1.1 * jax.lax.ragged_dot(lhs, kernels, sizes)  # noqa: E731
        monkeypatch.setattr(kernels, "grouped", wrong)
    row = kernels.experts(*kernels.SMALL_EXPERTS, jnp.dtype("float32"))
    assert (row["forward"] > 1e-2) == (row["backward"] > 1e-2) == is_wrong, row
    assert row["seconds"] > 0 and row["xla_seconds"] > 0


def test_dense_attention_sees_what_the_mask_says(run):
    """Against a loop over queries; a prompt, two branches, padding."""
    reach = np.array([[6, 6, 6, 4, 4, 6, 6, 7]])
    q = np.random.default_rng(0).normal(size=(1, 8, 1, 2, 4))
    k, v = np.random.default_rng(1).normal(size=(2, 1, 8, 1, 4))
    out = kernels.dense(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), None, jnp.asarray(reach))
    for place in range(8):
        seen = [key for key in range(place + 1) if place <= reach[0, key]]
        weights = np.exp(q[0, place, 0] @ k[0, seen, 0].T / 2)
        expected = weights / weights.sum(-1, keepdims=True) @ v[0, seen, 0]
        np.testing.assert_allclose(out[0, place, 0], expected, rtol=1e-4, atol=1e-5)


def test_rates_count_operations_and_bytes(monkeypatch):
    calls = []

    def seconds(function):
        calls.append(jax.block_until_ready(function()))
        return 2.0

    monkeypatch.setattr(rates, "best_seconds", seconds)
    device = jax.devices()[0]
    assert rates.matmul_rate(device, 16) == rates.REPEATS * 2 * 16**3 / 2
    assert rates.copy_bandwidth(device, 1) == rates.REPEATS * 2 * 2**20 / 2
    assert float(calls[1].max()) == rates.REPEATS  # every pass was made
    np.testing.assert_allclose(calls[0][0, 0], 1e-2 * 0.16**rates.REPEATS, rtol=0.3)


@pytest.mark.parametrize(
    ("kind", "number", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "h100:8"),
        ("NVIDIA H200", 1, "h200:1"),
        ("NVIDIA L40S", 1, "l40s:1"),
        ("NVIDIA A10G", 4, "a10g:4"),
        ("TPU v5 lite", 1, "v5e:1x1"),
        ("TPU v5p", 4, "v5p:2x2x1"),
        ("TPU v6 lite", 8, "v6e:2x4"),
        ("TPU v6 lite", 3, None),
        ("Tesla T4", 1, None),
    ],
)
def test_devices_are_a_topology_of_aot(kind, number, name):
    assert updating.topology_of(kind, number) == name


def test_the_tables_tell_shares_and_the_prediction_so_far():
    done = {"compiled": 3, "compiled_s": 9.0, "hbm_bytes": 0, "calls": 1, "case": "mean 600"}
    decode = {**done, "part": "decode", "seconds": 2.0, "tokens": 100, "flops": 8e11}
    decode |= {"hbm_bytes": 1e9, "peak_bytes": 2**30, "attention": "gpu"}
    update = {**done, "part": "update", "seconds": 4.0, "tokens": 100, "flops": 4e12}
    labels = {"kernel": "text", "releases": ["qwen25vl_3b"], "dtype": "bfloat16", "size": 512}
    apart = {**labels, "heads": [2, 8, 128], "forward": 1e-3, "seconds": 0.002}
    text = tables.report(
        {
            "device": [{"devices": 2, "kind": "X", "bytes": 2 * 2**30, "versions": {"jax": "1"}}],
            "rates": [{"matmul_rate": 1e12, "peak_flops": 2e12}, {"copy_bandwidth": 1e9}],
            "kernels": [{**apart, "xla_seconds": 0.004}, {"took": 7.0}],
            "decode_3b": [decode, {"attention": "gpu", "case": "trace", "failed": "no"}],
            "update_3b": [
                {"parameters": 3.5e9, "lora_rank": 64},
                {**update, "peak_bytes": 3 * 2**29},
                {"programs": {"rl reshard": 2**29, "rl update": 2**30}},
            ],
            "demo": [{"failed": "killed after 8 s"}],
        }
    )
    for line in (
        "# 2 x X, 2.0 GiB each",
        "Matmuls 1 TFLOP/s (50% of the published peak), copies 1 GB/s.",
        "## kernels: 7 s",
        "| text | 2x8x128 | qwen25vl_3b | bfloat16 | 512 | 1.0e-03 |  | 2.000 | 4.000 |",
        "| gpu | mean 600 | decode | 1 | 2 | 50 | 20% | 50% | 1.0 | 3, 9 s |",
        "- gpu, trace: no",
        "3.50 G parameters, adapters of rank 64 trained.",
        "| update | mean 600 | 1 | 4 | 25 | 50% |  | 1.5 | 3, 9 s | 1.0 |",
        "- killed after 8 s",
    ):
        assert line in text.splitlines(), text


def test_random_parameters_have_the_shapes_and_shardings_of_the_run(run):
    params = backbone.random_params(run)
    values = np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(params)])
    assert abs(values.mean()) < 1e-3 and 0.02 < values.std() < 0.03
    assert np.unique(values).size > values.size / 100
    assert sharding.num_shards(run.train_batch_sharding) == run.mesh.size


def test_what_is_frozen_costs_no_gradient(run):
    sizes, rows = np.array([[60, 16]]), np.array([[10, 5]])
    config = run.policy.config
    whole = flops.model_flops(config, sizes, rows)
    tower = flops.tower_flops(config.vision, 16)
    assert flops.model_flops(config, sizes, rows, freeze_vision=True) == whole - 2 * tower
    adapted = flops.model_flops(config, sizes, rows, has_adapters=True)
    assert adapted == pytest.approx(tower + (whole - 3 * tower) * 2 / 3)


def test_a_cpu_has_no_kernel_of_its_own(run):
    impl = sharding.attention_impl("auto", run.config.sharding_rules, run.mesh)
    assert isinstance(impl, AttentionImpl) and impl.name == "xla"
