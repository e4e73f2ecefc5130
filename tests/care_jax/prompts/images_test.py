"""Images: whatever a source gives is decoded upright or refused, and copies look alike."""

import io
import itertools
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from care_jax.batch import Unusable
from care_jax.prompts.images import encoded, fingerprint, image_size, num_different_bits, open_image
from care_jax.prompts.patches import to_rgb


def png_header(width, height):
    """A PNG file that says it is that large and has no pixels."""

    def chunk(kind, data):
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_paths_bytes_and_opened_images_are_the_same_picture(picture, tmp_path):
    data = picture(1, format="PNG")
    path = tmp_path / "a.png"
    path.write_bytes(data)
    opened = Image.open(path)
    pixels = {open_image(image).tobytes() for image in (data, path, opened)}
    assert len(pixels) == 1
    assert {image_size(image) for image in (data, path, opened)} == {(96, 64)}
    assert {fingerprint(image) for image in (data, path, opened)} == {fingerprint(data)}
    assert encoded(path) == data == encoded(data)
    assert open_image(encoded(opened)).tobytes() in pixels


def test_a_jpeg_and_its_pixels_in_another_file_have_one_fingerprint(picture):
    jpeg, png = io.BytesIO(), io.BytesIO()
    large = open_image(picture(1)).convert("RGB").resize((640, 480))
    large.save(jpeg, "JPEG", quality=80)
    Image.open(jpeg).save(png, "PNG")
    assert fingerprint(jpeg.getvalue()) == fingerprint(png.getvalue())


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("at_least", [0, 1])
def test_truncated_file_is_refused_at_every_scale(picture, format, at_least):
    data = picture(2, size=(640, 480), format=format)
    assert open_image(data, at_least=at_least).size[0] in (640, 80)
    with pytest.raises(Unusable, match="unreadable or truncated"):
        open_image(data[: len(data) // 2], at_least=at_least)


def saved(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


RAMP = np.linspace(0, 1, 16 * 16).reshape(16, 16)
GRAY_16 = Image.fromarray((RAMP * 65535).round().astype(np.uint16))
BIG_ENDIAN = Image.frombytes("I;16B", (16, 16), (RAMP * 65535).round().astype(">u2").tobytes())
WHITE_IS_ZERO, BITS = {262: 0}, 258  # tags of TIFF


@pytest.mark.parametrize(
    ("image", "is_inverted"),
    [
        (GRAY_16, False),
        (BIG_ENDIAN, False),
        (saved(GRAY_16, "PNG"), False),
        (saved(GRAY_16, "TIFF"), False),
        (saved(BIG_ENDIAN, "TIFF"), False),
        (saved(GRAY_16, "TIFF", tiffinfo=WHITE_IS_ZERO), True),
    ],
)
def test_16_bits_of_grey_are_scaled_to_8(image, is_inverted):
    expected = (255 * (1 - RAMP if is_inverted else RAMP)).round()
    found = open_image(image)
    assert found.mode == "L" and np.abs(np.asarray(found) - expected).max() <= 1
    assert np.asarray(found)[0, 0] == (255 if is_inverted else 0)
    assert np.asarray(to_rgb(found))[..., 1].tolist() == np.asarray(found).tolist()


def test_12_bits_of_grey_are_scaled_by_their_own_range():
    """A TIFF of 12 bits is opened in the mode of 16."""
    tiff = saved(Image.new("I;16", (16, 16), 0xFFF0 >> 4), "TIFF")
    twelve = Image.open(io.BytesIO(tiff))
    twelve.tag_v2[BITS] = (12,)
    assert set(np.asarray(open_image(twelve)).ravel()) == {255}


def test_the_transparent_value_of_16_bits_is_white():
    data = saved(Image.new("I;16", (16, 16), 0), "PNG", transparency=0)
    assert set(np.asarray(to_rgb(open_image(data))).ravel()) == {255}


INTEGERS = Image.fromarray((RAMP * 1e6).astype(np.int32))
FLOATS = Image.fromarray(RAMP.astype(np.float32))
UNREADABLE, OTHER_FORMAT, RANGE = (
    "image unreadable or truncated",
    "image is none of JPEG, PNG, WEBP, GIF, BMP, TIFF, or damaged",
    "32-bit pixels, whose range is unknown; save it",
)
LARGE = "image of more than 50 megapixels or 20,000 pixels a side"
REFUSED = {
    "empty": (b"", OTHER_FORMAT),
    "SVG": (b"<svg></svg>", OTHER_FORMAT),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", OTHER_FORMAT),
    "JPEG 2000": (saved(Image.new("RGB", (16, 16)), "JPEG2000"), OTHER_FORMAT),
    "no pixels": (png_header(64, 64), UNREADABLE),
    "opened but not read": (Image.open(io.BytesIO(png_header(64, 64))), UNREADABLE),
    "long side": (png_header(30_000, 200), LARGE),
    "many pixels": (png_header(9_000, 9_000), LARGE),
    "too many for PIL": (png_header(60_000, 60_000), LARGE),
    "narrow": (png_header(402, 2), "image with a side over 200 times the other"),
    "integers": (INTEGERS, RANGE),
    "floats": (saved(FLOATS, "TIFF"), RANGE),
    "CIELAB": (saved(Image.new("LAB", (16, 16)), "TIFF"), "image of mode LAB, expected RGB or g"),
}  # fmt: skip


@pytest.mark.parametrize(("image", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_an_image_of_colours_within_the_limits_is_refused(image, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(Unusable, match=reason):
            open_image(image)


def test_an_image_that_is_too_large_is_named_with_its_size(tmp_path):
    path = tmp_path / "scan.png"
    path.write_bytes(png_header(9_000, 9_000))
    with pytest.raises(Unusable) as refused:
        open_image(path)
    assert refused.value.detail == f"9000x9000 {path}"


def test_photo_is_turned_upright(picture):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    data = picture(3, format="JPEG", exif=exif)
    assert open_image(data).size == (64, 96)
    upright = open_image(picture(3, format="JPEG")).rotate(-90, expand=True)
    opened = Image.open(io.BytesIO(data))
    assert open_image(data).tobytes() == open_image(opened).tobytes() == upright.tobytes()
    turned_by_hand = opened.rotate(-90, expand=True)  # keeps the EXIF data
    assert open_image(turned_by_hand).tobytes() == upright.tobytes()


def test_an_opened_file_may_be_decoded_by_several_threads(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (600, 800, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    with ThreadPoolExecutor(8) as workers:
        for _ in range(4):
            opened = [Image.open(tmp_path / "a.png") for _ in range(4)]
            for image in workers.map(open_image, [each for each in opened for _ in range(4)]):
                np.testing.assert_array_equal(image, pixels)


def test_copies_of_real_figures_look_alike_and_different_ones_do_not(shared):
    """At 20 of 144 bits: no two of 60 figures, and nine in ten of their worse copies."""
    paths = sorted((shared / "data" / "mathvision_mini" / "images").iterdir())[::5]
    fingerprints = [fingerprint(path) for path in paths]
    assert all(
        num_different_bits(a.hash, b.hash) > 20 for a, b in itertools.combinations(fingerprints, 2)
    )
    distances = []
    for path, own in zip(paths, fingerprints, strict=True):
        image = open_image(path).convert("RGB")
        file = io.BytesIO()
        image.resize([max(8, side * 7 // 10) for side in image.size]).save(file, "JPEG", quality=60)
        copy = fingerprint(file.getvalue())
        assert copy.digest != own.digest
        distances.append(num_different_bits(copy.hash, own.hash))
    assert sum(distance <= 20 for distance in distances) >= 0.9 * len(distances)
    assert sorted(distances)[len(distances) // 2] <= 12
