import base64
import pathlib

import numpy as np
import pytest
from PIL import Image

from care_jax.report import pictures


def test_a_drawing_is_a_png_and_a_photograph_a_jpeg_within_the_bound():
    drawing = pictures.data_uri(Image.new("RGB", (900, 300), "red"), max_side=300)
    assert drawing.startswith("data:image/png;base64,") and pictures.opened(drawing).size == (
        300,
        100,
    )
    noise = np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)
    photograph = pictures.data_uri(Image.fromarray(noise), max_side=600)
    assert photograph.startswith("data:image/jpeg;base64,")
    assert len(base64.b64decode(photograph.partition(",")[2])) <= pictures.MAX_BYTES
    assert max(pictures.opened(photograph).size) < 600


def test_a_small_picture_is_not_enlarged_and_what_is_transparent_is_white():
    picture = pictures.opened(
        pictures.data_uri(Image.new("RGBA", (20, 10), (0, 0, 0, 0)), max_side=300)
    )
    assert picture.size == (20, 10)
    assert picture.convert("RGB").getpixel((3, 3)) == (255, 255, 255)


@pytest.mark.parametrize("image", [b"no image", pathlib.Path("gone.png")])
def test_a_file_that_has_gone_leaves_no_picture(image):
    assert pictures.data_uri(image, max_side=300) == ""
