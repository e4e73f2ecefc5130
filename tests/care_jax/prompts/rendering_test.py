"""The text and the image sizes that a person is shown, against the tokens and patches."""

import numpy as np
from PIL import ExifTags, Image

from care_jax.batch import Example
from care_jax.data.prompts import open_tokenizer
from care_jax.method.spans import token_bytes
from care_jax.prompts import images as prompt_images
from care_jax.prompts.builder import PromptBuilder, backbone_config
from care_jax.prompts.rendering import image_line, rendered, resized_images
from configs import tiny

TOKENIZER = open_tokenizer("")
CONFIG = backbone_config(tiny.get_config().model.backbone.to_dict(), TOKENIZER)
BYTES = token_bytes(TOKENIZER, CONFIG.text.vocab_size)
BUILDER = PromptBuilder(
    TOKENIZER,
    CONFIG,
    min_pixels=256,
    max_pixels=4096,
    buckets=((512, 1024),),
    instruction="Use <{tag}>.",
)


def make_example(question: str, *sizes: tuple[int, int]) -> Example:
    images = tuple(Image.new("RGB", size) for size in sizes)
    return Example("0", "made", images, question, "1")


def test_text_has_special_tokens_and_counts_image_tokens():
    example = make_example("Is <image> é or <image>?", (640, 480), (16, 32))
    prompt = BUILDER.tokenize(example)
    text = rendered(prompt, BYTES, CONFIG)
    images = resized_images(example, prompt, CONFIG)
    wide, high = (image["tokens"] for image in images)
    assert wide + high == np.sum(prompt.tokens == CONFIG.image_token_id)
    marks = [f"<|vision_start|><|image_pad|>×{n}<|vision_end|>" for n in (wide, high)]
    assert f"Is {marks[0]} é or {marks[1]}?\nUse <think>." in text
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    # The text, with its runs written out, is what the tokenizer was given.
    for count in (wide, high):
        text = text.replace(f"<|image_pad|>×{count}<", "<|image_pad|>" * count + "<", 1)
    assert BUILDER.context_tokens(text).tolist() == prompt.tokens.tolist()


def test_sizes_are_those_of_the_patches_that_are_read():
    example = make_example("<image><image>?", (640, 480), (16, 32))
    prompt = BUILDER.tokenize(example)
    images = resized_images(example, prompt, CONFIG)
    assert images == [
        {"given": [640, 480], "resized": [64, 48], "tokens": 12},
        {"given": [16, 32], "resized": [16, 32], "tokens": 2},
    ]
    assert image_line(images[0]) == "640×480 resized to 64×48, 12 tokens"
    assert len(prompt.patches) == sum(w * h for w, h in ((8, 6), (2, 4)))


def test_sizes_open_no_file_a_second_time(tmp_path, monkeypatch):
    """The upright one of a photo, as of every other image."""
    paths, turned, opened = (tmp_path / "a.png", tmp_path / "b.jpg"), Image.Exif(), []
    turned[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (64, 32)).save(paths[0])
    Image.new("RGB", (64, 32)).save(paths[1], exif=turned)
    open_file = prompt_images._opened
    monkeypatch.setattr(prompt_images, "_opened", lambda x: opened.append(x) or open_file(x))
    example = Example("0", "made", paths, "<image><image>?", "1")
    prompt = BUILDER.tokenize(example)
    images = resized_images(example, prompt, CONFIG)
    assert [image["given"] for image in images] == [[64, 32], [32, 64]]
    assert opened == [*paths]
