"""Adapters: nothing at first, a low-rank change of the kernels afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import backbone, lora


@pytest.fixture(scope="module")
def adapted(params):
    """Adapters that have learned something."""
    adapted = lora.add(params, jax.random.key(1), rank=2, alpha=6.0, experts=True)

    def learned(path, x):
        is_b = path[-1].key == "lora_b"
        return 0.1 * jax.random.normal(jax.random.key(len(path)), x.shape) if is_b else x

    return jax.tree_util.tree_map_with_path(learned, adapted)


def hidden_states(params, config):
    x = jax.random.normal(jax.random.key(2), (2, 5, config.text.hidden_size))
    positions = jnp.broadcast_to(jnp.arange(5)[:, None], (2, 5, 3))
    mask = backbone.text_mask(jnp.full((2, 5), 4), config)
    return backbone.forward(params, x, positions, mask, config)[0]


def test_new_adapters_change_nothing(params, config):
    new = lora.add(params, jax.random.key(1), rank=2, alpha=6.0)
    np.testing.assert_array_equal(hidden_states(new, config), hidden_states(params, config))
    jax.tree.map(np.testing.assert_array_equal, lora.without(new), params)
    jax.tree.map(np.testing.assert_array_equal, lora.merged(new), params)


def test_merged_weights_compute_the_same(adapted, params, config):
    merged = lora.merged(adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    expected = hidden_states(adapted, config)
    assert np.abs(expected - hidden_states(params, config)).max() > 1e-2
    np.testing.assert_allclose(hidden_states(merged, config), expected, atol=2e-5)


def test_the_change_is_alpha_over_rank_times_the_product(adapted, params):
    layer = adapted["text"]["layers"]["attention"]["out"]  # two input axes
    a, b = layer["lora_a"][1], layer["lora_b"][1]
    change = 6.0 / 2 * np.einsum("NHr,rD->NHD", a, b)
    merged = lora.merged(adapted)["text"]["layers"]["attention"]["out"]["kernel"][1]
    kernel = params["text"]["layers"]["attention"]["out"]["kernel"][1]
    np.testing.assert_allclose(merged, kernel + change, atol=1e-6)


@pytest.mark.parametrize(("num_steps", "share"), [(1, 0.06), (10, 0.51), (30, 0.92), (100, 1.0)])
def test_bfloat16_rounds_a_small_change_away(num_steps, share):
    """By steps of one sign at 1e-5: the next bfloat16 number is farther from most weights."""
    rng, width, rank = np.random.default_rng(0), 1024, 16
    kernel = jnp.asarray(0.025 * rng.normal(size=(1, width, width)), jnp.bfloat16)
    a = jnp.asarray(rng.normal(size=(1, width, rank)) / width**0.5, jnp.bfloat16)
    b = jnp.asarray(1e-5 * num_steps * rng.choice([-1.0, 1.0], (1, rank, width)), jnp.bfloat16)
    adapter = {"kernel": kernel, "lora_a": a, "lora_b": b, "lora_scale": jnp.full(1, 2.0)}
    wide = {name: x.astype(jnp.float32) for name, x in adapter.items()}
    found, expected = (lora.merged({"q": each})["q"]["kernel"] for each in (adapter, wide))
    found, expected = (np.asarray(x - wide["kernel"], np.float32) for x in (found, expected))
    assert (found * expected).sum() / (expected**2).sum() == pytest.approx(share, abs=0.02)


def test_gpus_merge_to_the_same_weights_one_layer_at_a_time(adapted):
    query = adapted["text"]["layers"]["attention"]["q"]
    arrays = [query[name] for name in ("kernel", "lora_a", "lora_b", "lora_scale")]
    expected = lora.merged(adapted)["text"]["layers"]["attention"]["q"]["kernel"]
    np.testing.assert_allclose(lora._one_by_one(*arrays), expected, atol=1e-6)
    assert np.abs(expected - query["kernel"]).max() > 1e-3


def test_decoding_takes_the_merged_weights(adapted, config):
    decoding = backbone.to_decode_layout(adapted, config, jnp.float32)
    expected = backbone.to_decode_layout(lora.merged(adapted), config, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, decoding, expected)


def test_axes_name_every_dimension(adapted, config):
    axes = lora.add_axes(backbone.logical_axes(config), experts=True)
    jax.tree.map(
        lambda names, x: np.testing.assert_equal(len(names), x.ndim),
        axes,
        adapted,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    out = axes["text"]["layers"]["attention"]["out"]
    assert out["lora_a"] == ("layers", "heads", "head_dim", None)
    assert out["lora_b"] == ("layers", None, "embed")


@pytest.mark.parametrize("family", ["qwen3_vl_moe"], indirect=True)
def test_experts_have_adapters_of_their_own_if_asked(adapted, params, config):
    mlp = adapted["text"]["layers"]["mlp"]
    down, (E, D) = mlp["experts"]["down"], (config.text.num_experts, config.text.hidden_size)
    assert down["lora_a"].shape == (3, E, config.text.intermediate_size, 2)
    assert down["lora_b"].shape == (3, E, 2, D) and mlp["router"].keys() == {"kernel"}
    merged = lora.merged(adapted)["text"]["layers"]["mlp"]["experts"]["down"]["kernel"]
    change = 6.0 / 2 * np.einsum("lefr,lerd->lefd", down["lora_a"], down["lora_b"])
    np.testing.assert_allclose(merged, down["kernel"] + change, atol=1e-6)
    unasked = lora.add(params, jax.random.key(1), rank=2, alpha=6.0)
    assert unasked["text"]["layers"]["mlp"]["experts"]["down"].keys() == {"kernel"}
    assert "lora_a" in unasked["text"]["layers"]["attention"]["q"]


def test_adding_again_starts_anew(adapted, params):
    again = lora.add(adapted, jax.random.key(3), rank=4, alpha=4.0)
    jax.tree.map(np.testing.assert_array_equal, lora.merged(again), params)
    assert again["text"]["layers"]["attention"]["q"]["lora_a"].shape[-1] == 4
