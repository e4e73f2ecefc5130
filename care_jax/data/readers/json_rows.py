"""Random access to the objects of a JSON file, indexed once and parsed on access.

The file is JSON lines or one array. Only the byte offsets of the rows are held in memory. A row
that is not valid JSON or UTF-8 does not affect the other rows. A UTF-8 byte order mark, which
Windows programs write, is skipped.
"""

from __future__ import annotations

import codecs
import json
import mmap
import pathlib
import re
from array import array
from typing import Any

from care_jax.batch import Unusable
from care_jax.data.readers import formats
from care_jax.data.texts import LONE_SURROGATE, SURROGATE

# The tokens that delimit array elements. A whole string is one token, so brackets inside it do not
# count. A lone quotation mark matches only where a string is never closed.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},"]', re.DOTALL)
# A pair of escaped UTF-16 surrogates is one character; a lone one cannot be encoded as UTF-8.
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_ROW_BYTES = 2**24  # parsed, a row takes up to 20 times as much
_MAX_DEPTH = 64  # of lists and objects in a row; copying and writing them recurses


class JsonRows:
    """Random access to the objects of a file.

    A `.json` file is one array; any other file has an object per line. `numbers` has each row's
    line number, or its position in the array, from 1.

    Raises:
        ValueError: the file does not exist, is in UTF-16 or UTF-32, or is a `.json` file and not
            one complete array.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path).expanduser()
        if not self.path.is_file():
            what = "a folder" if self.path.is_dir() else "which does not exist"
            raise ValueError(
                f"expected a file of JSON rows, got {str(path)!r}, {what}; correct the source's "
                "path"
            )
        with self.path.open("rb") as file:
            is_empty = not file.read(1)
            self._data = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # UTF-32's begins with it
            raise ValueError(
                f"expected {str(self.path)!r} to be in UTF-8, got the byte order mark of UTF-16 or "
                "UTF-32; convert it: iconv -f UTF-16 -t UTF-8"
            )
        kind, advice = formats.format_of(self._data[: formats.START])
        if kind and not kind.endswith("JSON"):
            raise ValueError(
                f"expected a file of JSON rows, got {str(self.path)!r}, {kind}; {advice}"
            )
        self._starts, self._stops, self.numbers = array("Q"), array("Q"), array("Q")
        find = self._find_elements if self.path.suffix == ".json" else self._find_lines
        find()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, stop = self._starts[index], self._stops[index]
        text = self._data[start : min(stop, start + MAX_ROW_BYTES + 1)]
        try:
            return parse_object(text)
        except Unusable as error:
            place = "element" if self.path.suffix == ".json" else "line"
            place += f" {self.numbers[index]} of {self.path}"
            raise Unusable(
                str(error), f"{place} begins {text[:40].decode(errors='replace')!r}"
            ) from error

    def _add(self, start: int, stop: int, number: int) -> None:
        if stop - start > MAX_ROW_BYTES or _without_mark(self._data[start:stop]):
            self._starts.append(start)
            self._stops.append(stop)
            self.numbers.append(number)

    def _find_lines(self) -> None:
        start, number = 0, 1
        while start < len(self._data):
            end = self._data.find(b"\n", start)
            stop = len(self._data) if end < 0 else end
            self._add(start, stop, number)
            start, number = stop + 1, number + 1

    def _find_elements(self) -> None:
        depth, start, number = 0, 0, 1
        for token in _TOKEN.finditer(self._data):
            mark = token.group()[:1]
            if token.group() == b'"':
                break
            if depth == 1 and mark in b",]":
                self._add(start, token.start(), number)
                start, number = token.end(), number + 1
            if mark in b"[{":
                depth += 1
                start = token.end() if depth == 1 else start
            elif mark in b"]}":
                depth -= 1
        if depth or not len(self._data) or _without_mark(self._data[:64])[:1] != b"[":
            raise ValueError(
                f"expected {str(self.path)!r} to be one complete JSON array; {self._advice()}"
            )

    def _advice(self) -> str:
        """What to do with a `.json` file that is not one array."""
        try:
            keys = ", ".join(map(repr, parse_object(self._data[: MAX_ROW_BYTES + 1])))
        except Unusable:
            return (
                "it may be truncated: download it again, or name it .jsonl if it has one row per "
                "line"
            )
        return f"it is an object with {keys or 'no keys':.200}; write the rows alone, as an array"


def parse_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object; raises `Unusable` for anything else, or nesting over 64 deep."""
    if len(text) > MAX_ROW_BYTES:
        raise Unusable(f"row of more than {MAX_ROW_BYTES >> 20} MiB")
    try:
        row = json.loads(_without_mark(text).decode())
    except UnicodeDecodeError as error:
        raise Unusable("not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Unusable("not JSON") from error
    if not isinstance(row, dict):
        raise Unusable("not an object")
    if _is_deeper(row, _MAX_DEPTH):
        raise Unusable(f"nested more than {_MAX_DEPTH} deep")
    if _ESCAPED_SURROGATE.search(text) and SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        raise Unusable(LONE_SURROGATE)
    return row


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects in the value are nested more than `depth` deep."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in inner)


def _without_mark(text: bytes) -> bytes:
    """The text without a byte order mark and whitespace around it."""
    return text.strip().removeprefix(codecs.BOM_UTF8).strip()
