"""The options of a run, each through the loop; adapters and exports of whole runs."""

import json
import shutil
import zlib

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_run import exported, metrics_of, small_config

from care_jax import main
from care_jax.rewards.verifier import Verdict, Verifier
from models.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_device")


OPTIONS = {
    "dynamic sampling": {"rl.objective": "dapo", "dapo.max_tries": 2, "family": "qwen3_vl"},
    "sequence ratio, adapters": {
        **{"rl.objective": "gspo", "model.lora_rank": 2, "model.param_dtype": "bfloat16"},
        **{"rl.temperature": 0.8, "rl.top_p": 0.9},
        **{"rl.old_logp": "trainer", "rl.correction": "mask"},
    },
    "dynamic sampling, carried over": {
        **{"rl.objective": "dapo", "dapo.max_tries": 2, "rl.carry_over": 0.5, "rl.top_p": 0.95},
        **{"model.offload": ("rollouts",)},
        **{"rl.decode_prompts": 12, "rl.decode_rows": 2},
    },
    "prompt alone, frozen tower": {
        **{"care.reflect_credit": "prompt_only", "model.freeze_vision": True},
        **{"care.rule": "random", "care.anchor_rule": "random"},
        **{"rl.old_logp": "trainer", "rl.correction": "mask", "rl.max_skipped": 1},
    },
    "replayed routes, carried over": {
        **{"family": "qwen3_vl_moe", "rl.replay_routes": True, "rl.carry_over": 0.5},
        **{"rl.decode_prompts": 12, "rl.decode_rows": 2, "model.remat": "layer"},
    },
    "adapters on experts": {
        **{"family": "qwen3_vl_moe", "model.lora_rank": 2, "model.lora_experts": True},
        **{"rl.old_logp": "trainer"},
    },
    "released code": {
        **{"rl.dual_clip": 3.0, "care.mean": "tokens", "care.kl_rows": "all"},
        **{"care.success": "reward", "care.reflect_replaces": "always"},
        **{"care.reflect_temperature": 0.6, "care.reflect_top_p": 0.95},
        **{"rl.old_logp": "trainer", "rl.correction": "truncate"},
        "care.cue": "\nFix:\n</think><answer>",
    },
    "no reflection, no reference": {
        **{"care.reflect": False, "care.beta": 0.0, "care.region_weights": False},
        **{"model.offload": ("optimizer",), "model.moments_dtype": "bfloat16"},
    },
    "no cue, the trainer's probabilities": {
        **{"care.reflect_mode": "no_cue", "rl.old_logp": "trainer", "rl.correction": "truncate"},
        **{"model.remat": "layer", "family": "qwen3_vl", "model.offload": ("reference",)},
    },
}


def by_its_bytes(self, texts, *_):
    """In place of the verifier: one text in three is correct, so that every role occurs."""
    accs = [float(zlib.crc32(text.encode()) % 3 == 0) for text in texts]
    return [Verdict(acc=acc, fmt=0.0, reason="by its bytes") for acc in accs]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[pytest.mark.exhaustive] if number else [])
        for number, (name, changes) in enumerate(OPTIONS.items())
    ],
)
def test_every_option_of_the_loop_runs(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(Verifier, "verify_parsed", by_its_bytes)
    config = small_config(stages=("rl",), **{"rl.num_steps": 2, **changes})
    main.run_stages(config, tmp_path)
    last = metrics_of(tmp_path)[-1]
    assert last["step"] == 1 and np.isfinite(last["loss"]) and last["grad_norm"] > 0
    if not config.rl.carry_over:  # else the first update may have older tokens alone
        assert 0 <= last["mismatch/max"] < 1e-3  # in float32
    if config.rl.correction == "none":
        assert "correction/weight" not in last
    # The sampler's probabilities are larger by what the nucleus leaves out.
    elif config.rl.top_p < 1 or config.care.reflect_top_p:
        assert 0 < last["correction/weight"] < 0.999
    else:
        assert last["correction/weight"] == pytest.approx(1, abs=1e-3)
        assert last["correction/capped"] == 0
    if config.rl.objective == "care":
        assert last["anchor_rate"] > 0
        assert (last["reflect_rate"] > 0) == config.care.reflect
        assert config.care.reflect or last["signature/alpha"] > 0
    else:
        assert "anchor_rate" not in last


@pytest.mark.exhaustive
def test_replayed_routes_bring_the_trainer_near_the_sampler(tmp_path, monkeypatch):
    """In bfloat16, where a router's choice turns on a rounding; one update a step."""
    monkeypatch.setattr(Verifier, "verify_parsed", by_its_bytes)
    changes = {"rl.num_steps": 2, "rl.prompts_per_update": 8, "rl.old_logp": "trainer"}
    changes |= {"model.compute_dtype": "bfloat16"}
    found = {}
    for is_replayed in (False, True):
        folder = tmp_path / str(is_replayed)
        options = {**changes, "rl.replay_routes": is_replayed}
        main.run_stages(small_config("qwen3_vl_moe", stages=("rl",), **options), folder)
        found[is_replayed] = metrics_of(folder)
    for own, replayed in zip(found[False], found[True], strict=True):
        assert own["routes/differ"] > 0 and replayed["routes/differ"] > 0
        assert replayed["mismatch/kl"] < own["mismatch/kl"] / 2
    assert 1 < own["experts/busiest"] <= 8 and own["experts/idle"] < 1


@pytest.mark.parametrize("key", ["rl.replay_routes", "model.lora_experts"])
def test_keys_of_experts_are_refused_with_a_dense_decoder(tmp_path, key):
    with pytest.raises(ValueError, match=f"{key} is for a sparse decoder"):
        main.run_stages(small_config(**{key: True}), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_policy_is_a_release_that_runs_and_exports_the_same(tmp_path, family):
    first, second = tmp_path / "first", tmp_path / "second"
    main.run_stages(small_config(family, stages=("export",)), first)
    config = small_config(family, stages=("evaluate", "export"))
    config.model.path, config.model.backbone = str(first / "export"), {}
    results = main.run_stages(config, second)
    assert results["start"]["num_examples"] == 12
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    for name in files + ["preprocessor_config.json"] * (FAMILIES[family].tower is not None):
        one, other = ((folder / "export" / name).read_bytes() for folder in (first, second))
        assert one == other, name


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rl.decode_rows": 2, "rl.carry_over": 0.5}),
        pytest.param("qwen3", {"model.lora_rank": 2}, marks=pytest.mark.exhaustive),
        pytest.param("qwen2", {"rl.objective": "gspo"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_backbone_without_a_tower_trains_on_text(tmp_path, monkeypatch, family, changes):
    monkeypatch.setattr(Verifier, "verify_parsed", by_its_bytes)
    config = small_config(family, stages=("sft", "rl", "evaluate", "export"), **changes)
    main.run_stages(config, tmp_path)
    rows = metrics_of(tmp_path)
    steps = [row for row in rows if row["stage"] == "rl" and "loss" in row]
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in steps)
    assert not any("patch_fill" in row for row in rows)
    before, after = (row["nll"] for row in (rows[0], rows[2]))
    assert after < before  # of the cold start
    names = exported(tmp_path).keys()
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert not any("visual" in name for name in names)


@pytest.mark.exhaustive
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
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "sft")
    for config.stages in (("export",), ("sft", "rl", "export")):
        with pytest.raises(ValueError, match="adapters of rl stand on those of sft, and the check"):
            main.run_stages(config, tmp_path / "run")
