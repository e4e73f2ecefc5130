"""Text is UTF-8 in files, whatever the locale is."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = [
    path for room in ("care_jax", "models", "experiments") for path in (ROOT / room).rglob("*.py")
]
# The lowest position of `encoding`, and of the mode of a file.
CALLS = {"read_text": (0, None), "write_text": (1, None), "open": (2, 0)}


def without_encoding(tree):
    """The lines of calls that read or write text in the encoding of the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        position, mode = CALLS.get(node.func.attr, (None, None))
        if position is None or any(each.arg == "encoding" for each in node.keywords):
            continue
        if mode is not None:  # of Path.open, not of Image.open and the like
            given = node.args[mode] if len(node.args) > mode else None
            is_text = isinstance(given, ast.Constant) and given.value in ("r", "w", "a", "a+")
            if not is_text:
                continue
        if len(node.args) <= position:
            yield node.lineno


@pytest.mark.parametrize("line", ["path.read_text()", "path.write_text(text)", "path.open('w')"])
def test_a_call_without_encoding_is_found(line):
    assert [*without_encoding(ast.parse(line))] == [1]


def test_text_is_read_and_written_as_utf_8():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        for line in without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not found
