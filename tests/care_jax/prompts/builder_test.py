"""Prompts: the chat template, image tokens, padding and buckets, and the exported processor."""

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
from care_jax.prompts.builder import PromptBuilder, load_tokenizer, prompt_sizes
from care_jax.prompts.tokenizer import build_tokenizer
from models.release import config_json

FIELDS = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
    "image_token_id": 998,
    "video_token_id": 999,
    "vision_start_token_id": 995,
    "vision_end_token_id": 996,
    "eos_token_id": 994,
    "pad_token_id": 992,
    "text_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 1000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "max_position_embeddings": 512,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 8,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 64,
        "fullatt_block_indexes": [0],
    },
}
CONFIG = config_json.from_hf(FIELDS)
QWEN3_FIELDS = {
    **FIELDS,
    "model_type": "qwen3_vl",
    "text_config": FIELDS["text_config"]
    | {"head_dim": 16, "rope_scaling": {"mrope_section": [4, 2, 2]}},
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
BUCKETS = ((96, 256), (48, 64), (64, 128))  # in no order


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(synthetic.texts(), 1000)


@pytest.fixture(scope="module")
def builder(tokenizer):
    return PromptBuilder(
        tokenizer,
        CONFIG,
        min_pixels=256,
        max_pixels=16384,
        buckets=BUCKETS,
        system_prompt="Answer.",
    )


def example(question, *sizes):
    """An example with images of the given (width, height) in pixels."""
    images = tuple(Image.new("RGB", size, "red") for size in sizes)
    return Example(id="7", source="made", images=images, question=question, answer="1")


def test_chat_is_the_published_form_of_qwen(tokenizer):
    builder = PromptBuilder(
        tokenizer,
        CONFIG,
        min_pixels=256,
        max_pixels=16384,
        buckets=BUCKETS,
        instruction="Think first.",
    )
    assert builder.chat(example("See <image> and\n<image>\nwhich?", (16, 16), (16, 16))) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n"
        "See <|vision_start|><|image_pad|><|vision_end|> and\n"
        "<|vision_start|><|image_pad|><|vision_end|>\nwhich?\nThink first.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_tag_stands_in_what_the_policy_is_told(tokenizer):
    builder = PromptBuilder(
        tokenizer,
        CONFIG,
        min_pixels=256,
        max_pixels=16384,
        buckets=BUCKETS,
        system_prompt="Use {tag}.",
        instruction="Think in <{tag}> </{tag}>.",
        think_tag="reasoning",
    )
    text = builder.chat(example("1 + 1?"))
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
    slots = prompts.slots[0][prompts.tokens[0] == CONFIG.image_token_id]
    np.testing.assert_array_equal(slots, range(6))
    assert (prompts.slots[1] == -1).all()
    np.testing.assert_array_equal((prompts.images.segments >= 0).sum(-1), [24, 0])


def test_patches_come_in_the_type_that_is_computed_with(tokenizer, builder):
    """As the tower would cast them; a prompt without images beside them changes nothing."""
    settings = dict(min_pixels=256, max_pixels=16384, buckets=BUCKETS)
    narrow = PromptBuilder(tokenizer, CONFIG, patch_dtype=jnp.bfloat16, **settings)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (32, 48, 3), np.uint8))
    examples = [Example("7", "made", (image,), "<image>?", "1"), example("1 + 1?")]
    wide, ours = (
        b.batch([b.tokenize(one) for one in examples]).images.patches for b in (builder, narrow)
    )
    assert (wide.dtype, ours.dtype) == (np.float32, jnp.bfloat16)
    np.testing.assert_array_equal(ours, wide.astype(jnp.bfloat16))


def test_buckets_of_text_alone_hold_no_image(tokenizer):
    settings = dict(min_pixels=256, max_pixels=16384, buckets=((64, 0), (96, 0)))
    builder = PromptBuilder(tokenizer, CONFIG, system_prompt="Answer.", **settings)
    text = builder.tokenize(example("1 + 1?"))
    assert builder.fits(text) and builder.batch([text]).images is None
    assert not builder.fits(builder.tokenize(example("<image>How many?", (32, 32))))


def test_batch_without_any_image_has_none(builder):
    assert builder.batch([builder.tokenize(example("1 + 1?"))]).images is None


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
    with pytest.raises(ValueError, match="leave out prompts that do not fit"):
        builder.batch([long])


def test_response_ends_with_end_of_sequence(builder):
    text = "<think>Count the circles.</think><answer>12</answer>"
    tokens = builder.response_tokens(text)
    assert tokens[-1] == CONFIG.eos_token_ids[0]
    assert builder.tokenizer.decode(tokens[:-1].tolist()) == text


def test_images_and_placeholders_must_agree(builder):
    with pytest.raises(ValueError, match="has 1 images and 2 <image>"):
        builder.tokenize(example("<image><image>", (16, 16)))
    with pytest.raises(ValueError, match="has an image or video token in its text"):
        builder.tokenize(example("<image><|image_pad|>", (16, 16)))
    with pytest.raises(ValueError, match="has an image or video token in its text"):
        builder.tokenize(example("<|video_pad|>"))


def test_image_files_give_the_prompt_of_their_pixels(builder, tmp_path):
    drawn = SyntheticSource(1)[0]
    path = tmp_path / "a.png"
    drawn.images[0].save(path)
    stored = Example(id="a", source="s", images=(path,), question=drawn.question, answer="1")
    np.testing.assert_array_equal(builder.tokenize(stored).patches, builder.tokenize(drawn).patches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_pixels": 99999}, "min_pixels must be positive and at most max_pixels"),
        ({"buckets": ()}, "buckets must be pairs"),
        ({"buckets": ((48, 66),)}, "patches in multiples of 4"),
        ({"buckets": ((48, -4),)}, "patches in multiples of 4"),
        ({"buckets": ((48, 128), (64, 64))}, "must have most patches too"),
        ({"image_token_id": 5}, r"has <\|image_pad\|> at 5 and the tokenizer at 998"),
        ({"vocab_size": 999}, "the tokenizer has 1000 tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(tokenizer, change, message):
    fields = FIELDS | {"image_token_id": change.pop("image_token_id", 998)}
    vocab_size = change.pop("vocab_size", 1000)
    fields["text_config"] = FIELDS["text_config"] | {"vocab_size": vocab_size}
    settings = {"min_pixels": 256, "max_pixels": 16384, "buckets": BUCKETS} | change
    with pytest.raises(ValueError, match=message):
        PromptBuilder(tokenizer, config_json.from_hf(fields), **settings)


@pytest.mark.parametrize("fields", [FIELDS, QWEN3_FIELDS], ids=lambda fields: fields["model_type"])
def test_saved_processor_opens_in_transformers_and_gives_the_same_patches(
    tokenizer, tmp_path, fields
):
    config = config_json.from_hf(fields)
    builder = PromptBuilder(
        tokenizer, config, min_pixels=256, max_pixels=16384, buckets=((96, 256),)
    )
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
