"""An exported adapter on the base in `peft` computes what our merged weights do."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_backbones import all_families, reference_inputs

from models import backbone, lora
from models.attention.packed import causal_reach
from models.release import config_json, peft_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

RANK, ALPHA = 2, 6.0


@pytest.fixture(scope="module")
def adapted(params):
    """The adapters of two stages that have learned something."""

    def learned(seed):
        added = lora.add(params, jax.random.key(seed), rank=RANK, alpha=ALPHA, experts=True)
        adapters = lora.only(added)

        def draw(path, x):
            if path[-1].key != "lora_b":
                return x
            return 0.1 * jax.random.normal(jax.random.key(seed + 10 * len(path)), x.shape)

        return jax.tree_util.tree_map_with_path(draw, adapters)

    return learned(1), learned(2)


def with_adapters(params, adapters):
    """The adapters folded into the parameters."""

    def joined(one, other):
        if not isinstance(one, dict):
            return one
        return {key: joined(one[key], other.get(key, {})) for key in one} | {
            key: leaf for key, leaf in other.items() if key not in one
        }

    return lora.merged(joined(params, adapters))


@pytest.fixture(scope="module")
def exported(params, config, adapted, tmp_path_factory):
    """(folder of the base, folder of the adapter that both stages make)."""
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    backbone.export(base, params, config, dtype=jnp.float32)
    both = lora.concatenated(adapted)
    peft_folder.export(folder, both, config, alpha=2 * ALPHA, base=str(base))
    return base, folder


def our_logits(params, batch, config):
    x, features = backbone.embed_with_images(
        params, batch.tokens, batch.images, batch.feature_index, config, dtype=jnp.float32
    )
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
    return np.asarray(backbone.unembed(params, hidden, config))


@all_families
def test_peft_computes_the_logits_of_the_merged_weights(
    exported, params, config, adapted, make_batch
):
    """All adapters are taken and none is missing; the base alone gives other logits."""
    base, folder = exported
    architecture = getattr(transformers, config_json.to_hf(config)["architectures"][0])
    model = architecture.from_pretrained(base).eval()
    batch = make_batch([[(4, 6)], [], [(8, 8), (2, 2)]] if config.vision else [[], []])
    inputs = reference_inputs(batch, config)
    with torch.no_grad():
        without = model(**inputs).logits.numpy()
        wrapped = peft.PeftModel.from_pretrained(model, folder).eval()
        expected = wrapped(**inputs).logits.numpy()
    ours = our_logits(with_adapters(with_adapters(params, adapted[0]), adapted[1]), batch, config)
    is_valid = batch.is_valid
    assert np.abs(expected - without)[is_valid].max() > 0.1
    np.testing.assert_allclose(ours[is_valid], expected[is_valid], rtol=0, atol=1e-4)
    loaded = {
        name: weight.numpy() for name, weight in peft.get_peft_model_state_dict(wrapped).items()
    }
    written = load_file(folder / peft_folder.WEIGHTS)
    assert loaded.keys() == written.keys()
    for name in loaded:
        np.testing.assert_array_equal(loaded[name], written[name])


@all_families
def test_the_folder_is_in_the_layout_that_vllm_reads(exported, config):
    """Names of lora_A and lora_B alone under the prefix it strips, and a pattern it can parse.

    Those of experts are named as `peft` names them, see the test above.

    vLLM takes the modules' names out of the pattern's last parentheses.
    """
    folder = exported[1]
    written = load_file(folder / peft_folder.WEIGHTS)
    names = {name: a for name, a in written.items() if ".mlp.experts." not in name}
    fields = json.loads((folder / "adapter_config.json").read_text())
    targets = re.search(r"\((.*?)\)\$?$", fields["target_modules"]).group(1).split("|")
    decoder = r"model\.language_model" if config.vision else "model"
    layer = rf"base_model\.model\.({decoder}\.layers\.\d+\.\w+\.(\w+))\.lora_[AB]\.weight"
    modules = [re.fullmatch(layer, name) for name in names]
    assert all(modules)
    assert {match.group(2) for match in modules} == set(targets)
    assert all(re.fullmatch(fields["target_modules"], match.group(1)) for match in modules)
    num_adapted = 4 if config.text.num_experts else 7  # of a sparse decoder, the attention
    assert len(names) == 2 * num_adapted * config.text.num_layers
    assert len(written) - len(names) == (4 * config.text.num_layers if num_adapted == 4 else 0)
    assert fields["r"] == 2 * RANK and fields["lora_alpha"] == 2 * ALPHA
    assert all(
        tensor.shape[0 if ".lora_A." in name else 1] == 2 * RANK for name, tensor in names.items()
    )
