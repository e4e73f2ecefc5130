"""One computation, several layouts: tree rows, decoding, remat and padding change no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import backbone
from models.attention_mask import causal_reach

B, R, T = 2, 3, 5


@pytest.fixture(scope="module")
def prompts(make_batch):
    return make_batch([[(4, 6)], [(4, 4), (2, 6)]])


@pytest.fixture(scope="module")
def responses():
    return np.random.default_rng(1).integers(0, 100, (B, R, T))


@pytest.fixture(scope="module")
def features(params, prompts, config):
    encode = jax.jit(lambda p: backbone.encode_images(p, prompts.images, config, dtype=jnp.float32))
    return encode(params)


def embed_prompts(params, prompts, features):
    return backbone.embed(
        params, prompts.tokens, dtype=jnp.float32, features=features, slots=prompts.slots
    )


def response_positions(prompts):
    """[B, T, 3]: a response goes on where its prompt ended."""
    positions = prompts.next_position[:, None] + jnp.arange(T)
    return jnp.repeat(positions[..., None], 3, axis=-1)


def tree_row(params, prompts, features, responses, config, remat="none"):
    """Hidden states [B, R, T, D] of responses that share one row, and the prompt's [B, P, D]."""
    x = embed_prompts(params, prompts, features)
    P = x.shape[1]
    own = backbone.embed(params, responses.reshape(B, -1), dtype=jnp.float32)
    own_positions = jnp.tile(response_positions(prompts), (1, R, 1))
    prompt_reach = np.where(prompts.is_valid, P + R * T - 1, np.arange(P))
    branch_reach = np.repeat(P + T * np.arange(1, R + 1) - 1, T)
    reach = np.concatenate([prompt_reach, np.tile(branch_reach, (B, 1))], axis=1)
    hidden = backbone.forward(
        params,
        jnp.concatenate([x, own], axis=1),
        jnp.concatenate([prompts.positions, own_positions], axis=1),
        backbone.text_mask(reach, config),
        config,
        remat=remat,
        features=features,
        slots=np.pad(prompts.slots, ((0, 0), (0, R * T)), constant_values=-1),
    )
    return hidden[:, P:].reshape(B, R, T, -1), hidden[:, :P]


def replicated_rows(params, prompts, features, responses, config):
    """The same from R rows that each repeat the prompt."""
    x = embed_prompts(params, prompts, features)
    P = x.shape[1]
    segments = np.where(np.pad(prompts.is_valid, ((0, 0), (0, T)), constant_values=True), 0, -1)
    mask = backbone.text_mask(causal_reach(segments), config)
    slots = np.pad(prompts.slots, ((0, 0), (0, T)), constant_values=-1)
    positions = jnp.concatenate([prompts.positions, response_positions(prompts)], axis=1)

    def row(tokens):
        own = backbone.embed(params, tokens, dtype=jnp.float32)
        x_row = jnp.concatenate([x, own], axis=1)
        hidden = backbone.forward(
            params, x_row, positions, mask, config, features=features, slots=slots
        )
        return hidden[:, P:]

    return jax.lax.map(row, responses.swapaxes(0, 1)).swapaxes(0, 1)


def gradients(hidden_of, params, features, config):
    """Gradients of a random linear loss on the logits, by text parameter and by feature."""
    probe = jax.random.normal(jax.random.key(2), (B, R, T, config.text.vocab_size))

    def loss(text, features):
        hidden = hidden_of({"text": text}, features)
        return (backbone.unembed({"text": text}, hidden, config) * probe).mean(), hidden

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params["text"], features)


def assert_close_gradients(ours, theirs, relative):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=relative * np.abs(b).max())


@pytest.fixture(scope="module")
def tree_gradients(params, prompts, features, responses, config):
    return gradients(
        lambda p, f: tree_row(p, prompts, f, responses, config)[0], params, features, config
    )


@pytest.fixture(scope="module")
def expected(params, prompts, features, responses, config):
    return jax.jit(lambda p: tree_row(p, prompts, features, responses, config))(params)


def test_tree_row_equals_replicated_rows_in_values_and_gradients(
    params, prompts, features, responses, config, tree_gradients
):
    replicated, replicated_hidden = gradients(
        lambda p, f: replicated_rows(p, prompts, f, responses, config), params, features, config
    )
    tree, hidden = tree_gradients
    np.testing.assert_allclose(hidden, replicated_hidden, rtol=0, atol=2e-5)
    assert_close_gradients(tree, replicated, 1e-4)


@pytest.mark.parametrize("remat", ["layer", "dots"])
def test_decoder_remat_equals_no_remat(
    remat, params, prompts, features, responses, config, tree_gradients
):
    recomputed, _ = gradients(
        lambda p, f: tree_row(p, prompts, f, responses, config, remat=remat)[0],
        params,
        features,
        config,
    )
    assert_close_gradients(recomputed, tree_gradients[0], 1e-5)


def test_tower_remat_equals_no_remat(params, prompts, config):
    def gradient(remat):
        def loss(vision):
            features = backbone.encode_images(
                {"vision": vision}, prompts.images, config, dtype=jnp.float32, remat=remat
            )
            return sum(jnp.square(leaf).mean() for leaf in jax.tree.leaves(features))

        return jax.jit(jax.grad(loss))(params["vision"])

    assert_close_gradients(gradient("layer"), gradient("none"), 1e-5)


def test_unknown_remat_is_refused(params, prompts, config):
    with pytest.raises(ValueError, match="remat must be one of none, dots, layer, got 'full'"):
        backbone.encode_images(params, prompts.images, config, dtype=jnp.float32, remat="full")


def causal(start, length):
    """Each of `length` tokens from slot `start` on sees the slots up to its own."""
    is_visible = jnp.arange(T + 2) <= start + jnp.arange(length)[:, None]
    return jnp.broadcast_to(is_visible, (B, R, *is_visible.shape))


@pytest.mark.parametrize("chunks", [(1,) * T, (3, 2)])
def test_decoding_equals_the_full_forward(
    params, prompts, features, responses, config, expected, chunks
):
    expected_hidden, expected_prompt = expected

    @jax.jit
    def decode(params):
        params = backbone.to_decode_layout(params, config, jnp.float32)
        x = embed_prompts(params, prompts, features)
        prompt_hidden, prefix = backbone.prefill(
            params,
            x,
            prompts.positions,
            prompts.is_valid,
            config,
            features=features,
            slots=prompts.slots,
        )
        suffix = backbone.init_cache(config, B, R, T + 2, jnp.float32)
        outs, start = [], 0
        for length in chunks:
            new = slice(start, start + length)
            positions = prompts.next_position[:, None, None] + jnp.arange(T)[new]
            hidden, suffix = backbone.extend(
                params,
                backbone.embed(params, responses[:, :, new], dtype=jnp.float32),
                backbone.text_rotary(jnp.broadcast_to(positions, (B, R, length)), config),
                jnp.int32(start),
                prefix,
                prompts.is_valid,
                suffix,
                causal(start, length),
                config,
            )
            outs.append(hidden)
            start += length
        hidden = jnp.concatenate(outs, axis=2)
        return hidden, prompt_hidden, backbone.unembed(params, hidden, config)

    hidden, prompt_hidden, logits = decode(params)
    valid = prompts.is_valid
    np.testing.assert_allclose(hidden, expected_hidden, rtol=0, atol=2e-5)
    np.testing.assert_allclose(prompt_hidden[valid], expected_prompt[valid], rtol=0, atol=2e-5)
    full = backbone.unembed(params, expected_hidden, config)
    assert full.dtype == logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, full, rtol=0, atol=5e-5)


def test_invalid_suffix_slots_are_unseen(params, prompts, features, responses, config, expected):
    """Forced tokens may be right-aligned in a row: what stands before them is not seen."""

    @jax.jit
    def decode(params):
        params = backbone.to_decode_layout(params, config, jnp.float32)
        x = embed_prompts(params, prompts, features)
        _, prefix = backbone.prefill(
            params,
            x,
            prompts.positions,
            prompts.is_valid,
            config,
            features=features,
            slots=prompts.slots,
        )
        suffix = backbone.init_cache(config, B, R, T + 2, jnp.float32)
        tokens = np.pad(responses, ((0, 0), (0, 0), (2, 0)))
        positions = prompts.next_position[:, None, None] + jnp.arange(-2, T)
        hidden, _ = backbone.extend(
            params,
            backbone.embed(params, tokens, dtype=jnp.float32),
            backbone.text_rotary(jnp.broadcast_to(positions, (B, R, T + 2)), config),
            jnp.int32(0),
            prefix,
            prompts.is_valid,
            suffix,
            causal(0, T + 2) & (jnp.arange(T + 2) >= 2),
            config,
        )
        return hidden[:, :, 2:]

    np.testing.assert_allclose(decode(params), expected[0], rtol=0, atol=2e-5)


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
    up = params["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(np.std(up), config.text.hidden_size**-0.5, rtol=0.05)
    table = params["embed"]["table"]
    np.testing.assert_allclose(np.std(table), config.text.hidden_size**-0.5, rtol=0.05)
    assert not np.array_equal(up[0], up[1])
    if config.text.qkv_bias:
        assert not np.any(params["layers"]["attention"]["q"]["bias"])
    assert np.all(params["norm"]["scale"] == 1)


def test_bfloat16_features_stay_close_to_float32(params, prompts, features, config):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    encode = jax.jit(
        lambda p: backbone.encode_images(p, prompts.images, config, dtype=jnp.bfloat16)
    )
    used = np.asarray(prompts.images.segments)[:, ::4] >= 0
    for ours, exact in zip(*map(jax.tree.leaves, (encode(half), features)), strict=True):
        assert ours.dtype == jnp.bfloat16
        error = np.abs(ours.astype(jnp.float32) - exact)[..., used, :]
        assert error.mean() < 0.05 * np.abs(exact[..., used, :]).mean()
