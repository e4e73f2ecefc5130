"""Every family against transformers, float32, on random weights that hide nothing.

Each of these mutations makes a test here fail. Of those with a tower: tanh for erf GELU in the
merger; ε of the text norms doubled, ε of the tower's norms 1e-5; patches in raster order; row and
column rotations swapped; M-RoPE sections reversed; the MLP norm applied before the attention; gate
and up swapped; no rescaling by head size; image features shifted by one; padding left visible; kv
heads grouped in the wrong order. Of Qwen2.5-VL: full attention in place of windows or the reverse;
a missing q, k or v bias. Of those without: norms of queries and keys after the rotation; Llama's
frequencies unscaled, or scaled by another share.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_backbones import WITH_TOWER, all_families, reference_inputs

from models import backbone
from models.attention.packed import causal_reach
from models.families import FAMILIES
from models.release import config_json, weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # threads that wait for each other take minutes on a busy machine

TOLERANCE = 5e-5
PROMPTS = {
    "text": [[]],
    "images of several sizes": [[(6, 10), (4, 4), (2, 6)]],
    "left-padded batch": [[(4, 6)], [], [(8, 8), (2, 2)]],
    "left-padded texts": [[], [], []],
}
TEXT_ONLY = [family for family in FAMILIES if family not in WITH_TOWER]
TIED = ("untied", "tied")


@pytest.fixture(scope="module", params=TIED)
def pair(request, config, tied_config, make_params, tmp_path_factory):
    """(our params, config, transformers' model with the same weights, loaded from our export)."""
    config = config if request.param == "untied" else tied_config
    params = make_params(config)
    folder = tmp_path_factory.mktemp(request.param)
    backbone.export(folder, params, config, dtype=jnp.float32)
    architecture = getattr(transformers, config_json.to_hf(config)["architectures"][0])
    model, report = architecture.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return params, config, model.eval()


def embedded(params, batch, config):
    """Embedded prompts, and the image features in them."""
    images = batch.images if any(map(len, batch.grids)) else None
    return backbone.embed_with_images(
        params, batch.tokens, images, batch.feature_index, config, dtype=jnp.float32
    )


def logits(params, batch, config):
    x, features = embedded(params, batch, config)
    mask = backbone.text_mask(causal_reach(jnp.where(batch.is_valid, 0, -1)), config)
    hidden, _ = backbone.forward(
        params,
        x,
        batch.positions,
        mask,
        config,
        features=features,
        feature_index=batch.feature_index,
    )
    return backbone.unembed(params, hidden, config)


@pytest.mark.parametrize(
    ("family", "pair", "prompts"),
    [
        *((family, "untied", name) for family in WITH_TOWER for name in list(PROMPTS)[:3]),
        *((family, "tied", "left-padded batch") for family in WITH_TOWER),
        *((family, tied, "left-padded texts") for family in TEXT_ONLY for tied in TIED),
    ],
    indirect=["family", "pair"],
)
def test_logits_equal_transformers(pair, make_batch, prompts):
    params, config, model = pair
    batch = make_batch(PROMPTS[prompts])
    with torch.no_grad():
        expected = model(**reference_inputs(batch, config)).logits.numpy()
    ours = np.asarray(jax.jit(lambda p: logits(p, batch, config))(params))
    assert np.abs(expected[batch.is_valid]).max() > 3
    np.testing.assert_allclose(
        ours[batch.is_valid], expected[batch.is_valid], rtol=1e-5, atol=TOLERANCE
    )


untied = pytest.mark.parametrize("pair", ["untied"], indirect=True)


def mixed_prompts(config):
    """Two prompts of different lengths, with images where there is a tower."""
    return [[(10, 6)], [(4, 4), (6, 8)]] if config.vision else [[], []]


@all_families
@untied
def test_gradients_equal_transformers(pair, make_batch):
    """Of the mean log-probability of each token that follows another, by every weight."""
    params, config, model = pair
    batch = make_batch(mixed_prompts(config))
    follows = batch.is_valid[:, :-1]

    def likelihood(p):
        logp = jax.nn.log_softmax(logits(p, batch, config)[:, :-1])
        chosen = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], -1)[..., 0]
        return jnp.where(follows, chosen, 0).sum() / follows.sum()

    ours = weights.leaves_by_path(jax.jit(jax.grad(likelihood))(params))
    model.zero_grad()
    logp = model(**reference_inputs(batch, config)).logits[:, :-1].log_softmax(-1)
    chosen = logp.gather(-1, torch.tensor(batch.tokens[:, 1:, None]))[..., 0]
    chosen[torch.tensor(follows)].mean().backward()
    named = {weights.release_name(n, config.family): p for n, p in model.named_parameters()}
    for path, row in weights.tensors(config, params).items():
        for tensor in row:
            expected = named.pop(tensor.name).grad.numpy()
            if ".experts." in tensor.name:  # transformers transposes a release's when it loads them
                expected = expected.swapaxes(1, 2)
            leaf = np.asarray(ours[path] if tensor.layer is None else ours[path][tensor.layer])
            got = np.concatenate(list(tensor.rows(leaf, np.float32))).reshape(expected.shape)
            worst = np.abs(got - expected).max() / np.abs(expected).max()
            assert worst < 1e-3, (tensor.name, worst)
    assert not named


@untied
def test_image_features_equal_transformers(pair, make_batch):
    """Faint images show the norms' epsilon."""
    params, config, model = pair
    encode = jax.jit(lambda x: backbone.encode_images(params, x, config, dtype=jnp.float32))
    for contrast in (1.0, 1e-3):
        batch = make_batch([[(10, 6), (2, 2), (4, 12)]], contrast=contrast)
        with torch.no_grad():
            visual = model.model.visual
            output = visual(torch.tensor(batch.patches[0]), torch.tensor(batch.grids[0]))
        features = encode(batch.images)
        deepstack = output.deepstack_features if config.vision.deepstack_layers else []
        ours = [features.merged, *(features.deepstack if deepstack else [])]
        for own, expected in zip(ours, [output.pooler_output, *deepstack], strict=True):
            expected = expected.numpy()
            assert np.abs(expected).max() > 1
            own = own[0, batch.feature_index[batch.feature_index >= 0]]
            np.testing.assert_allclose(own, expected, rtol=0, atol=TOLERANCE)


@untied
def test_positions_equal_transformers(pair, make_batch):
    _, config, model = pair
    batch = make_batch(PROMPTS["left-padded batch"])
    inputs = reference_inputs(batch, config)
    del inputs["pixel_values"]
    expected, delta = model.model.get_rope_index(**inputs)
    expected = expected.permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(batch.positions[batch.is_valid], expected[batch.is_valid])
    np.testing.assert_array_equal(batch.next_position - batch.is_valid.sum(1), delta[:, 0].numpy())


@all_families
@untied
def test_greedy_tokens_equal_transformers(pair, make_batch):
    params, config, model = pair
    batch = make_batch(mixed_prompts(config))
    B, P, T = *batch.tokens.shape, 24
    with torch.no_grad():
        expected = model.generate(
            **reference_inputs(batch, config),
            max_new_tokens=T,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=config.pad_token_id,
        )[:, P:].numpy()

    @jax.jit
    def generate(params):
        params = backbone.to_decode_layout(params, config, jnp.float32)
        x, features = embedded(params, batch, config)
        hidden, prefix = backbone.prefill(
            params,
            x,
            batch.positions,
            batch.is_valid,
            config,
            features=features,
            feature_index=batch.feature_index,
        )
        token = backbone.unembed(params, hidden[:, -1:], config).argmax(-1)
        suffix = backbone.init_cache(config, B, 1, T, jnp.float32)

        def step(carry, t):
            token, suffix = carry
            hidden, suffix, _ = backbone.extend(
                params,
                backbone.embed(params, token[..., None], dtype=jnp.float32),
                backbone.text_rotary(batch.next_position[:, None, None] + t, config),
                t,
                prefix,
                batch.is_valid,
                suffix,
                jnp.broadcast_to(jnp.arange(T) <= t, (B, 1, 1, T)),
                config,
            )
            after = backbone.unembed(params, hidden[:, :, 0], config).argmax(-1)
            return (after, suffix), token[:, 0]

        _, tokens = jax.lax.scan(step, (token, suffix), jnp.arange(T))
        return tokens.T

    np.testing.assert_array_equal(generate(params), expected)
    assert np.unique(expected).size > 4
