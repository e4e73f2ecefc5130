"""Where a policy's weights come from: a folder, the hub, or chance; always laid over the mesh."""

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax import policy as policies
from care_jax.devices import sharding
from care_jax.main import policy_of
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
    loaded = policies.initial_params(policy_of(config), mesh, RULES, seed=0)
    shardings = sharding.param_shardings(backbone.logical_axes(policy.config), params, RULES, mesh)

    def check(ours, expected, where):
        assert ours.dtype == jnp.float32 and ours.sharding == where
        rounded = np.asarray(expected).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(ours, rounded)

    jax.tree.map(check, loaded, params, shardings)
    up = loaded["text"]["layers"]["mlp"]["up"]["kernel"]
    assert up.addressable_shards[0].data.size * 4 == up.size


def test_a_hub_id_is_its_snapshot(policy, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name: asked.append(name) or str(tmp_path)
    )
    assert policies.find_release("someone/some-release") == tmp_path
    assert asked == ["someone/some-release"]


def test_a_hub_id_that_cannot_be_fetched_is_one_line(monkeypatch):
    def fail(name):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"'someone/none' is no local folder and could not") as e:
        policies.find_release("someone/none")
    assert "\n" not in str(e.value) and "OSError" in str(e.value)
