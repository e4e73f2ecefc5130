"""config.json in its layouts, what is refused, and the presets against the published numbers."""

import copy
import dataclasses
import json

import pytest

from models.config import BackboneConfig, RopeScaling, TextConfig
from models.release import config_json
from models.release.known import RELEASES as KNOWN

QWEN2_5_VL_3B = KNOWN["Qwen/Qwen2.5-VL-3B-Instruct"]
QWEN3_VL_4B = KNOWN["Qwen/Qwen3-VL-4B-Instruct"]
PRESETS = {
    name.removeprefix("Qwen/").removesuffix("-Instruct").lower(): preset
    for name, preset in KNOWN.items()
}
# As the releases' own config.json have them.
PUBLISHED_TEXT = {
    # hidden, mlp, layers, heads, kv heads, vocabulary, tied, rope theta, M-RoPE sections
    "qwen2.5-vl-3b": (2048, 11008, 36, 16, 2, 151936, True, 1e6, (16, 24, 24)),
    "qwen2.5-vl-7b": (3584, 18944, 28, 28, 4, 152064, False, 1e6, (16, 24, 24)),
    "qwen3-vl-4b": (2560, 9728, 36, 32, 8, 151936, True, 5e6, (24, 20, 20)),
    "qwen3-vl-8b": (4096, 12288, 36, 32, 8, 151936, False, 5e6, (24, 20, 20)),
    "qwen2.5-vl-32b": (5120, 27648, 64, 40, 8, 152064, False, 1e6, (16, 24, 24)),
    "qwen2.5-vl-72b": (8192, 29568, 80, 64, 8, 152064, False, 1e6, (16, 24, 24)),
    "qwen3-vl-2b": (2048, 6144, 28, 16, 8, 151936, True, 5e6, (24, 20, 20)),
    "qwen3-vl-32b": (5120, 25600, 64, 64, 8, 151936, False, 5e6, (24, 20, 20)),
    "qwen3-vl-30b-a3b": (2048, 768, 48, 32, 4, 151936, False, 5e6, (24, 20, 20)),
    "qwen3-vl-235b-a22b": (4096, 1536, 94, 64, 4, 151936, False, 5e6, (24, 20, 20)),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False, 1e6, (64, 0, 0)),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 151936, False, 1e6, (64, 0, 0)),
}
PUBLISHED_VISION = {
    # depth, width, mlp, output, patch, window, full attention, positions, DeepStack
    "qwen2.5-vl-3b": (32, 1280, 3420, 2048, 14, 112, (7, 15, 23, 31), 0, ()),
    "qwen2.5-vl-7b": (32, 1280, 3420, 3584, 14, 112, (7, 15, 23, 31), 0, ()),
    "qwen3-vl-4b": (24, 1024, 4096, 2560, 16, 0, (), 2304, (5, 11, 17)),
    "qwen3-vl-8b": (27, 1152, 4304, 4096, 16, 0, (), 2304, (8, 16, 24)),
    "qwen2.5-vl-32b": (32, 1280, 3456, 5120, 14, 112, (7, 15, 23, 31), 0, ()),
    "qwen2.5-vl-72b": (32, 1280, 3456, 8192, 14, 112, (7, 15, 23, 31), 0, ()),
    "qwen3-vl-2b": (24, 1024, 4096, 2048, 16, 0, (), 2304, (5, 11, 17)),
    "qwen3-vl-32b": (27, 1152, 4304, 5120, 16, 0, (), 2304, (8, 16, 24)),
    "qwen3-vl-30b-a3b": (27, 1152, 4304, 2048, 16, 0, (), 2304, (8, 16, 24)),
    "qwen3-vl-235b-a22b": (27, 1152, 4304, 4096, 16, 0, (), 2304, (8, 16, 24)),
}
TOKENS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}


def qwen2_5_release() -> dict:
    """The 3B release's config.json, text fields at the top level."""
    return {
        "model_type": "qwen2_5_vl",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        **TOKENS,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }


def qwen3_release() -> dict:
    """The 4B release's config.json, text fields nested, no padding token."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": True,
        **TOKENS,
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024,
            "in_channels": 3,
            "intermediate_size": 4096,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def qwen3_moe_release() -> dict:
    """Qwen3-VL-30B-A3B's config.json."""
    release = qwen3_release()
    release |= {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    release |= {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False}
    release["text_config"] |= {
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    }
    del release["text_config"]["tie_word_embeddings"]
    release["vision_config"] |= {"deepstack_visual_indexes": [8, 16, 24], "depth": 27}
    release["vision_config"] |= {"hidden_size": 1152, "intermediate_size": 4304}
    release["vision_config"] |= {"out_hidden_size": 2048, "model_type": "qwen3_vl_moe"}
    return release


def qwen3_text_release() -> dict:
    """The text-only 8B release's config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def llama_release() -> dict:
    """Llama-3.1-8B-Instruct's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    }


RELEASES = {
    "qwen2.5-vl-3b": qwen2_5_release(),
    "qwen3-vl-4b": qwen3_release(),
    "qwen3-vl-30b-a3b": qwen3_moe_release(),
    "qwen3-8b": qwen3_text_release(),
    "llama-3.1-8b": llama_release(),
}
LLAMA_3_1_8B = BackboneConfig(
    vision=None,
    text=TextConfig(
        *(32, 4096, 14336, 32, 8, 128, 128256),
        norm_eps=1e-5,
        rope_theta=5e5,
        mrope_section=(64, 0, 0),
        tie_embeddings=False,
        max_position_embeddings=131072,
        qkv_bias=False,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
    family="llama",
    eos_token_ids=(128001, 128008, 128009),
    pad_token_id=128001,
    bos_token_id=128000,
)
READ = {**PRESETS, "llama-3.1-8b": LLAMA_3_1_8B}
PADDING = {"pad_token_id": 151643}  # of generation_config.json, in all Qwen releases
GENERATION = dict.fromkeys(PRESETS, PADDING) | {"llama-3.1-8b": {}}


@pytest.mark.parametrize("name", RELEASES)
def test_release_is_the_preset(name):
    assert config_json.from_hf(RELEASES[name], GENERATION[name]) == READ[name]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_numbers(name):
    config = PRESETS[name]
    text, vision = config.text, config.vision
    assert PUBLISHED_TEXT[name] == (
        *(text.hidden_size, text.intermediate_size, text.num_layers, text.num_heads),
        *(text.num_kv_heads, text.vocab_size, text.tie_embeddings, text.rope_theta),
        text.mrope_section,
    )
    if name in PUBLISHED_VISION:
        assert PUBLISHED_VISION[name] == (
            *(vision.num_layers, vision.hidden_size, vision.intermediate_size, vision.output_size),
            *(vision.patch_size, vision.window_size, vision.full_attention_layers),
            *(vision.num_position_embeddings, vision.deepstack_layers),
        )
        assert (vision.num_heads, vision.merge_size) == (16, 2)
    assert (text.head_dim, text.norm_eps) == (128, 1e-6)
    experts = (128, 8) if "-a" in name else (0, 0)
    assert (text.num_experts, text.num_experts_per_token) == experts
    tokens = TOKENS if vision else dict.fromkeys(TOKENS)
    assert {token: getattr(config, token) for token in TOKENS} == tokens
    assert (config.eos_token_ids, config.pad_token_id) == ((151645,), 151643)
    is_third = name.startswith("qwen3")
    assert (text.qkv_bias, text.qk_norm, text.mrope_interleaved) == (
        *(not is_third, is_third, is_third and vision is not None),
    )


def opened_by_transformers(fields: dict):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(**fields)


@pytest.mark.parametrize("name", READ)
def test_config_survives_its_own_file_and_transformers(name):
    config = READ[name]
    assert config_json.from_hf(config_json.to_hf(config)) == config
    opened = opened_by_transformers(config_json.to_hf(config))
    text = opened.text_config if config.vision else opened
    assert text.rope_parameters["rope_theta"] == config.text.rope_theta
    assert config_json.from_hf(opened.to_dict()) == config


def test_a_llama_without_rotary_settings_has_those_of_transformers():
    fields = llama_release() | {"rope_scaling": None}
    del fields["rope_theta"]
    read = config_json.from_hf(fields)
    opened = opened_by_transformers(copy.deepcopy(fields))
    assert read.text.rope_theta == opened.rope_parameters["rope_theta"] == 1e4
    assert read.text.rope_scaling is None


def test_a_release_that_pads_with_a_token_of_its_own_keeps_its_first_token():
    read = config_json.from_hf(llama_release() | {"pad_token_id": 128004})
    written = config_json.to_hf(read)
    assert (written["bos_token_id"], written["pad_token_id"]) == (128000, 128004)
    assert config_json.from_hf(written) == read


@pytest.mark.parametrize("name", RELEASES)
def test_settings_are_written_where_the_release_has_them(name):
    """Transformers before 4.52 does not read a `text_config` of Qwen2.5-VL."""
    release, written = RELEASES[name], config_json.to_hf(READ[name])
    assert ("text_config" in written) == ("text_config" in release)
    theirs, ours = (fields.get("text_config", fields) for fields in (release, written))
    shared = [key for key in theirs if key in ours and "rope" not in key and "config" not in key]
    assert {"hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"} <= {*shared}
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


@pytest.mark.parametrize("name", RELEASES)
def test_transformers_reads_the_release_as_we_do(name):
    opened = opened_by_transformers(copy.deepcopy(RELEASES[name]))
    assert config_json.from_hf(opened.to_dict(), GENERATION[name]) == READ[name]


@pytest.mark.parametrize(
    ("own", "further", "ids"),
    [
        (151645, None, (151645,)),
        (151645, [151645, 151643], (151645, 151643)),
        (151645, [151643, 151645], (151645, 151643)),  # the config's stays the one that is taught
        ([151645, 151643], 151643, (151645, 151643)),
        (None, [151645, 151643], (151645, 151643)),
    ],
)
@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen3-vl-4b", "qwen3-8b"])
def test_the_generation_config_adds_its_end_of_sequence_ids(tmp_path, name, own, further, ids):
    config = copy.deepcopy(RELEASES[name])
    (config.get("text_config") or config)["eos_token_id"] = own
    (tmp_path / "config.json").write_text(json.dumps(config))
    if further is not None:
        generation = {"eos_token_id": further, "repetition_penalty": 1.05, "temperature": 0.1}
        generation |= PADDING
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    pad, bos = (151643, None) if further is not None else (151645, 151643)
    fields = {"eos_token_ids": ids, "pad_token_id": pad, "bos_token_id": bos}
    expected = dataclasses.replace(PRESETS[name], **fields)
    assert config_json.from_folder(tmp_path) == expected
    assert config_json.from_hf(config_json.to_hf(expected)) == expected
    written = config_json.to_hf(expected)["eos_token_id"]
    assert written == (ids[0] if len(ids) == 1 else list(ids))


def test_the_real_files_are_the_presets_with_both_ends(releases):
    """`max_position_embeddings` of the copy was touched, see its README."""
    transformers = pytest.importorskip("transformers")
    for folder, preset in (
        (releases["qwen2_5_vl"], QWEN2_5_VL_3B),
        (releases["qwen3_vl"], QWEN3_VL_4B),
    ):
        config = config_json.from_folder(folder)
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert config.eos_token_ids == tuple(generation.eos_token_id) == (151645, 151643)
        text = dataclasses.replace(
            config.text, max_position_embeddings=preset.text.max_position_embeddings
        )
        assert dataclasses.replace(config, text=text, eos_token_ids=(151645,)) == preset


@pytest.mark.parametrize("in_text", [None, True, False])
@pytest.mark.parametrize("outside", [None, True, False])
def test_embeddings_are_tied_where_transformers_ties_them(config, outside, in_text):
    """In Qwen2.5-VL either place ties them; in Qwen3-VL text_config's is not looked at."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    fields = config_json.to_hf(config)
    fields.setdefault(
        "text_config", {name: fields[name] for name in fields if "_config" not in name}
    )
    for part, tie in ((fields, outside), (fields["text_config"], in_text)):
        del part["tie_word_embeddings"]
        if tie is not None:
            part["tie_word_embeddings"] = tie
    model_class = getattr(transformers, fields["architectures"][0])
    model = model_class(model_class.config_class(**copy.deepcopy(fields)))
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert config_json.from_hf(fields).text.tie_embeddings == is_tied


TOWER_ROPE = [
    {"rope_theta": 10000.0, "rope_type": "axial"},  # as transformers 5 writes it
    {"rope_theta": 10000, "rope_type": "default"},
    None,
]


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen3-vl-4b"])
@pytest.mark.parametrize("rope", TOWER_ROPE)
def test_a_towers_own_settings_are_read(name, rope):
    config = copy.deepcopy(RELEASES[name])
    size = config["vision_config"]["patch_size"]
    config["vision_config"] |= {
        "patch_size": [size, size],
        "temporal_patch_size": [2],
        "rope_parameters": rope,
        "rope_theta": 10000,
    }
    assert config_json.from_hf(config, PADDING) == PRESETS[name]


def test_a_tower_has_transformers_defaults_where_its_file_is_silent():
    """The 32B, reconstructed as older transformers write it: what differs from their defaults."""
    fields = qwen2_5_release() | {"num_hidden_layers": 64, "num_attention_heads": 40}
    fields |= {"hidden_size": 5120, "intermediate_size": 27648, "num_key_value_heads": 8}
    fields |= {"vocab_size": 152064, "tie_word_embeddings": False}
    fields["vision_config"] = {"hidden_size": 1280, "in_chans": 3, "intermediate_size": 3456}
    fields["vision_config"] |= {"out_hidden_size": 5120, "spatial_patch_size": 14}
    assert config_json.from_hf(fields, PADDING) == PRESETS["qwen2.5-vl-32b"]


def test_an_export_of_a_release_without_padding_does_not_pad_with_bos():
    written = config_json.to_hf(config_json.from_hf(llama_release()))
    assert (written["pad_token_id"], written["bos_token_id"]) == (128001, 128000)


def test_a_quantised_release_is_refused_before_its_weights_are_fetched():
    fields = qwen3_text_release() | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    with pytest.raises(ValueError, match=r"quantised \(awq\), which is not implemented; choose"):
        config_json.from_hf(fields)


def test_config_is_hashable():
    assert len({QWEN2_5_VL_3B, QWEN3_VL_4B, dataclasses.replace(QWEN2_5_VL_3B)}) == 2


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "must be a JSON file, got .*No such file"),
        ("generation_config.json", '{"eos_token_id": ', "must be a JSON file, got Expecting value"),
        ("generation_config.json", "[]", r"must hold a JSON object, got \[\]; fetch it again"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, file, text, message):
    (tmp_path / "config.json").write_text(json.dumps(qwen2_5_release()))
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=rf"{file} {message}") as error:
        config_json.from_folder(tmp_path)
    assert "\n" not in str(error.value)


# (fields of config.json that are changed, a part of the message), by release: the part of the file
# is "" for its top level.
REFUSED = {
    ("qwen2.5-vl-3b", ""): (
        ({"use_sliding_window": True}, "use_sliding_window must be False, got True, which is not"),
        (
            {"model_type": "qwen2_vl"},
            "model_type must be one of .*qwen2, qwen3, llama, got 'qwen2_vl'",
        ),
        ({"rope_scaling": {"type": "yarn", "mrope_section": [1, 1, 1]}}, "rope type must be"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, "must sum to head_dim"),
        ({"rope_scaling": {"mrope_interleaved": True}}, "mrope_interleaved must be False"),
        ({"rms_norm_eps": None}, "must have 'rms_norm_eps'"),
        ({"num_key_value_heads": 3}, "num_heads 16 must be a multiple"),
        ({"hidden_size": 4096, "num_attention_heads": 32}, "must equal text hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1000"),
        (
            {"hidden_size": 2**60},
            "hidden_size must be a whole number above 0, got 1152921504606846",
        ),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 0, got inf"),
        ({"hidden_size": "2048"}, "text_config hidden_size must be a whole number above 0, got '2"),
        ({"head_dim": 64}, "head_dim must be hidden_size"),
        ({"eos_token_id": None}, "config.json or generation_config.json must have 'eos_token_id'"),
        ({"eos_token_id": "<|im_end|>"}, "a token id or a list of them, got \\['<|im_end|>'\\]"),
        ({"eos_token_id": 151936}, "eos_token_id must be a token of the vocabulary of 151936, got"),
        ({"image_token_id": -1}, "image_token_id must be a token of the vocabulary"),
        ({"pad_token_id": "<pad>"}, "pad_token_id must be a token .* got '<pad>'"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be true or false, got None"),
        ({"vision_config": 3}, "config.json vision_config must be a JSON object, got 3"),
    ),
    ("qwen2.5-vl-3b", "vision_config"): (
        ({"rope_theta": 1e6}, "vision_config rope_theta must be 10000.0, got 1000000.0"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters rope_theta must be 10000.0"),
        ({"rope_scaling": {"rope_theta": 5e5}}, "rope_scaling rope_theta must be 10000.0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default' or 'axial'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0"),
        ({"patch_size": [14, 16]}, r"patch_size must be one number, .* got \(14, 16\)"),
        ({"temporal_patch_size": []}, r"temporal_patch_size must be one number, .* got \(\)"),
        ({"in_chans": 0}, "in_channels must be a whole number above 0, got 0"),
        ({"window_size": 20}, "window_size 20 must be 0 or at least one merge block, 28 pixels"),
    ),
    ("qwen3-vl-4b", "text_config"): (
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"head_dim": None}, "must have 'head_dim'"),
        ({"num_hidden_layers": 2}, "must not outnumber the 2 decoder layers"),
        ({"rope_scaling": {"mrope_section": [20, 22, 22]}}, "a third each of the 64 frequencies"),
        (
            {"rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": False}},
            "mrope_interleaved must be True",
        ),
    ),
    ("qwen3-vl-30b-a3b", "text_config"): (
        ({"norm_topk_prob": False}, "norm_topk_prob must be True, got False, which is not"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step must be 1, got 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers must be \[\], got \[0\]"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 must not exceed num_experts 128"),
        ({"num_experts": None}, "must have 'num_experts'"),
    ),
    ("qwen3-8b", ""): (
        ({"use_sliding_window": True}, "use_sliding_window must be False"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "must be 'default' or 'llama3'"),
        ({"head_dim": None}, "must have 'head_dim'"),
    ),
    ("llama-3.1-8b", ""): (
        ({"mlp_bias": True}, "mlp_bias must be False"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"head_dim": 33}, "head_dim must be an even number above 0, got 33"),
        ({"num_attention_heads": 24}, "must be hidden_size / num_attention_heads = 4096 / 24"),
    ),
    ("llama-3.1-8b", "rope_scaling"): (
        ({"factor": None}, "rope_scaling must have 'factor'"),
        ({"factor": "8"}, "rope_scaling factor must be a number above 0"),
        ({"high_freq_factor": 1.0}, "low_freq_factor 1.0 must be below high_freq_factor 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
    ),
    ("qwen3-vl-4b", "vision_config"): (
        ({"hidden_act": "silu"}, "hidden_act must be 'gelu_pytorch_tanh'"),
        ({"rope_theta": 1e6}, "vision_config rope_theta must be 10000.0, got 1000000.0"),
        ({"num_position_embeddings": 2000}, "2000 must be a square"),
        ({"deepstack_visual_indexes": [5, 24]}, "must be increasing layer numbers below 24"),
        ({"deepstack_visual_indexes": [11, 5]}, "must be increasing"),
        ({"deepstack_visual_indexes": None}, "must have 'deepstack_visual_index"),
    ),
}


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [(*where, *row) for where, rows in REFUSED.items() for row in rows],
)
def test_what_is_not_implemented_or_missing_is_refused(name, part, change, message):
    config = copy.deepcopy(RELEASES[name])
    (config[part] if part else config).update(change)
    with pytest.raises(ValueError, match=message):
        config_json.from_hf(config)


WRONG = {
    "a text": "x",
    "a fraction": 0.5,
    "a truth": True,
    "a list": [1, "x"],
    "an object": {"x": 1},
    "below 0": -1,
}
MAY_BE = {  # what is right for a key, or not read
    "rms_norm_eps": ("a fraction",),
    "rope_theta": ("a fraction",),
    "tie_word_embeddings": ("a truth",),
    "factor": ("a fraction",),
    "low_freq_factor": ("a fraction",),
    "original_max_position_embeddings": ("a fraction",),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", RELEASES)
def test_a_field_of_a_wrong_type_is_named_in_one_line(name, kind):
    """Every field of config.json that is read, in each of its objects."""
    release, count = RELEASES[name], 0
    text = "text_config" if "text_config" in release else ""
    for part in dict.fromkeys(("", text, "vision_config", "rope_scaling")):
        fields = release if not part else (release.get(part) or release.get(text, {}).get(part))
        for key in fields or ():
            config = copy.deepcopy(release)
            place = config if not part else config.get(part) or config[text][part]
            place[key] = WRONG[kind]
            try:
                read = config_json.from_hf(config)
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 400, key
                count += 1
            else:  # not read, or it may be so
                del place[key]
                is_unread = True
                try:
                    is_unread = config_json.from_hf(config) == read
                except ValueError:
                    is_unread = False
                assert is_unread or kind in MAY_BE.get(key, ()), (part, key)
    assert count > 14
