"""Opens images from a dataset (PIL images, paths or file bytes), and compares them by hash.

Files are untrusted: sizes are checked before pixels are decoded, only a few formats are opened, and
every exception of a decoder becomes `Unusable`.

16-bit pixels are scaled to 8 bits by the range that their format defines. 32-bit and float pixels
have no such range (depths, heights, measurements), and Pillow would clip them: they are rejected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import threading
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from care_jax.batch import Unusable
from care_jax.prompts.patches import MAX_ASPECT_RATIO

AnyImage = Image.Image | pathlib.Path | zipfile.Path | bytes

MAX_SIDE = 20_000  # pixels
MAX_PIXELS = 50_000_000  # 150 MB once decoded
_TOO_LARGE = f"image of more than {MAX_PIXELS // 10**6} megapixels or {MAX_SIDE:,} pixels a side"
MAX_FILE_BYTES = 2**28  # those pixels uncompressed, with transparency
# Each scan of a progressive JPEG takes the time of all its pixels, and as few as 14 bytes of the
# file. Encoders write about 10.
MAX_SCANS = 100
_START_OF_SCAN = b"\xff\xda"
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # not EPS: it can run programs
# Colour modes of at most 8 bits per channel.
_COLOR_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV")
_GRAY_16_MODES = ("I;16", "I;16B", "I;16L", "I;16N")
_NUM_BITS_TAG, _PHOTOMETRIC_TAG = 258, 262  # of TIFF
_ORIENTATION = 0x0112  # EXIF tag
_HASH_SIDE = 12  # lowest frequencies per axis that are hashed
_GRAY_SIDE = 64  # pixels per side of the grey image that is transformed
# An opened file decodes its pixels on first use, which two threads must not do at once.
_loading = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Fingerprints of an image, exact and perceptual."""

    digest: bytes  # of its size and pixels; the same for the same picture in any file format
    hash: int  # perceptual, 144 bits; few differ between resized or recompressed copies


def open_image(image: AnyImage, *, at_least: int = 0) -> Image.Image:
    """Decodes an image and applies the EXIF orientation of its file.

    A PIL image is of a file if it is as `Image.open` returned it, and not a copy.

    `at_least` is the pixels per side that suffice: JPEG is decoded at a reduced size no smaller
    than this, which still reads the whole file. 0 decodes at full size.

    Raises:
        Unusable: it is missing, broken, too large or too narrow, or its pixels are not colours.
    """
    if isinstance(image, Image.Image):
        with _refused_if_broken(image):
            _check_size(*image.size)
            with _loading:
                image.load()
            return _upright(image) if image.format else _as_colors(image)
    with _refused_if_broken(image), _opened(image) as opened:
        _check_size(*opened.size)
        if opened.info.get("progressive"):
            _check_scans(opened)
        if at_least:
            opened.draft("RGB", (at_least, at_least))
        opened.load()
        return _upright(opened)


def image_size(image: AnyImage) -> tuple[int, int]:
    """(width, height) in pixels, from the file's header; raises `Unusable` if it is broken."""
    if isinstance(image, Image.Image):
        return image.size
    with _refused_if_broken(image), _opened(image) as opened:
        return opened.size


def encoded(image: AnyImage) -> bytes:
    """The bytes of an image's file; a PIL image is encoded as PNG."""
    if not isinstance(image, Image.Image):
        return image if isinstance(image, bytes) else image.read_bytes()
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def checksum(image: AnyImage) -> int:
    """CRC-32 of the bytes of an image's file, or of the pixels of a PIL image."""
    return zlib.crc32(image.tobytes() if isinstance(image, Image.Image) else encoded(image))


def fingerprint(image: AnyImage) -> Fingerprint:
    """Decodes the whole file and computes the fingerprints of the image.

    The hash has one bit for each of the 12 x 12 lowest DCT frequencies of the grey image: whether
    it is above their median. Unlike a hash of differences between neighbouring pixels, it
    distinguishes line drawings, which are mostly white.
    """
    picture = open_image(image).convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255,) * 4), picture)
    digest = hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()[:16]
    gray = picture.convert("L").resize((_GRAY_SIDE, _GRAY_SIDE), Image.Resampling.BILINEAR)
    centres = np.arange(_GRAY_SIDE) + 0.5  # of the pixels
    cosines = np.cos(np.pi / _GRAY_SIDE * np.outer(np.arange(_HASH_SIDE), centres))
    frequencies = (cosines @ np.asarray(gray, np.float64) @ cosines.T).ravel()
    frequencies[0] = 0.0  # the mean brightness
    bits = frequencies.round(6) > np.median(frequencies.round(6))
    return Fingerprint(digest, int.from_bytes(np.packbits(bits).tobytes(), "big"))


def num_different_bits(one: int, other: int) -> int:
    """Number of the 144 bits in which two perceptual hashes differ."""
    return (one ^ other).bit_count()


@contextlib.contextmanager
def _refused_if_broken(image: AnyImage) -> Iterator[None]:
    """Turns every exception of a decoder into `Unusable`, with the path if the image has one."""
    detail = "" if isinstance(image, bytes | Image.Image) else os.path.abspath(str(image))
    try:
        yield
    except Unusable as error:
        raise Unusable(str(error), " ".join(filter(None, (error.detail, detail)))) from error
    except Image.DecompressionBombError as error:
        raise Unusable(_TOO_LARGE, detail) from error
    except UnidentifiedImageError as error:
        raise Unusable(f"image is none of {', '.join(_FORMATS)}, or damaged", detail) from error
    except Exception as error:
        raise Unusable("image unreadable or truncated", detail) from error


def _opened(image: pathlib.Path | zipfile.Path | bytes) -> Image.Image:
    if not isinstance(image, bytes) and not image.is_file():
        raise Unusable("image missing")
    if _num_bytes(image) > MAX_FILE_BYTES:
        raise Unusable(f"image file of more than {MAX_FILE_BYTES >> 20} MiB")
    if isinstance(image, zipfile.Path):
        image = image.read_bytes()
    file = io.BytesIO(image) if isinstance(image, bytes) else image
    return Image.open(file, formats=_FORMATS)


def _num_bytes(image: pathlib.Path | zipfile.Path | bytes) -> int:
    """The size of the file, in an archive after decompression."""
    if isinstance(image, bytes):
        return len(image)
    if isinstance(image, zipfile.Path):
        return image.root.getinfo(image.at).file_size  # zipfile reads no more than this
    return image.stat().st_size


def _upright(opened: Image.Image) -> Image.Image:
    """The colours of an opened file, turned as its EXIF orientation says."""
    colors = _as_colors(opened)
    is_turned = opened.getexif().get(_ORIENTATION, 1) != 1
    return ImageOps.exif_transpose(colors) if is_turned else colors


def _check_scans(opened: Image.Image) -> None:
    file: Any = opened.fp  # type: ignore[attr-defined]
    place = file.tell()
    file.seek(0)
    num_scans = file.read().count(_START_OF_SCAN)
    file.seek(place)
    if num_scans > MAX_SCANS:
        raise Unusable(f"JPEG of more than {MAX_SCANS} scans")


def _as_colors(image: Image.Image) -> Image.Image:
    """The image in a mode of at most 8 bits per channel; `Unusable` if it has no colours."""
    if image.mode in _GRAY_16_MODES:
        return _scaled_to_8_bits(image)
    if image.mode in ("I", "F"):
        raise Unusable("image of 32-bit pixels, whose range is unknown; save it with 8 or 16 bits")
    if image.mode not in _COLOR_MODES:
        raise Unusable(f"image of mode {image.mode}, expected RGB or grey")
    return image.convert("RGBA") if image.mode == "RGBa" else image


def _scaled_to_8_bits(image: Image.Image) -> Image.Image:
    """Scales a grey image of 9 to 16 bits to 8 bits; a transparent value becomes white.

    PNG and TIFF define black and white as 0 and 2ⁿ - 1; TIFF may invert them.
    """
    tags = getattr(image, "tag_v2", {})
    (num_bits,) = tags.get(_NUM_BITS_TAG, (16,))
    pixels = np.asarray(image).astype(np.uint32)
    most = 2**num_bits - 1
    gray = np.minimum((pixels * 255 + most // 2) // most, 255).astype(np.uint8)
    if tags.get(_PHOTOMETRIC_TAG) == 0:
        gray = 255 - gray
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[pixels == transparent] = 255
    scaled = Image.fromarray(gray)
    scaled.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return scaled


def _check_size(width: int, height: int) -> None:
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise Unusable(_TOO_LARGE, f"{width}x{height}")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise Unusable(
            f"image with a side over {MAX_ASPECT_RATIO} times the other", f"{width}x{height}"
        )
