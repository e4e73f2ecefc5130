"""Parses matrices and vectors: LaTeX environments, nested lists, rows separated by semicolons.

Works on cleaned text and evaluates nothing: cells remain text.
"""

from __future__ import annotations

import re

from care_jax.rewards.equivalence import notation

_MAX_CELLS = 64

Matrix = list[list[str]]

_MATRIX = re.compile(
    r"[\[(]? ?\\begin\{(?:[pbB]?matrix|smallmatrix|array)\}(?: ?\{[lcr| ]*\})?"
    r"((?:[^\\]|\\(?!begin|end))*)\\end\{[a-zA-Z]+\} ?[\])]?"
)
_ROW = re.compile(r"\[([^\[\]]*)\]")


def read_matrix(text: str) -> Matrix | None:
    """The rows of a matrix, written in LaTeX, as `[[1, 2], [3, 4]]` or as `[1, 2; 3, 4]`."""
    text = text.strip()
    if match := _MATRIX.fullmatch(text):
        lines = [line.split("&") for line in re.split(r"\\\\", match.group(1)) if line.strip()]
    elif text[:1] == "[" and text[-1:] == "]" and not _ROW.sub("", text[1:-1]).strip(" ,"):
        lines = [row.split(",") for row in _ROW.findall(text[1:-1])]
    elif text.startswith("[") and text.endswith("]") and ";" in text and "," in text:
        lines = [line.split(",") for line in text[1:-1].split(";")]
    else:
        return None
    rows = [[cell.strip() for cell in line] for line in lines]
    is_full = bool(rows) and all(len(row) == len(rows[0]) and all(row) for row in rows)
    return rows if is_full and sum(map(len, rows)) <= _MAX_CELLS else None


def read_pair(one: str, other: str) -> tuple[Matrix, Matrix] | None:
    """Both texts as matrices; a list is one row or column if the other text is."""
    left, right = read_matrix(one), read_matrix(other)
    if left and not right:
        right = _read_vector(other, left)
    if right and not left:
        left = _read_vector(one, right)
    return (left, right) if left and right else None


def _read_vector(text: str, shape: Matrix) -> Matrix | None:
    found = notation.split_list(text)
    if found is None or found[0] not in ("()", "[]") or 1 not in (len(shape), len(shape[0])):
        return None
    return [found[1]] if len(shape) == 1 else [[item] for item in found[1]]


def as_latex(rows: Matrix) -> str:
    """The rows as a `pmatrix`."""
    cells = " \\\\ ".join(" & ".join(row) for row in rows)
    return f"\\begin{{pmatrix}}{cells}\\end{{pmatrix}}"
