"""A whole RL step (rollout, reflection, update) is the same on every mesh."""

import json
import zlib

import jax
import pytest

from care_jax import main
from care_jax.devices.sharding import make_mesh
from care_jax.rewards.verifier import Verdict, Verifier
from configs import tiny

COMPARED = ("loss", "grad_norm", "kl_ref", "entropy", "reward", "reflect_success", "think_tokens")


def verdict(text):
    return Verdict(acc=float(zlib.crc32(text.encode()) % 3 == 0), fmt=0.0, reason="by its bytes")


def rl_metrics(workdir, mesh, monkeypatch, family="qwen2_5_vl"):
    config = tiny.get_config(family)
    config.stages = ("rl",)
    config.model.backbone.text_config.num_hidden_layers = 1
    rl = config.rl
    rl.num_steps, rl.warmup_steps, rl.num_rollouts, rl.max_response_tokens = 1, 0, 3, 24
    config.care.beta = 0.02
    rl.prompts_per_step = rl.prompts_per_update = 8
    rl.decode_prompts = rl.microbatch_size = 8
    monkeypatch.setattr("care_jax.run.run.make_mesh", lambda **_: mesh)
    # What has not learned is never right: one text in three counts as correct, so that every role
    # occurs.
    monkeypatch.setattr(
        Verifier, "verify_parsed", lambda self, texts, *_: [verdict(t) for t in texts]
    )
    main.run_stages(config, workdir)
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return next(record for record in records if record["stage"] == "rl")


@pytest.fixture(scope="module", params=["qwen2_5_vl"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def one(tmp_path_factory, family):
    with pytest.MonkeyPatch.context() as patch:
        one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
        metrics = rl_metrics(tmp_path_factory.mktemp("one"), one_device, patch, family)
    assert 0 < metrics["reward"] < 1 and metrics["reflect_rate"] > 0
    return metrics


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        pytest.param("qwen2_5_vl", (2, 2, 2, 1), marks=pytest.mark.exhaustive),
        ("qwen2_5_vl", (1, 2, 2, 2)),
        # Experts over four devices, then kernels over two and experts over two.
        pytest.param("qwen3_vl_moe", (1, 2, 2, 2), marks=pytest.mark.exhaustive),
        pytest.param("qwen3_vl_moe", (2, 2, 1, 2), marks=pytest.mark.exhaustive),
    ],
    indirect=["family"],
)
def test_an_rl_step_is_the_same_on_every_mesh(tmp_path, monkeypatch, one, family, sizes):
    many = rl_metrics(tmp_path, make_mesh(*sizes), monkeypatch, family)
    for name in COMPARED:
        assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
