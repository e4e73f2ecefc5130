"""Prompts: the chat template, image tokens, padding and buckets, and the exported processor."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from care_jax.batch import Example
from care_jax.data.drawn import synthetic
from care_jax.data.drawn.synthetic import SyntheticSource
from care_jax.prompts.builder import (
    PromptBuilder,
    backbone_config,
    prompt_sizes,
)
from care_jax.prompts.release_tokenizer import load_tokenizer
from care_jax.prompts.tokenizer import build_tokenizer
from configs import tiny
from models.release import config_json

TOKENIZER = build_tokenizer(synthetic.texts())
CONFIG, QWEN3_CONFIG = (
    backbone_config(tiny.get_config(family).model.backbone.to_dict(), TOKENIZER)
    for family in ("qwen2_5_vl", "qwen3_vl")
)
BUCKETS = ((96, 256), (48, 64), (64, 128))  # in no order
SETTINGS = {"min_pixels": 256, "max_pixels": 16384, "buckets": BUCKETS}


def make_builder(config=CONFIG, **changes):
    return PromptBuilder(TOKENIZER, config, **SETTINGS | changes)


@pytest.fixture(scope="module")
def builder():
    return make_builder(system_prompt="Answer.")


def example(question, *sizes):
    """An example with images of the given (width, height) in pixels."""
    images = tuple(Image.new("RGB", size, "red") for size in sizes)
    return Example(id="7", source="made", images=images, question=question, answer="1")


def test_chat_is_the_published_form_of_qwen():
    builder = make_builder(instruction="Think first.")
    assert builder.chat(example("See <image> and\n<image>\nwhich?", (16, 16), (16, 16))) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n"
        "See <|vision_start|><|image_pad|><|vision_end|> and\n"
        "<|vision_start|><|image_pad|><|vision_end|>\nwhich?\nThink first.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_tag_is_filled_into_system_prompt_and_instruction():
    texts = {"system_prompt": "Use {tag}.", "instruction": "Think in <{tag}> </{tag}>."}
    text = make_builder(**texts, think_tag="reasoning").chat(example("1 + 1?"))
    assert "system\nUse reasoning.<" in text
    assert "1 + 1?\nThink in <reasoning> </reasoning>.<" in text


def test_image_tokens_equal_merged_features(builder):
    prompt = builder.tokenize(example("<image> or <image>?", (48, 32), (64, 80)))
    np.testing.assert_array_equal(prompt.grids, [[1, 4, 6], [1, 10, 8]])
    assert prompt.patches.shape == (24 + 80, CONFIG.vision.patch_dim)
    is_image = prompt.tokens == CONFIG.image_token_id
    runs = np.flatnonzero(np.diff(np.concatenate([[0], is_image, [0]])))
    np.testing.assert_array_equal(runs[1::2] - runs[::2], [6, 20])
    around = prompt.tokens[[runs[0] - 1, runs[1]]]
    np.testing.assert_array_equal(
        around, [CONFIG.vision_start_token_id, CONFIG.vision_end_token_id]
    )


def test_batch_is_left_padded_and_keeps_each_prompt(builder):
    tokenized = [
        builder.tokenize(example("<image>How many circles are there in all?", (48, 32))),
        builder.tokenize(example("1 + 1?")),
    ]
    prompts = builder.batch(tokenized)
    for row, prompt in enumerate(tokenized):
        length = len(prompt.tokens)
        np.testing.assert_array_equal(prompts.tokens[row, -length:], prompt.tokens)
        assert (prompts.tokens[row, :-length] == CONFIG.pad_token_id).all()
        np.testing.assert_array_equal(prompts.is_valid[row].nonzero()[0], range(48 - length, 48))
        np.testing.assert_array_equal(prompts.positions[row, -length], [0, 0, 0])
        assert (prompts.next_position[row] == prompts.positions[row, -1] + 1).all()
    feature_index = prompts.feature_index[0][prompts.tokens[0] == CONFIG.image_token_id]
    np.testing.assert_array_equal(feature_index, range(6))
    assert (prompts.feature_index[1] == -1).all()
    np.testing.assert_array_equal((prompts.images.segments >= 0).sum(-1), [24, 0])


def test_patches_have_the_compute_dtype(builder):
    """As the tower would cast them; a prompt without images beside them changes nothing."""
    narrow = make_builder(patch_dtype=jnp.bfloat16)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (32, 48, 3), np.uint8))
    examples = [Example("7", "made", (image,), "<image>?", "1"), example("1 + 1?")]
    wide, ours = (
        b.batch([b.tokenize(one) for one in examples]).images.patches for b in (builder, narrow)
    )
    assert (wide.dtype, ours.dtype) == (np.float32, jnp.bfloat16)
    np.testing.assert_array_equal(ours, wide.astype(jnp.bfloat16))


def test_batch_without_any_image_has_none(builder):
    """Whether its bucket could hold images or not."""
    text_alone = make_builder(buckets=((64, 0), (96, 0)), system_prompt="Answer.")
    for each in (builder, text_alone):
        text = each.tokenize(example("1 + 1?"))
        assert each.fits(text) and each.batch([text]).images is None
    assert not text_alone.fits(text_alone.tokenize(example("<image>How many?", (32, 32))))


def test_a_share_of_a_batch_is_padded_as_the_whole(builder):
    tokenized = [
        builder.tokenize(example("1 + 1?")),
        builder.tokenize(example("<image>", (80, 64))),
    ]
    whole = builder.batch(tokenized)
    for row in range(2):
        share = builder.batch(tokenized[row : row + 1], prompt_sizes(tokenized))
        rows = jax.tree.map(lambda x: x[row : row + 1], whole)  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, share, rows)


@pytest.mark.parametrize(
    ("num_words", "size", "bucket"),
    [
        (0, (64, 64), (48, 64)),
        (0, (80, 64), (64, 128)),  # by its patches
        (30, (16, 16), (64, 128)),  # by its tokens
        (0, (128, 128), (96, 256)),
    ],
)
def test_smallest_bucket_that_holds_the_batch_is_taken(builder, num_words, size, bucket):
    prompt = builder.tokenize(example("<image>" + " the" * num_words, size))
    prompts = builder.batch([builder.tokenize(example("<image>", (16, 16))), prompt])
    assert (prompts.tokens.shape[1], prompts.images.patches.shape[1]) == bucket


def test_prompt_beyond_the_largest_bucket_does_not_fit_and_is_never_cut(builder):
    long = builder.tokenize(example(" the" * 100))
    assert len(long.tokens) > 100
    assert not builder.fits(long)
    assert not builder.fits(builder.tokenize(example("<image><image>", (128, 128), (16, 16))))
    assert builder.fits(builder.tokenize(example("<image>", (128, 128))))


def test_response_ends_with_end_of_sequence(builder):
    text = "<think>Count the circles.</think><answer>12</answer>"
    tokens = builder.response_tokens(text)
    assert tokens[-1] == CONFIG.eos_token_ids[0]
    assert builder.tokenizer.decode(tokens[:-1].tolist()) == text


REFUSED_EXAMPLES = [
    (example("<image><image>", (16, 16)), "has 1 images and 2 <image> in its question; write one"),
    (example("<image><|image_pad|>", (16, 16)), "an image or video token in its text"),
    (example("<|video_pad|>"), "an image or video token in its text; write <image> for an image"),
    (example(" the" * 100), r"needs 1\d\d tokens and 0 patches, but the buckets are .*; leave out"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "message"), REFUSED_EXAMPLES)
def test_example_that_makes_no_prompt_is_refused(builder, one, message):
    with pytest.raises(ValueError, match=message):
        builder.batch([builder.tokenize(one)])


def test_image_files_give_the_prompt_of_their_pixels(builder, tmp_path):
    drawn = SyntheticSource(1)[0]
    path = tmp_path / "a.png"
    drawn.images[0].save(path)
    stored = Example(id="a", source="s", images=(path,), question=drawn.question, answer="1")
    np.testing.assert_array_equal(builder.tokenize(stored).patches, builder.tokenize(drawn).patches)


OTHER_ID = dataclasses.replace(CONFIG, image_token_id=5)
SMALL = dataclasses.replace(CONFIG, text=dataclasses.replace(CONFIG.text, vocab_size=639))
REFUSED_SETTINGS = [
    ({"min_pixels": 99999}, "min_pixels must be positive and at most max_pixels, got 99999 and"),
    ({"min_pixels": 0}, "min_pixels must be positive and at most max_pixels, got 0 and 16384"),
    ({"buckets": ()}, r"buckets must be pairs .*, got \(\)"),
    ({"buckets": ((48, 66),)}, r"multiples of 4, got \(\(48, 66\),\)"),
    ({"buckets": ((48, -4),)}, r"multiples of 4, got \(\(48, -4\),\)"),
    ({"buckets": ((0, 64),)}, r"multiples of 4, got \(\(0, 64\),\)"),
    ({"buckets": ((48, 128), (64, 64))}, "with the most tokens must also have the most patches"),
    ({"config": OTHER_ID}, r"has <\|image_pad\|> at 5 and the tokenizer at 638"),
    ({"config": SMALL}, "the tokenizer has 640 tokens and the backbone a vocabulary of 639"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED_SETTINGS)
def test_settings_that_cannot_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_builder(**change)


@pytest.mark.parametrize("config", [CONFIG, QWEN3_CONFIG], ids=lambda config: config.family)
def test_saved_processor_opens_in_transformers_and_gives_the_same_patches(tmp_path, config):
    builder = make_builder(config, buckets=((96, 256),))
    (tmp_path / "config.json").write_text(json.dumps(config_json.to_hf(config)))
    builder.save_processor(tmp_path)
    drawn = SyntheticSource(1)[0]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == builder.tokenizer.get_vocab()
    assert tokenizer.chat_template == builder.tokenizer.chat_template

    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    prompt = builder.tokenize(drawn)
    np.testing.assert_array_equal(processor(drawn.images[0])["pixel_values"], prompt.patches)
    assert builder.batch([prompt]).images.patches.shape == (1, 256, config.vision.patch_dim)


def test_missing_tokenizer_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected a tokenizer in .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))
