"""Opens images from a dataset (PIL images, paths or file bytes), and compares them by hash.

Files are untrusted: sizes are checked before pixels are decoded, only a few formats are opened, and
anything a decoder raises becomes a reason to leave the row out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pathlib
import zipfile

import numpy as np
from PIL import Image, ImageOps

from care_jax.batch import Unusable
from care_jax.prompts.patches import MAX_ASPECT_RATIO

AnyImage = Image.Image | pathlib.Path | zipfile.Path | bytes

MAX_SIDE = 20_000  # pixels
MAX_PIXELS = 50_000_000  # 150 MB once decoded
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO")  # not EPS: it can run programs
_ORIENTATION = 0x0112  # EXIF tag
_HASH_SIDE = 12  # lowest frequencies per axis that are hashed
_GRAY_SIDE = 64  # pixels per side of the grey image that is transformed


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Fingerprints of an image, exact and perceptual.

    Attributes:
        digest: of its size and pixels; the same for the same picture in any file format.
        hash: perceptual hash, 144 bits; few differ between resized or recompressed copies.
    """

    digest: bytes
    hash: int


def open_image(image: AnyImage, *, at_least: int = 0) -> Image.Image:
    """Decodes an image and applies its EXIF orientation. PIL images are only checked for size.

    Args:
        image: image from a dataset.
        at_least: pixels per side that suffice: JPEG is decoded at a reduced size no smaller than
            this, which still reads the whole file. 0 decodes at full size.

    Raises:
        Unusable: the file is missing or broken, or the image is too large or too narrow.
    """
    if isinstance(image, Image.Image):
        _check_size(*image.size)
        return image
    try:
        with _opened(image) as opened:
            _check_size(*opened.size)
            if at_least:
                opened.draft("RGB", (at_least, at_least))
            opened.load()
            if opened.getexif().get(_ORIENTATION, 1) != 1:
                return ImageOps.exif_transpose(opened)
            return opened
    except Unusable:
        raise
    except Image.DecompressionBombError as error:
        raise Unusable("image too large") from error
    except Exception as error:  # decoders raise anything on broken files
        raise Unusable("image unreadable or truncated") from error


def image_size(image: AnyImage) -> tuple[int, int]:
    """(width, height) in pixels, from the file's header.

    Raises:
        Unusable: the file is missing, or its header cannot be read.
    """
    if isinstance(image, Image.Image):
        return image.size
    try:
        with _opened(image) as opened:
            return opened.size
    except Unusable:
        raise
    except Exception as error:
        raise Unusable("image unreadable or truncated") from error


def encoded(image: AnyImage) -> bytes:
    """The bytes of an image's file; a PIL image is encoded as PNG."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, pathlib.Path | zipfile.Path):
        return image.read_bytes()
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def fingerprint(image: AnyImage) -> Fingerprint:
    """Decodes the whole file and computes the fingerprints of the image.

    The hash has one bit for each of the 12 x 12 lowest DCT frequencies of the grey image: whether
    it is above their median. Unlike a hash of differences between neighbouring pixels, it tells
    line drawings apart, which are white nearly everywhere.

    Raises:
        Unusable: as `open_image`.
    """
    picture = open_image(image, at_least=_GRAY_SIDE).convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255,) * 4), picture)
    digest = hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()[:16]
    gray = picture.convert("L").resize((_GRAY_SIDE, _GRAY_SIDE), Image.Resampling.BILINEAR)
    place = np.arange(_GRAY_SIDE) + 0.5
    cosines = np.cos(np.pi / _GRAY_SIDE * np.outer(np.arange(_HASH_SIDE), place))
    frequencies = (cosines @ np.asarray(gray, np.float64) @ cosines.T).ravel()
    frequencies[0] = 0.0  # the mean brightness
    bits = frequencies.round(6) > np.median(frequencies.round(6))
    return Fingerprint(digest, int.from_bytes(np.packbits(bits).tobytes(), "big"))


def num_different_bits(one: int, other: int) -> int:
    """Number of the 144 bits in which two perceptual hashes differ."""
    return (one ^ other).bit_count()


def _opened(image: pathlib.Path | zipfile.Path | bytes) -> Image.Image:
    if not isinstance(image, bytes) and not image.is_file():
        raise Unusable("image missing")
    if isinstance(image, zipfile.Path):
        image = image.read_bytes()
    file = io.BytesIO(image) if isinstance(image, bytes) else image
    return Image.open(file, formats=_FORMATS)


def _check_size(width: int, height: int) -> None:
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise Unusable("image too large")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise Unusable("image too narrow")
