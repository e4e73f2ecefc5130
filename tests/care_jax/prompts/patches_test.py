"""Patches equal those of the published processor, bit for bit."""

import dataclasses

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from care_jax.prompts.patches import target_size, to_patches
from models.families import FAMILIES


@pytest.mark.parametrize(("family", "patch"), [("qwen2_5_vl", 14), ("qwen3_vl", 16)])
@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("RGB", (112, 224)),  # kept as it is by patches of 14
        ("RGB", (96, 64)),  # and by patches of 16
        ("RGB", (333, 71)),  # rounded
        ("RGB", (300, 290)),  # shrunk
        ("L", (20, 50)),  # enlarged
        ("RGBA", (60, 57)),
        ("LA", (60, 57)),
        ("P", (60, 57)),
        ("CMYK", (60, 57)),
    ],
)
def test_patches_equal_the_published_processor(policy, mode, size, family, patch):
    bands = len(Image.new(mode, (1, 1)).getbands())
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    image = Image.frombytes(mode, size, pixels.tobytes())
    if mode == "P":
        image.putpalette(rng.integers(0, 256, 768).tolist())
        image.info["transparency"] = 3
    limits = {"min_pixels": 4000, "max_pixels": 60000}

    # The class's own statistics are Qwen2.5-VL's; the releases of Qwen3-VL override them.
    override = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if family == "qwen3_vl" else {}
    expected = Qwen2VLImageProcessorPil(patch_size=patch, **override, **limits)(image)
    tower = FAMILIES[family].tower
    config = dataclasses.replace(policy.config.vision, patch_size=patch)
    patches, grid = to_patches(image, config, mean=tower.image_mean, std=tower.image_std, **limits)

    np.testing.assert_array_equal(patches, expected["pixel_values"])
    np.testing.assert_array_equal([grid], expected["image_grid_thw"])


def test_target_size_is_that_of_the_published_processor():
    rng = np.random.default_rng(0)
    for height, width in np.exp(rng.uniform(np.log(2), np.log(3000), (500, 2))).astype(int):
        if max(height, width) > 200 * min(height, width):
            continue
        sizes = int(height), int(width)
        limits = {"factor": 28, "min_pixels": 3136, "max_pixels": 1003520}
        assert target_size(*sizes, **limits) == smart_resize(*sizes, **limits)


def test_very_narrow_image_is_refused():
    with pytest.raises(ValueError, match="one side more than 200 times the other"):
        target_size(1, 201, factor=28, min_pixels=1, max_pixels=10**6)
