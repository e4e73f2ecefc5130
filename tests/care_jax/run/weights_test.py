"""Where a run's weights come from: a folder or chance; always laid over the mesh."""

import dataclasses
import functools
import re
import types
from fnmatch import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import make_step

from care_jax.devices import sharding
from care_jax.run import weights
from care_jax.run.policy import policy_of
from care_jax.run.run import Run, abstract_params
from care_jax.run.workdir import open_checkpoints
from care_jax.stages import export
from configs import common, tiny
from models import backbone

RULES = common.get_config().sharding_rules


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(2, 2, 2)


def test_a_release_is_loaded_in_float32_onto_the_mesh(policy, params, mesh, tmp_path):
    backbone.export(tmp_path, params, policy.config, max_shard_bytes=300_000)
    policy.tokenizer.save_pretrained(tmp_path)
    config = tiny.get_config()
    config.model.path, config.model.backbone = str(tmp_path), {}
    loaded = weights.start(Run(config, policy_of(config), mesh, tmp_path))
    shardings = sharding.param_shardings(backbone.logical_axes(policy.config), params, RULES, mesh)

    def check(ours, expected, where):
        assert ours.dtype == jnp.float32 and ours.sharding == where
        rounded = np.asarray(expected).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(ours, rounded)

    jax.tree.map(check, loaded, params, shardings)
    up = loaded["text"]["layers"]["mlp"]["up"]["kernel"]
    assert up.addressable_shards[0].data.size * 4 == up.size


def test_weights_of_a_hub_id_are_downloaded_when_they_are_read(
    policy, params, mesh, tmp_path, monkeypatch
):
    """Not for a dry run, and not before the paths of the data are checked."""
    import huggingface_hub

    backbone.export(tmp_path, params, policy.config)
    policy.tokenizer.save_pretrained(tmp_path)
    names, asked = {path.name for path in tmp_path.iterdir()}, []

    def download(path, *, allow_patterns, **_):
        asked.append(
            {n for n in names if not allow_patterns or any(fnmatch(n, p) for p in allow_patterns)}
        )
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = tiny.get_config()
    config.model.path, config.model.backbone = "someone/some-release", {}
    run = Run(config, policy_of(config), mesh, tmp_path)
    assert asked == [names - {"model.safetensors"}] and "model.safetensors" in names
    weights.start(run)
    assert asked[1:] == [names]


@pytest.mark.parametrize(
    ("saved", "stage", "changes", "is_read"),
    [
        ((), "sft", {}, True),
        (("sft",), "sft", {}, False),
        (("rl",), "sft", {}, True),
        (("sft",), "evaluate", {}, True),
        (("rl",), "rl", {"care.beta": 0.02}, True),  # the reference
        (("rl",), "rl", {"care.beta": 0.0}, False),
        (("rl",), "rl", {"care.beta": 0.02, "model.lora_rank": 2}, False),
    ],
)
def test_a_resumed_run_reads_initial_weights_only_for_the_reference(
    make_run, saved, stage, changes, is_read
):
    run = make_run(changes)
    for name in saved:
        make_step(run.workdir, name, 7)
    found = jax.tree.leaves(weights.start_of(run, stage))
    assert {isinstance(leaf, jax.Array) for leaf in found} == {is_read}
    assert len(found) == len(jax.tree.leaves(weights.start(run)))


@pytest.fixture
def trained(make_run):
    """A run of 4 RL steps, evaluated at the end, whose checkpoints 2 and 4 are saved."""
    run = make_run({"rl.num_steps": 4, "rl.eval_every": 4})
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_params(run))
    with open_checkpoints(run, "rl") as saved:
        for step in (2, 4):
            params = jax.tree.map(lambda x, step=step: x + step, state)
            saved.save(step, {"params": params, "opt_state": jnp.zeros(2)}, {})
    run.metrics.write("rl_eval", 4, {"acc": 0.5})
    return run


def test_of_a_stage_with_nothing_left_to_do_only_the_weights_are_read(trained):
    found = weights.finished(trained, "rl")
    assert jax.tree.structure(found) == jax.tree.structure(abstract_params(trained))
    assert {float(leaf.mean()) for leaf in jax.tree.leaves(found)} == {4.0}


def test_weights_that_are_not_finite_say_which_checkpoint_to_remove(trained, monkeypatch):
    def refused(run, params, name, advice):
        raise ValueError(f"{name}: {advice}")

    monkeypatch.setattr(weights.guards, "check_weights", refused)
    message = r"checkpoint 4 of rl: remove \S+/rl/4, then run the same command"
    with pytest.raises(ValueError, match=message):
        weights.finished(trained, "rl")


def test_a_stage_with_steps_or_an_evaluation_left_is_not_finished(trained, capsys):
    assert weights.finished(trained, "sft") is None  # never begun

    def changed(**keys):
        config = trained.config.copy_and_resolve_references()
        config.rl.update(keys)
        return dataclasses.replace(trained, config=config)

    assert weights.finished(changed(num_steps=5), "rl") is None
    trained.metrics.path.write_text("")
    assert weights.finished(trained, "rl") is None
    assert weights.finished(changed(eval_every=0), "rl") is not None
    damage(trained.workdir / "checkpoints" / "rl" / "4" / "state")
    assert weights.finished(changed(eval_every=0), "rl") is None
    assert "checkpoint 4 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(("wanted", "step"), [("last", 4), ("2", 2)])
def test_a_step_is_hashed_once_where_it_is_found_and_loaded(trained, monkeypatch, wanted, step):
    hashed = []
    monkeypatch.setattr(
        weights.integrity, "shared_damage", lambda folder, of: hashed.append(of) or ""
    )
    trained.config.export.step = wanted
    params = weights.load(trained, weights.find(trained, ()))
    assert {float(leaf.mean()) for leaf in jax.tree.leaves(params)} == {float(step)}
    assert hashed == [f"checkpoint {step}"]


def damage(folder):
    """Changes the middle byte of the largest file."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_an_export_that_differs_from_its_sums_is_refused_and_named(policy, params, mesh, tmp_path):
    export.export(types.SimpleNamespace(policy=policy), params, tmp_path)
    config = tiny.get_config()
    config.model.path, config.model.backbone = str(tmp_path), {}
    load = functools.partial(weights.start, Run(config, policy_of(config), mesh, tmp_path))
    load()
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    message = f"model.path {tmp_path} is damaged: model.safetensors has another SHA-256"
    with pytest.raises(ValueError, match=re.escape(message)):
        load()
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    fields = (tmp_path / "config.json").read_text()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-2] + b" " + content[-1:])
        with pytest.raises(ValueError, match=rf"is damaged: {name} has another SHA-256"):
            policy_of(config)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(fields.replace("1e-06", "2e-06"))
    (tmp_path / "sha256.json").unlink()  # changed on purpose
    policy_of(config)
    load()


def test_folders_of_a_run_and_of_the_hubs_cache_are_told_from_a_release(policy, params, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "models--Org--Name"
    revision, step = cache / "snapshots" / "abc", run / "checkpoints" / "rl" / "20"
    for folder in (step, revision, tmp_path / "copy" / "progress"):
        folder.mkdir(parents=True)
    (run / "starts.jsonl").touch()
    (run / "config.json").write_text("{}")
    export.export(types.SimpleNamespace(policy=policy), params, run / "export")
    config = tiny.get_config()
    config.model.backbone = {}
    for path in (run, step, step.parent, step.parents[1]):
        config.model.path = str(path)
        with pytest.raises(ValueError, match=f"'{path}' is of a run, .*; export it .*={run}, and"):
            policy_of(config)
    config.model.path = str(tmp_path / "copy")
    with pytest.raises(ValueError, match=r"is of a run, .* --workdir=<its workdir>, and set"):
        policy_of(config)
    config.model.path = str(cache)
    with pytest.raises(ValueError, match=f"cache of a release; set it to .*: {revision}$"):
        policy_of(config)
    config.model.path = str(run / "export")
    assert policy_of(config).folder == run / "export"
