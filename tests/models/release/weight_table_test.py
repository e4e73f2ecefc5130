"""Files in and out: bit-exact, complete, and refused by name where they do not fit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_backbones import all_families

from models import backbone
from models.release import config_json, transfer

# Where a family's releases put the decoder and the tower.
PREFIXES = {
    "qwen2_5_vl": ("model.", "visual."),
    "qwen3_vl": ("model.language_model.", "model.visual."),
    "qwen3_vl_moe": ("model.language_model.", "model.visual."),
}


@pytest.fixture
def prefixes(family):
    return PREFIXES[family]


@pytest.fixture
def folder(params, config, tmp_path):
    backbone.export(tmp_path, params, config, dtype=jnp.float32)
    return tmp_path


def assert_same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@all_families
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 70_000])
def test_round_trip_is_bit_exact(params, config, tmp_path, dtype, max_shard_bytes):
    stored = jax.tree.map(lambda a: a.astype(dtype), params)
    backbone.export(tmp_path, stored, config, dtype, max_shard_bytes)
    loaded, loaded_config = backbone.load(tmp_path, dtype=dtype)
    assert loaded_config == config
    assert_same(loaded, stored)
    shards = list(tmp_path.glob("*.safetensors"))
    assert (len(shards) > 2) == (max_shard_bytes < 10**9)
    if len(shards) > 1:
        header = 12_000
        largest = max(leaf.nbytes // config.text.num_layers for leaf in jax.tree.leaves(stored))
        room = max(max_shard_bytes, largest)  # the kernels of all experts are one tensor
        assert max(path.stat().st_size for path in shards) < room + header


def test_a_smaller_export_leaves_no_old_shards(params, config, folder):
    backbone.export(folder, params, config, jnp.float32, max_shard_bytes=50_000)
    backbone.export(folder, params, config, jnp.float32)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]


def test_generation_config_stops_at_the_end_of_sequence(folder, config):
    generation = json.loads((folder / "generation_config.json").read_text())
    (eos,) = config.eos_token_ids
    assert generation == {"eos_token_id": eos, "pad_token_id": config.pad_token_id}


def test_every_end_of_sequence_id_comes_back_from_the_files(params, config, tmp_path):
    """config.json alone has them, and a release keeps the others in generation_config.json."""
    config = dataclasses.replace(config, eos_token_ids=(114, config.pad_token_id))
    backbone.export(tmp_path, params, config)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [114, 115]
    assert config_json.from_hf(config_json.to_hf(config)) == config
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["eos_token_id"] = fields.get("text_config", fields)["eos_token_id"] = 114
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert backbone.load(tmp_path)[1] == config


@pytest.mark.parametrize("scheme", ["qwen2_5_vl", "qwen3_vl"])
def test_both_naming_schemes_load(params, folder, prefixes, scheme):
    """transformers 4.52 and later nest both halves of Qwen2.5-VL under "model." too."""
    tensors = load_file(folder / "model.safetensors")

    text, visual = prefixes
    assert {f"{text}norm.weight", f"{visual}patch_embed.proj.weight"} <= tensors.keys()

    def renamed(name):
        for own, other in zip(prefixes, PREFIXES[scheme], strict=True):
            if name.startswith(own):
                return other + name.removeprefix(own)
        return name

    save_file({renamed(name): a for name, a in tensors.items()}, folder / "model.safetensors")
    assert_same(backbone.load(folder)[0], params)


def test_missing_unused_and_misshapen_tensors_are_named(folder, prefixes):
    text, visual = prefixes
    missing, unused = (
        f"{text}layers.1.self_attn.q_proj.weight",
        f"{text}layers.7.self_attn.q_proj.weight",
    )
    misshapen = f"{visual}blocks.1.attn.proj.bias"
    tensors = load_file(folder / "model.safetensors")
    del tensors[missing]
    tensors[unused] = np.zeros((2, 2), np.float32)
    tensors[misshapen] = np.zeros(3, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        backbone.load(folder)
    message = str(error.value)
    assert f"missing {missing}" in message
    assert f"unused {unused}" in message
    assert f"{misshapen} has shape (3,), expected (32,)" in message


def test_frequencies_that_older_releases_store_are_not_read(folder, prefixes):
    text, _ = prefixes
    tensors = load_file(folder / "model.safetensors")
    expected, _ = backbone.load(folder)
    tensors[f"{text}layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_same(backbone.load(folder)[0], expected)


def test_a_tied_backbone_has_no_unembedding_of_its_own(tied_config, make_params, folder, tmp_path):
    params = make_params(tied_config)
    backbone.export(tmp_path / "tied", params, tied_config, jnp.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    loaded, config = backbone.load(tmp_path / "tied")
    assert config == tied_config
    assert_same(loaded, params)


def with_copy(folder, change=0.0):
    """Writes the embeddings again as lm_head.weight, as files of transformers 4 may have them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    copy = tensors[name].copy()
    copy[-1, -1] += np.asarray(change, copy.dtype)
    save_file(tensors | {"lm_head.weight": copy}, path)
    return name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("block_size", [transfer._BLOCK_SIZE, 100])
def test_a_copy_of_tied_embeddings_is_left_out(
    tied_config, make_params, tmp_path, monkeypatch, dtype, block_size
):
    monkeypatch.setattr(transfer, "_BLOCK_SIZE", block_size)
    params = jax.tree.map(lambda a: a.astype(dtype), make_params(tied_config))
    backbone.export(tmp_path, params, tied_config, dtype)
    name = with_copy(tmp_path)
    assert_same(backbone.load(tmp_path, dtype=dtype)[0], params)
    with_copy(tmp_path, change=1.0)
    with pytest.raises(ValueError, match=f"^lm_head.weight must equal {name}") as error:
        backbone.load(tmp_path)
    assert "\n" not in str(error.value) and "set tie_word_embeddings to false" in str(error.value)
