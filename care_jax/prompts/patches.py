"""Converts images to the flattened, normalised patches that the vision tower reads (host numpy).

The families differ only in patch size and channel statistics. The result is bit-identical to that
of transformers' `Qwen2VLImageProcessorPil`, the processor of both (tested), in a fraction of its
time. A pixel has 256 values per channel, so rescaling and normalising are one lookup table, and the
library's image stack is not imported.
"""

from __future__ import annotations

import math

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int
from PIL import Image

from models.config import VisionConfig

MAX_ASPECT_RATIO = 200


def target_size(
    height: float, width: float, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The size an image is resized to: (height, width) in pixels, of similar aspect ratio.

    Both are positive multiples of `factor`, the pixels per side of one merged feature (patch size x
    merge size). `min_pixels` and `max_pixels` are the range of height x width.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(
            f"an image of {height} x {width} pixels has one side more than {MAX_ASPECT_RATIO} "
            "times the other; crop it or leave it out"
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def to_patches(
    image: Image.Image,
    config: VisionConfig,
    *,
    min_pixels: int,
    max_pixels: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: DTypeLike = np.float32,
) -> tuple[Float[np.ndarray, "n C"], Int[np.ndarray, " 3"]]:
    """Resizes and normalises one image and splits it into patches.

    Args:
        image: any mode; converted to RGB on a white background.
        min_pixels, max_pixels: range of height x width after resizing.
        mean, std: per channel, of pixels in [0, 1].
        dtype: of the patches.

    Returns:
        The patches (channel, frame, row, column flattened) in merge-block order, and the grid
        (frames, rows, columns) in patches; a still image is one frame of repeated pixels.
    """
    patch, merge, frames = config.patch_size, config.merge_size, config.temporal_patch_size
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    height, width = target_size(image.height, image.width, factor=patch * merge, **limits)
    image = to_rgb(image)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    rows, columns = height // patch, width // patch
    blocks = (rows // merge, merge, patch, columns // merge, merge, patch)
    # (block row, block column, row in block, column in block, channel, frame, y, x)
    shape = (blocks[0], blocks[3], merge, merge, config.in_channels, frames, patch, patch)
    patches = np.empty(shape, dtype)
    unit = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    for channel in range(config.in_channels):
        table = (unit - np.float32(mean[channel])) / np.float32(std[channel])
        values = table.astype(dtype)[pixels[..., channel]].reshape(blocks)
        patches[:, :, :, :, channel] = values.transpose(0, 3, 1, 4, 2, 5)[:, :, :, :, None]
    return patches.reshape(rows * columns, -1), np.array((1, rows, columns), np.int32)


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, transparent parts on white."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255,) * 4), image)
    return image.convert("RGB")
