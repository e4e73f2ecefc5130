"""Pictures as data URIs of at most MAX_BYTES, so that a report can hold many."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from PIL import Image

from care_jax.batch import Unusable
from care_jax.prompts.images import AnyImage, open_image

MAX_BYTES = 48 * 1024  # of one encoded picture
_JPEG_QUALITY = 80
_DRAWING_COLORS = 4096  # with more, a PNG is no smaller and takes ten times as long to encode


def data_uri(image: AnyImage, *, max_side: int) -> str:
    """A JPEG or PNG, whichever is smaller, of at most MAX_BYTES; empty if it cannot be read.

    Transparent pixels become white. The longer side has at most `max_side` pixels, fewer if
    MAX_BYTES requires it.
    """
    try:
        picture = open_image(image, at_least=max_side).convert("RGBA")
    except Unusable:  # the file was removed after the prompt was built
        return ""
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255,) * 4), picture)
    picture = picture.convert("RGB")
    while True:
        picture.thumbnail((max_side, max_side))
        kinds = ("png", "jpeg") if picture.getcolors(_DRAWING_COLORS) else ("jpeg",)
        kind, data = min((_encoded(picture, kind) for kind in kinds), key=lambda pair: len(pair[1]))
        if len(data) <= MAX_BYTES or max_side == 1:
            return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        max_side = max(max_side * 3 // 4, 1)


def opened(uri: str) -> Image.Image:
    """The picture of a data URI."""
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def first(group: Mapping[str, Any]) -> Image.Image | None:
    """The first picture of a group, from `Report.add`, if it has one that can be read."""
    return opened(group["pictures"][0]) if any(group["pictures"][:1]) else None


def _encoded(picture: Image.Image, kind: str) -> tuple[str, bytes]:
    file = io.BytesIO()
    picture.save(file, kind, quality=_JPEG_QUALITY)
    return kind, file.getvalue()
