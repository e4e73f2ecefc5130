"""Rows reach another process whole, and bytes that name anything else run no code."""

import io
import pathlib
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from care_jax.batch import Example, Groups
from care_jax.devices.rows_as_bytes import from_bytes, to_bytes
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.prompts.images import open_image
from care_jax.prompts.patches import to_rgb


def images(folder):
    """An image of every kind that an example may have."""
    drawn, stream = Image.new("RGB", (3, 2), "red"), io.BytesIO()
    drawn.save(stream, "PNG")
    (folder / "a.png").write_bytes(stream.getvalue())
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("a.png", stream.getvalue())
    return {
        "drawn": drawn,
        "opened": Image.open(folder / "a.png"),
        "path": folder / "a.png",
        "bytes": stream.getvalue(),
        "archived": zipfile.Path(folder / "a.zip", "a.png"),
    }


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["drawn", "opened", "path", "bytes", "archived"])
def test_a_group_reaches_the_other_process(tmp_path, kind, dtype):
    image = images(tmp_path)[kind]
    example = Example("1", "zip", (image,), "<image> é?", [0.5, {"a": None}], extra={"n": [1, "x"]})
    prompt = TokenizedPrompt(np.arange(3), np.ones((1, 3), int), np.ones((2, 4), dtype))
    objects = [np.empty(1, object) for _ in range(2)]
    objects[0][:], objects[1][:] = [example], [prompt]
    group = Groups(index=np.array([7]), examples=objects[0], prompts=objects[1])
    received, number = from_bytes(to_bytes([group, np.float32(0.5)]))
    assert number == np.float32(0.5) and received.index == [7]
    for ours, theirs in zip(
        jax.tree.leaves(received.prompts[0].__dict__), jax.tree.leaves(prompt.__dict__), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert received.examples[0].extra == {"n": [1, "x"]}
    (found,) = received.examples[0].images
    if isinstance(image, Image.Image):
        assert found.tobytes() == image.tobytes() and found.size == (3, 2)
    else:
        assert found == (image.read_bytes() if kind == "archived" else image)


def test_an_image_of_8_bits_is_read_as_here_whatever_its_metadata():
    """International text of a PNG and the resolution of a TIFF have types of PIL."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    drawn, turned, text = Image.fromarray(pixels), Image.Exif(), PngImagePlugin.PngInfo()
    turned[0x0112] = 6
    text.add_itxt("Title", "é")
    few = drawn.quantize(8)
    saved = [
        (drawn, "PNG", {"pnginfo": text, "exif": turned}),
        (drawn, "TIFF", {"dpi": (72, 72), "exif": turned}),
        (few, "PNG", {"transparency": bytes(range(0, 256, 32)), "exif": turned}),
        (few, "GIF", {"transparency": 2}),
        (drawn.convert("CMYK"), "JPEG", {"exif": turned}),
    ]
    images = [few, ImageOps.invert(drawn)]
    for image, kind, settings in saved:
        stream = io.BytesIO()
        image.save(stream, kind, **settings)
        images.append(Image.open(stream))
    for image in images:
        ours, theirs = (to_rgb(open_image(x)) for x in (image, from_bytes(to_bytes(image))))
        assert theirs.size == ours.size and theirs.tobytes() == ours.tobytes()


class Runs:
    """What a hostile sender would send."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize(
    "called",
    [
        (eval, "1 / 0"),
        (exec, "raise SystemExit"),
        (getattr, "", "upper"),
        (pathlib.Path.unlink, pathlib.Path("/nowhere")),
        (np.load, "/nowhere"),
        (np.memmap, "/nowhere/made", "uint8", "w+"),
        (Image.open, "/nowhere"),
        (zipfile.ZipFile, "/nowhere/made", "w"),
        (pytest.main, []),
    ],
    ids=lambda called: called[0].__name__,
)
def test_bytes_that_name_a_function_run_nothing(called):
    with pytest.raises(ValueError, match="expected a row of arrays, images, paths and records"):
        from_bytes(pickle.dumps([Runs(*called)]))
