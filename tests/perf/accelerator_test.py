"""The measurement of an accelerator, on a CPU with the small backbone: what it counts is right."""

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

from care_jax.devices import flops, sharding
from care_jax.run.run import open_run
from configs import tiny
from models.attention.packed import AttentionImpl
from perf.accelerator import __main__ as accelerator
from perf.accelerator import kernels, rates, step


@pytest.fixture(scope="module")
def run():
    config = tiny.get_config()
    config.stages = ("rl",)
    config.model.backbone.text_config.num_hidden_layers = 1
    config.care.beta = 0.02
    config.data.buckets = ((128, 64),)
    config.mesh.fsdp = 1
    config.rl.update(row_tokens=512, prompts_per_step=4, prompts_per_update=4, decode_prompts=2)
    config.rl.update(microbatch_size=1, max_response_tokens=40)
    devices = jax.devices
    try:
        jax.devices = lambda *_: devices()[:1]
        return open_run(config, pathlib.Path())
    finally:
        jax.devices = devices


@pytest.mark.exhaustive
def test_a_machine_without_an_accelerator_is_told_so_in_one_line():
    result = subprocess.run(
        [sys.executable, "-m", "perf.accelerator"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("no accelerator: JAX finds devices of kind 'cpu' alone; run")
    assert result.stderr.count("\n") == 1


@pytest.mark.exhaustive
def test_every_part_of_a_step_is_measured_with_its_tokens(run):
    """Responses of 40 tokens: 4 prompts of 4 rollouts, and 5 rows each in the update."""
    rows = list(step.measure(run, {"worst": None, "mean": 12.0}, time.time() + 600))
    assert all("failed" not in row for row in rows), rows
    start, *parts = rows
    assert start["lora_rank"] == 0 and start["parameters"] > 1e5
    names = [(row["part"], row["case"]) for row in parts]
    assert names == [
        (part, case)
        for pair in (("prefill", "decode"), ("score",), ("update",))
        for case in ("worst", "mean")
        for part in pair
    ]
    by_name = dict(zip(names, parts, strict=True))
    num_rollouts, num_rows = run.config.rl.num_rollouts, run.config.rl.num_rollouts + 1
    update, score = by_name["update", "worst"], by_name["score", "worst"]
    assert update["tokens"] == score["tokens"] == 4 * num_rows * 40
    assert update["calls"] == 1 and update["seconds"] > 0
    assert update["flops"] == pytest.approx(3 * score["flops"])
    assert by_name["update", "mean"]["tokens"] < update["tokens"]
    # What compiled is left out of tokens and seconds alike.
    decode = by_name["decode", "worst"]
    assert decode["tokens"] <= 4 * num_rollouts * 40 and decode["compiled"] > 0
    mean = by_name["decode", "mean"]
    sizes, responses = step.draw(run, 4, num_rollouts, 12.0)
    assert 0 < mean["tokens"] <= responses.sum() and mean["hbm_bytes"] > 0
    assert (sizes[:, 0] <= 128).all()


def test_a_part_that_fails_or_comes_too_late_is_named(run, monkeypatch):
    def fail(self, mean):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nmore")

    monkeypatch.setattr(step.Step, "decode", fail)
    late = []

    def score(self, mean):
        late.append(mean)
        monkeypatch.setattr(time, "time", lambda: 1e12)
        return [{"part": "score"}]

    monkeypatch.setattr(step.Step, "score", score)
    _, *rows = step.measure(run, {"worst": None, "mean": 12.0}, time.time() + 600)
    assert [row.get("failed") for row in rows] == [
        *["RESOURCE_EXHAUSTED: 9 GiB"] * 2,
        None,
        *["not begun: out of time"] * 3,
    ]
    assert late == [None]


def test_adapters_are_trained_where_all_parameters_do_not_fit():
    large = step.configuration("qwen25vl_7b", 141e9, is_quick=False)
    assert large.model.lora_rank == step.LORA_RANK and large.model.param_dtype == "bfloat16"
    assert step.configuration("qwen25vl_7b", 8 * 80e9, is_quick=False).model.lora_rank == 0
    assert large.rl.max_response_tokens == 2048
    assert step.configuration("qwen25vl_3b", 1e12, is_quick=True).rl.max_response_tokens == 512


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_kernel_is_compared_with_dense_attention(run, monkeypatch, is_wrong):
    """A kernel whose weights sum to 1.1 is off, forward and backward."""
    attend = kernels.attend
    if is_wrong:
        wrong = lambda q, k, v, mask: 1.1 * attend(q, k, v, mask)  # noqa: E731
        monkeypatch.setattr(kernels, "attend", wrong)
    rows = kernels.measure(run)
    assert [row["kernel"] for row in rows] == [
        "rows of 512 tokens",
        f"rows of {run.config.rl.row_patches} patches",
        "a decode step, of one layer",
    ]
    for row in rows[:2]:
        assert (row["forward"] > 1e-2) == (row["backward"] > 1e-2) == is_wrong, row
        assert row["seconds"] > 0 and row["XLA's seconds"] > 0


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
        ("TPU v5 lite", 1, "v5e:1x1"),
        ("TPU v5p", 4, "v5p:2x2x1"),
        ("TPU v6 lite", 8, "v6e:2x4"),
        ("TPU v6 lite", 3, None),
        ("Tesla T4", 1, None),
    ],
)
def test_devices_are_a_topology_of_aot(kind, number, name):
    assert accelerator.topology_of(kind, number) == name


def test_the_table_tells_shares_and_the_prediction_so_far():
    device = {"devices": 2, "device_kind": "X", "bytes": 2 * 2**30}
    device |= {"matmul_rate": 1e12, "copy_bandwidth": 1e9, "peak_flops": 2e12}
    done = {"compiled": 3, "compiled_s": 9.0, "hbm_bytes": 0, "calls": 1, "case": "mean 600"}
    steps = [
        {"part": "start", "parameters": 3.5e9, "lora_rank": 64, "compiled_s": 1.0},
        {**done, "part": "decode", "seconds": 2.0, "tokens": 100, "flops": 8e11}
        | {"hbm_bytes": 1e9, "peak_bytes": 2**30},
        {**done, "part": "update", "seconds": 4.0, "tokens": 100, "flops": 4e12}
        | {"peak_bytes": 3 * 2**29},
        {"part": "update", "case": "worst case", "failed": "RESOURCE_EXHAUSTED"},
    ]
    apart = {"kernel": "rows", "forward": 1e-3, "backward": None, "seconds": 0.002}
    predicted = {"rl decode": 2**30, "rl decode prefill": 2**29, "rl update": 2**29}
    part = {"kernels": [{**apart, "XLA's seconds": 0.004}], "rows": steps, "predicted": predicted}
    result = {"device": device, "versions": {"jax": "1"}, "backbones": {"qwen25vl_3b": part}}
    lines = accelerator.table(result)
    assert "Products 1 TFLOP/s (50% of the published peak), copies 1 GB/s." in lines
    assert "qwen25vl_3b, 3.50 G parameters, adapters of rank 64 trained" in lines
    assert "| rows | 1.0e-03 |  | 2.00 | 4.00 |" in lines
    assert "| decode | mean 600 | 2.00 | 50 | 20% | 50% | 1.0 | 1.0 | 3 | 9 s |" in lines
    assert "| update | mean 600 | 4.00 | 25 | 50% |  | 1.5 | 1.0 | 3 | 9 s |" in lines
    assert any("| update | worst case | RESOURCE_EXHAUSTED |" in line for line in lines)
    assert json.loads(json.dumps(result)) == result


def test_random_parameters_have_the_shapes_and_shardings_of_the_run(run):
    params = step.random_params(run)
    values = np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(params)])
    assert abs(values.mean()) < 1e-3 and 0.02 < values.std() < 0.03
    assert np.unique(values).size > values.size / 100
    assert sharding.num_shards(run.train_batch_sharding) == run.mesh.size


def test_what_is_frozen_costs_no_gradient(run):
    sizes, rows = np.array([[60, 16]]), np.array([[10, 5]])
    config = run.policy.config
    whole = flops.model_flops(config, sizes, rows)
    tower = flops.tower_flops(config.vision, config.family, 16)
    assert flops.model_flops(config, sizes, rows, freeze_vision=True) == whole - 2 * tower
    adapted = flops.model_flops(config, sizes, rows, has_adapters=True)
    assert adapted == pytest.approx(tower + (whole - 3 * tower) * 2 / 3)


def test_a_cpu_has_no_kernel_of_its_own(run):
    impl = sharding.attention_impl("auto", run.config.sharding_rules, run.mesh)
    assert isinstance(impl, AttentionImpl) and impl.name == "xla"
