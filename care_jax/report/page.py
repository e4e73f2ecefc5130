"""The HTML file: template, style, scripts and data in one, and the data read back from it.

Text of models and datasets is in the data alone, as JSON in which no "<" is left, so that it
cannot end its element, and the scripts put it into the page as text, never as markup. Should that
fail, the page's own policy lets no script run but the one whose hash it names, and nothing be
fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pathlib
from typing import Any

_FOLDER = pathlib.Path(__file__).parent
_SCRIPTS = ("page.js", "curves.js", "inspector.js")
_OPENING = '<script type="application/json" id="data">'
_CLOSING = "</script>"


def to_json(value: Any) -> str:
    """JSON that is safe within a script element: ASCII, without "<".

    Raises:
        ValueError: a number is NaN or infinite.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def render(data: str) -> str:
    """The whole file.

    Args:
        data: an object, from `to_json`.
    """
    script = "\n".join((_FOLDER / name).read_text() for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    parts = {
        "{{script_hash}}": f"sha256-{digest}",
        "{{style}}": (_FOLDER / "page.css").read_text(),
        "{{data}}": f"{_OPENING}{data}{_CLOSING}",
        "{{script}}": f"<script>\n{script}</script>",
    }
    page = (_FOLDER / "page.html").read_text()
    for place, part in parts.items():  # the data goes in once, and is not searched for places
        before, _, after = page.rpartition(place)
        page = before + part + after
    return page


def read(page: str) -> Any:
    """The data of a file that `render` made.

    Raises:
        ValueError: it is no such file.
    """
    _, opening, rest = page.partition(_OPENING)
    data, closing, _ = rest.partition(_CLOSING)
    if not (opening and closing):
        raise ValueError("expected a page with its data, got one without")
    return json.loads(data)
