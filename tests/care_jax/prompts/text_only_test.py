"""Prompts of backbones that read text alone: their own templates, no images, the end of a turn."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from care_jax.batch import Example
from care_jax.data.drawn import synthetic
from care_jax.data.prompts import open_prompts
from care_jax.prompts.builder import PromptBuilder, backbone_config
from care_jax.prompts.release_tokenizer import load_tokenizer
from care_jax.prompts.tokenizer import build_tokenizer
from configs import common
from models.release import config_json

FIELDS = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}
# The form of Llama 3's: content as strings, today's date unless one is given.
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ bos_token }}Today Date: {{ date_string }}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\n"
    "{{ message['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
SETTINGS = {"min_pixels": 256, "max_pixels": 4096, "buckets": ((256, 0),)}


@pytest.fixture
def tokenizer():
    return build_tokenizer(synthetic.texts())


@pytest.fixture
def config(tokenizer):
    return backbone_config(FIELDS, tokenizer)


def question(text, *images):
    return Example("7", "made", images, text, "1")


def test_the_ids_of_a_random_backbone_are_the_tokenizers(config, tokenizer):
    assert config.vision is None and config.image_token_id is None
    assert config.text.vocab_size == len(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (*config.eos_token_ids, config.pad_token_id) == tuple(ids)


@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
def test_qwens_own_text_template_is_rendered_as_transformers_does(
    releases, tmp_path, system_prompt
):
    """The tokenizer of Qwen2.5-VL has the template of Qwen2.5, with its tools."""
    for path in releases["qwen2_5_vl"].iterdir():
        if path.name not in ("chat_template.json", "preprocessor_config.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**fields, "model_type": "qwen2", "vision_config": None, "rope_scaling": None})
    )
    config = config_json.from_folder(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    told = {"system_prompt": system_prompt, "instruction": "In <{tag}>."}
    builder = PromptBuilder(tokenizer, config, **SETTINGS, **told)
    turns = [{"role": "user", "content": "1 + <b>\n é?\nIn <think>."}]
    if system_prompt:
        turns = [{"role": "system", "content": system_prompt}, *turns]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    example = question("1 + <b>\n é?")
    assert builder.chat(example) == theirs.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    tokens = theirs.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    np.testing.assert_array_equal(builder.tokenize(example).tokens, tokens)
    assert builder.measure(example) == (len(tokens), 0)


@pytest.mark.parametrize("template", [DATED, DATED.replace("not date_string is defined", "true")])
def test_a_prompt_does_not_depend_on_the_day(config, tokenizer, template):
    tokenizer.chat_template, tokenizer.bos_token = template, "<|endoftext|>"
    text = PromptBuilder(tokenizer, config, **SETTINGS, system_prompt=" Hi ").chat(question("1?"))
    assert text == (
        "<|endoftext|>Today Date: 26 Jul 2024<|im_start|>system\n\nHi<|im_end|>"
        "<|im_start|>user\n\n1?<|im_end|><|im_start|>assistant\n\n"
    )


def test_a_batch_of_texts_has_plain_positions_and_no_images(config, tokenizer):
    builder = PromptBuilder(tokenizer, config, **SETTINGS)
    prompts = builder.batch([builder.tokenize(question(text)) for text in ("1 + 1?", "2?")])
    assert prompts.images is None and (prompts.feature_index == -1).all()
    for row in range(2):
        positions = prompts.positions[row, prompts.is_valid[row]]
        np.testing.assert_array_equal(positions, np.arange(len(positions))[:, None].repeat(3, 1))
        assert prompts.next_position[row].tolist() == len(positions)


def test_a_response_ends_with_the_end_of_a_turn(config, tokenizer):
    """Llama 3's first end is that of a document, and its tokenizer names that of a turn."""
    document, turn = config.pad_token_id, config.eos_token_ids[0]
    for ends, expected in (((document, turn), turn), ((document,), document)):
        several = dataclasses.replace(config, eos_token_ids=ends)
        builder = PromptBuilder(tokenizer, several, **SETTINGS)
        assert builder.response_tokens("7")[-1] == expected


def test_images_are_refused_in_buckets_and_examples(config, tokenizer):
    with pytest.raises(
        ValueError, match=r"a llama backbone reads text alone, so buckets must .* 0"
    ):
        PromptBuilder(tokenizer, config, **SETTINGS | {"buckets": ((64, 16),)})
    builder = PromptBuilder(tokenizer, config, **SETTINGS)
    picture = Image.new("RGB", (32, 32))
    for ask in (builder.tokenize, builder.measure):
        with pytest.raises(ValueError, match="example 7 of made has images, and a llama backbone"):
            ask(question("<image>Which?", picture))


@pytest.mark.parametrize(
    ("template", "got"),
    [
        ("{{ messages[-1].content[0].text }}", "got ''"),
        ("{{ messages[0].content }}", "got 'You are a helpful assistant.'"),
    ],
)
def test_a_template_that_drops_the_question_is_refused(config, tokenizer, template, got):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"must write the system turn and the question .*{got}"):
        PromptBuilder(tokenizer, config, **SETTINGS)


@pytest.mark.parametrize("opened", ["<think>\n", "<cot>"])
def test_a_template_that_opens_the_rationale_is_refused(config, tokenizer, opened):
    """As those of the Thinking releases end; the response would have no opening tag."""
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '" + opened + "' }}{% endif %}"
    builder = PromptBuilder(tokenizer, config, **SETTINGS, think_tag="cot")  # to evaluate it
    with pytest.raises(ValueError, match=f"ends with {opened.strip()}; remove it from a copy"):
        builder.check_trained()


def test_a_base_model_without_template_and_turns_is_refused(tokenizer, tmp_path):
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert "<|im_start|>" in load_tokenizer(str(tmp_path)).chat_template
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("<|im_start|>", "<|begin|>"))
    with pytest.raises(
        ValueError, match=r"expected a chat template in .*no <\|im_start\|>"
    ) as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


def test_the_processor_of_an_export_is_the_tokenizer_alone(config, tokenizer, tmp_path):
    PromptBuilder(tokenizer, config, **SETTINGS).save_processor(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_a_family_that_is_not_known_is_named_before_the_tokenizer_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    config = common.get_config()
    config.model.path = str(tmp_path)
    with pytest.raises(ValueError, match=r"must be one of .*qwen2, qwen3, llama, got 'mistral'"):
        open_prompts(config)
