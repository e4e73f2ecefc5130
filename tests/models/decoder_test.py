"""One computation, several layouts: tree rows, decoding, remat and padding change no number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import backbone, decoder, experts
from models.attention.packed import attend, causal_reach
from models.layers import rms_norm, text_rotary
from models.vision import ImageFeatures

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
        params,
        prompts.tokens,
        dtype=jnp.float32,
        features=features,
        feature_index=prompts.feature_index,
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
    hidden, _ = backbone.forward(
        params,
        jnp.concatenate([x, own], axis=1),
        jnp.concatenate([prompts.positions, own_positions], axis=1),
        backbone.text_mask(reach, config),
        config,
        remat=remat,
        features=features,
        feature_index=np.pad(prompts.feature_index, ((0, 0), (0, R * T)), constant_values=-1),
    )
    return hidden[:, P:].reshape(B, R, T, -1), hidden[:, :P]


def replicated_rows(params, prompts, features, responses, config):
    """The same from R rows that each repeat the prompt."""
    x = embed_prompts(params, prompts, features)
    P = x.shape[1]
    segments = np.where(np.pad(prompts.is_valid, ((0, 0), (0, T)), constant_values=True), 0, -1)
    mask = backbone.text_mask(causal_reach(segments), config)
    feature_index = np.pad(prompts.feature_index, ((0, 0), (0, T)), constant_values=-1)
    positions = jnp.concatenate([prompts.positions, response_positions(prompts)], axis=1)

    def row(tokens):
        own = backbone.embed(params, tokens, dtype=jnp.float32)
        x_row = jnp.concatenate([x, own], axis=1)
        hidden, _ = backbone.forward(
            params, x_row, positions, mask, config, features=features, feature_index=feature_index
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


@pytest.mark.parametrize(
    ("family", "remat"), [("qwen2_5_vl", "layer"), ("qwen3_vl", "dots")], indirect=["family"]
)
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


@pytest.fixture(scope="module")
def decode(params, prompts, features, config):
    """(pieces) -> hidden states of prefill and of each piece, from the decode layout.

    A piece is (tokens [B, R, S], first position behind the prompt, first slot, mask [S, T + 2]).
    """

    def decode(pieces):
        @jax.jit
        def run(params):
            params = backbone.to_decode_layout(params, config, jnp.float32)
            x = embed_prompts(params, prompts, features)
            inputs = prompts.positions, prompts.is_valid, config
            images = {"features": features, "feature_index": prompts.feature_index}
            prompt_hidden, prefix = backbone.prefill(params, x, *inputs, **images)
            suffix = backbone.init_cache(config, B, R, T + 2, jnp.float32)
            outs = []
            for tokens, position, slot, is_visible in pieces:
                S = tokens.shape[-1]
                positions = prompts.next_position[:, None, None] + position + jnp.arange(S)
                positions = jnp.broadcast_to(positions, (B, R, S))
                hidden, suffix, _ = backbone.extend(
                    params,
                    backbone.embed(params, tokens, dtype=jnp.float32),
                    backbone.text_rotary(positions, config),
                    jnp.int32(slot),
                    prefix,
                    prompts.is_valid,
                    suffix,
                    jnp.broadcast_to(is_visible, (B, R, S, T + 2)),
                    config,
                )
                outs.append(hidden)
            hidden = jnp.concatenate(outs, axis=2)
            return hidden, prompt_hidden, backbone.unembed(params, hidden, config)

        return run(params)

    return decode


def causal(start, length):
    """[S, T + 2]: each of `length` tokens from slot `start` on sees the slots up to its own."""
    return np.arange(T + 2) <= start + np.arange(length)[:, None]


def test_decoding_equals_the_full_forward(params, prompts, responses, config, expected, decode):
    """Several tokens at once, then one at a time."""
    expected_hidden, expected_prompt = expected
    chunks = (3, 1, 1)
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    hidden, prompt_hidden, logits = decode(
        [
            (responses[:, :, start : start + length], start, start, causal(start, length))
            for start, length in zip(starts, chunks, strict=True)
        ]
    )
    valid = prompts.is_valid
    np.testing.assert_allclose(hidden, expected_hidden, rtol=0, atol=2e-5)
    np.testing.assert_allclose(prompt_hidden[valid], expected_prompt[valid], rtol=0, atol=2e-5)
    full = backbone.unembed(params, expected_hidden, config)
    assert full.dtype == logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, full, rtol=0, atol=5e-5)


def test_invalid_suffix_slots_are_unseen(responses, expected, decode):
    """Forced tokens may be right-aligned in a row: what stands before them is not seen."""
    tokens = np.pad(responses, ((0, 0), (0, 0), (2, 0)))
    hidden, *_ = decode([(tokens, -2, 0, causal(0, T + 2) & (np.arange(T + 2) >= 2))])
    np.testing.assert_allclose(hidden[:, :, 2:], expected[0], rtol=0, atol=2e-5)


# What follows is of no family: the decoder alone, on made-up embeddings.
alone = pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)


def embedded(config, *shape):
    return jax.random.normal(jax.random.key(5), (*shape, config.text.hidden_size))


def text_positions(*positions):
    """[1, S, 3]: time = height = width."""
    return jnp.repeat(jnp.array(positions)[None, :, None], 3, axis=-1)


@pytest.fixture(scope="module")
def one_layer(params, config):
    """The decode layout of the decoder's first layer, and its config."""
    text = dataclasses.replace(config.text, num_layers=1)
    vision = dataclasses.replace(config.vision, deepstack_layers=config.vision.deepstack_layers[:1])
    config = dataclasses.replace(config, text=text, vision=vision)
    first = params["text"] | {"layers": jax.tree.map(lambda a: a[:1], params["text"]["layers"])}
    return {"text": jax.jit(lambda p: decoder.to_decode_layout(p, config.text))(first)}, config


@alone
def test_features_are_added_behind_their_layers_to_the_tokens_of_their_slots(params, config):
    """Two DeepStack layers of three; token 1 shows feature 2, and token 4 feature 0."""
    text, x, positions = config.text, embedded(config, 1, 6), text_positions(*range(6))
    features = jax.random.normal(jax.random.key(6), (2, 1, 3, text.hidden_size))
    feature_index = jnp.array([[-1, 2, -1, -1, 0, -1]])
    added = dict(features=ImageFeatures(features[0], features), feature_index=feature_index)
    mask = backbone.text_mask(jnp.full((1, 6), 5), config)

    def by_hand(p, x):
        for l in range(3):
            layer = jax.tree.map(lambda a, l=l: a[l], p["layers"])
            see = lambda q, k, v: (attend(q, k, v, mask), None)  # noqa: E731
            x, *_ = decoder.decoder_layer(layer, x, text_rotary(positions, text), see, text)
            if l < 2:
                x = x.at[0, 1].add(features[l, 0, 2]).at[0, 4].add(features[l, 0, 0])
        return rms_norm(p["norm"], x, text.norm_eps)

    @jax.jit
    def hidden_states(params, x):
        trained, _ = decoder.forward(params, x, positions, mask, config, **added)
        layout = {"text": decoder.to_decode_layout(params["text"], text)}
        is_valid = jnp.ones((1, 6), bool)
        prefilled, _ = decoder.prefill(layout, x, positions, is_valid, config, **added)
        return by_hand(params["text"], x), trained, prefilled

    expected, trained, prefilled = hidden_states(params, x)
    np.testing.assert_allclose(trained, expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(prefilled, expected, rtol=0, atol=2e-5)


def test_slots_take_their_features_and_other_tokens_keep_what_they_have():
    features = jnp.array([[[1.0], [2.0]], [[3.0], [4.0]]])
    feature_index = jnp.array([[-1, 1, 0], [0, -1, -1]])
    assert decoder.gather_features(features, feature_index, 9.0)[..., 0].tolist() == [
        [9, 2, 1],
        [3, 9, 9],
    ]
    own = 10 + jnp.arange(6.0).reshape(2, 3, 1)
    assert decoder.gather_features(features, feature_index, own)[..., 0].tolist() == [
        [10, 2, 1],
        [3, 14, 15],
    ]


@pytest.fixture(scope="module")
def extend(one_layer):
    """(padding [D], suffix [1, 2, 7], slots to see [2, 7]) -> states [1, 2, 2, D] and cache.

    Both rows of a prompt of three tokens, with padding in front, read the same two tokens, which
    go to slots 3 and 4.
    """
    params, config = one_layer
    x, is_valid = embedded(config, 1, 6), jnp.array([[False, True, True, True]])
    rotary = text_rotary(jnp.broadcast_to(text_positions(3, 4), (1, 2, 2, 3)), config.text)
    new = jnp.broadcast_to(x[:, None, 4:], (1, 2, 2, config.text.hidden_size))

    @jax.jit
    def extend(padding, suffix, is_visible):
        prompt = x[:, :4].at[:, 0].set(padding)
        positions = text_positions(0, 0, 1, 2)
        _, prefix = decoder.prefill(params, prompt, positions, is_valid, config)
        is_visible = jnp.broadcast_to(is_visible, (1, 2, 2, 7))
        fixed = jnp.int32(3), prefix, is_valid, suffix, is_visible, config
        return decoder.extend(params, new, rotary, *fixed)[:2]

    return extend


def random_cache(one_layer, seed):
    rng = np.random.default_rng(seed)
    empty = decoder.init_cache(one_layer[1], 1, 2, 7, jnp.float32)
    return jax.tree.map(lambda a: jnp.float32(rng.normal(size=a.shape)), empty)


# The first new token sees one old slot and its own; the second also the first.
VISIBLE = np.zeros((2, 7), bool)
VISIBLE[:, 1] = VISIBLE[:, 3] = VISIBLE[1, 4] = True


@alone
def test_new_tokens_are_written_from_the_index_on_and_nowhere_else(extend, one_layer):
    cache = random_cache(one_layer, 0)
    _, new = extend(0.0, cache, VISIBLE)
    for is_new in (new.keys[0] != cache.keys[0], (new.values[0] != cache.values[0]).mT):
        by_slot = np.asarray(is_new).reshape(-1, 7)
        assert by_slot.all(0).tolist() == [False, False, False, True, True, False, False]
        assert by_slot.any(0).tolist() == by_slot.all(0).tolist()


@alone
def test_a_row_reads_the_visible_slots_of_its_own_cache_alone(extend, one_layer):
    cache, noise = random_cache(one_layer, 0), random_cache(one_layer, 1)
    hidden, _ = extend(0.0, cache, VISIBLE)

    def is_moved(row, slots):
        """Which rows' states change with the keys and values at these slots of one row."""
        is_changed = (np.arange(2) == row)[:, None, None, None] & np.isin(np.arange(7), slots)
        keys = jnp.where(is_changed, noise.keys[0], cache.keys[0])
        values = jnp.where(is_changed.mT, noise.values[0], cache.values[0])
        moved, _ = extend(0.0, decoder.KeyValues([keys], [values]), VISIBLE)
        return (np.abs(moved - hidden) > 1e-4).any((0, 2, 3)).tolist()

    assert is_moved(0, [0, 2, 3, 4, 5, 6]) == [False, False]
    assert is_moved(0, [1]) == [True, False]
    assert is_moved(1, [1]) == [False, True]


@alone
def test_rows_share_their_prompt_and_see_nothing_of_its_padding(extend, one_layer):
    cache = jax.tree.map(jnp.zeros_like, random_cache(one_layer, 0))
    hidden, _ = extend(0.0, cache, VISIBLE)
    np.testing.assert_array_equal(hidden[:, 0], hidden[:, 1])
    np.testing.assert_array_equal(extend(7.0, cache, VISIBLE)[0], hidden)


@alone
def test_padding_before_a_prompt_changes_neither_its_states_nor_its_cache(one_layer):
    params, config = one_layer
    x = embedded(config, 1, 8)

    @jax.jit
    def prefill(x):
        whole, is_valid = jnp.ones((1, 6), bool), (jnp.arange(8) >= 2)[None]
        plain = decoder.prefill(params, x[:, 2:], text_positions(*range(6)), whole, config)
        positions = text_positions(0, 0, *range(6))
        return plain, decoder.prefill(params, x, positions, is_valid, config)

    (hidden, cache), (padded_hidden, padded_cache) = prefill(x)
    np.testing.assert_allclose(padded_hidden[:, 2:], hidden, rtol=0, atol=2e-5)
    np.testing.assert_allclose(padded_cache.keys[0][..., 2:], cache.keys[0], atol=2e-5)
    np.testing.assert_allclose(padded_cache.values[0][:, :, 2:], cache.values[0], atol=2e-5)


@pytest.mark.parametrize("tables", [("embed",), ("embed", "unembed")])
@pytest.mark.parametrize("layers", [{}, []], ids=["training", "decoding"])
def test_logits_are_in_float32_from_the_embedding_table_unless_there_is_another(
    config, tables, layers
):
    rng = np.random.default_rng(0)
    p = {name: {"table": jnp.asarray(rng.normal(size=(9, 4)), jnp.bfloat16)} for name in tables}
    hidden = jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.bfloat16)
    text = dataclasses.replace(config.text, tie_embeddings=len(tables) == 1)
    config = dataclasses.replace(config, text=text)
    logits = decoder.unembed({"text": p | {"layers": layers}}, hidden, config)
    assert logits.dtype == jnp.float32
    expected = np.float32(hidden) @ np.float32(p[tables[-1]]["table"]).T
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_axes_of_the_decode_layout_name_its_dimensions(config):
    size = config.text.hidden_size + 8
    text = dataclasses.replace(config.text, num_kv_heads=3, hidden_size=size)
    vision = dataclasses.replace(config.vision, output_size=size)
    config = dataclasses.replace(config, text=text, vision=vision)
    shapes = jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))["text"]
    shapes = jax.eval_shape(lambda p: decoder.to_decode_layout(p, text), shapes)
    axes = decoder.decode_axes(backbone.logical_axes(config)["text"], text)
    sizes = {
        "embed": text.hidden_size,
        "heads": text.num_heads * text.head_dim,  # merged into one axis of the output's kernel
        "kv_heads": text.num_kv_heads,
        "head_dim": text.head_dim,
        "mlp": text.intermediate_size,
        "vocab": text.vocab_size,
    }
    if text.num_experts:
        del sizes["mlp"]  # of experts, it has no name
    name_of = {size: name for name, size in sizes.items()}
    assert len(name_of) == len(sizes)  # so that a size tells the name; all others have none
    expected = jax.tree.map(lambda shape: tuple(map(name_of.get, shape.shape)), shapes)
    for layer in expected["layers"] if text.num_experts else ():
        layer["mlp"]["experts"] = {
            "gate_up": {"kernel": experts.UP},
            "down": {"kernel": experts.DOWN},
        }
    assert axes == expected
