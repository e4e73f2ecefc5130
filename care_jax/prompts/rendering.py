"""A prompt as the model reads it, for people: its text with special tokens, and its images' sizes.

Both are read from the tokens and grids that the model gets, not rendered a second time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from care_jax.batch import Example, Unusable
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.prompts.images import AnyImage, image_size
from models.config import BackboneConfig


def rendered(prompt: TokenizedPrompt, token_bytes: Sequence[bytes], config: BackboneConfig) -> str:
    """The text of the prompt's tokens; the 64 tokens of an image are `<|image_pad|>×64`.

    `token_bytes` has the bytes of every token id, see `method.spans.token_bytes`.
    """
    parts = []
    for token, run in itertools.groupby(prompt.tokens.tolist()):
        text, count = token_bytes[token], len(list(run))
        is_image = token == config.image_token_id
        parts.append(text + f"×{count}".encode() if is_image else text * count)
    return b"".join(parts).decode("utf-8", "replace")


def resized_images(
    example: Example, prompt: TokenizedPrompt, config: BackboneConfig
) -> list[dict[str, Any]]:
    """Of each image (width, height) in pixels, `given` upright and `resized`, and its `tokens`.

    The files are opened only for a prompt without `image_sizes`; `given` is None if one has gone.
    """
    images = []
    sizes = prompt.image_sizes or map(_size, example.images)
    for size, (frames, rows, columns) in zip(sizes, prompt.grids.tolist(), strict=True):
        assert config.vision is not None  # it read the images
        side = config.vision.patch_size
        images.append(
            {
                "given": size and list(size),
                "resized": [columns * side, rows * side],
                "tokens": frames * rows * columns // config.merge_size**2,
            }
        )
    return images


def image_line(image: dict[str, Any]) -> str:
    """`640×480 resized to 644×476, 391 tokens`, of an entry of `resized_images`."""
    given, resized = ("×".join(map(str, image[key])) for key in ("given", "resized"))
    return f"{given} resized to {resized}, {image['tokens']} tokens"


def _size(image: AnyImage) -> tuple[int, int] | None:
    try:
        return image_size(image)
    except Unusable:
        return None
