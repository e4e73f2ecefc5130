"""Images as sources give them, opened, by path or as bytes of a file, and how they compare.

Files come from anywhere: sizes are checked before pixels are decoded, few formats are opened at
all, and whatever a decoder raises becomes a reason to leave the row out.
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
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO")  # EPS, say, would run a program
_ORIENTATION = 0x0112  # tag of EXIF
_HASH_SIDE = 12  # of the square of frequencies that are hashed
_GRAY_SIDE = 64  # pixels per side of what the frequencies are taken of


@dataclasses.dataclass(frozen=True)
class Look:
    """What an image looks like.

    Attributes:
        digest: of its size and pixels; the same for the same picture, however it is stored.
        hash: perceptual hash, 144 bits; few differ between copies resized or compressed anew.
    """

    digest: bytes
    hash: int


def open_image(image: AnyImage, *, at_least: int = 0) -> Image.Image:
    """Decodes an image, upright.

    Args:
        image: what a source gives.
        at_least: pixels per side that are enough; where its format can skip detail (JPEG) it is
            decoded smaller, which still reads the whole file. 0 decodes it as it is.

    Raises:
        Unusable: there is no such file, it is broken, or its size is beyond all use.
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
        Unusable: as `open_image`, as far as the header tells.
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
    """The bytes of an image file: those it has, else a PNG's."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, pathlib.Path | zipfile.Path):
        return image.read_bytes()
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def look(image: AnyImage) -> Look:
    """Decodes an image whole and says what it looks like.

    The hash is the sign of the 12 x 12 lowest frequencies of its grey picture against their
    median. Unlike differences of neighbouring pixels, these tell apart line drawings, which are
    white nearly everywhere.

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
    return Look(digest, int.from_bytes(np.packbits(bits).tobytes(), "big"))


def num_different_bits(one: int, other: int) -> int:
    """In how many of the 144 bits two perceptual hashes differ."""
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
