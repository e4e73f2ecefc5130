"""Parameters: the names of their axes, what they are drawn from, the dtype they are read in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_backbones import all_families

from models import backbone
from models.attention.packed import causal_reach


def test_axes_name_every_dimension_and_every_model_axis(config):
    shapes = jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))
    axes = backbone.logical_axes(config)
    is_axes = lambda node: isinstance(node, tuple)  # noqa: E731
    jax.tree.map(lambda s, a: None if s.ndim == len(a) else pytest.fail(f"{s} {a}"), shapes, axes)
    sizes = {
        "embed": {config.text.hidden_size, config.vision.hidden_size},
        "layers": {
            config.text.num_layers,
            config.vision.num_layers,
            len(config.vision.deepstack_layers),
        },
        "vocab": {config.text.vocab_size},
    }
    for shape, names in zip(
        jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=is_axes), strict=True
    ):
        for size, name in zip(shape.shape, names, strict=True):
            assert size in sizes.get(name, {size})


def test_init_has_variance_one_over_fan_in_and_differs_by_layer(config):
    params = jax.jit(lambda: backbone.init(config, jax.random.key(0)))()["text"]
    mlp = params["layers"]["mlp"]
    up = mlp["experts"]["gate_up"]["kernel"] if config.text.num_experts else mlp["up"]["kernel"]
    np.testing.assert_allclose(np.std(up), config.text.hidden_size**-0.5, rtol=0.05)
    table = params["embed"]["table"]
    np.testing.assert_allclose(np.std(table), config.text.hidden_size**-0.5, rtol=0.05)
    assert not np.array_equal(up[0], up[1])
    if config.text.qkv_bias:
        assert not np.any(params["layers"]["attention"]["q"]["bias"])
    assert np.all(params["norm"]["scale"] == 1)


@all_families
def test_a_decoder_reads_its_weights_in_the_compute_dtype_alone(config, params):
    """A reference policy kept in bfloat16 has the log-probabilities of the float32 weights."""
    tokens = jnp.arange(12)[None]
    positions = jnp.repeat(tokens[..., None], 3, axis=-1)
    mask = backbone.text_mask(causal_reach(jnp.zeros_like(tokens)), config)

    @jax.jit
    def logits_of(params):
        x = backbone.embed(params, tokens, dtype=jnp.bfloat16)
        hidden, _ = backbone.forward(params, x, positions, mask, config)
        return backbone.policy_logits(params, hidden, config)

    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params["text"])
    assert low["norm"]["scale"].dtype != params["text"]["norm"]["scale"].dtype
    np.testing.assert_array_equal(logits_of({"text": low}), logits_of({"text": params["text"]}))
