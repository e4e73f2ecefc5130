"""Renders one HTML file from template, style, scripts and data.

Text from models and datasets appears only in the data, which is JSON with "<" escaped, so that it
cannot close its element. The scripts insert it as text, never as markup. As a second defence, the
page's Content-Security-Policy allows only the script with this hash, and no network requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pathlib
from typing import Any

_FOLDER = pathlib.Path(__file__).parent
_SCRIPTS = ("page.js", "about.js", "curves.js", "inspector.js")


def to_json(value: Any) -> str:
    """JSON safe within a script element: ASCII, without "<"; ValueError for NaN and infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def render(data: str) -> str:
    """The whole file; `data` is a JSON object from `to_json`."""
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    parts = {
        "{{script_hash}}": f"sha256-{digest}",
        "{{style}}": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "{{data}}": data,
        "{{script}}": script,
    }
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    for placeholder, part in parts.items():  # from the right, so that the data is not searched
        before, _, after = page.rpartition(placeholder)
        page = before + part + after
    return page
