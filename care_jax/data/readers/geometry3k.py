"""Geometry3K: diagrams with a question whose answer is a value.

Two releases are supported. hiyouga/geometry3k has parquet files with columns images, problem and
answer (a value); newer versions add id, choices and ground_truth (a letter). InterGPS has a folder
per problem with `data.json` (problem_text, choices, answer: a letter, ...), `logic_form.json` and
`img_diagram.png`.

By default the question is open and the answer is the value, as in the parquet release. For the
folder release the value is the text of the right choice, which may be an exact form such as 4√2.
"""

from __future__ import annotations

import pathlib
from typing import Any

from care_jax.batch import Example, Unusable
from care_jax.data.readers import hub
from care_jax.data.readers.json_rows import MAX_ROW_BYTES, parse_object
from care_jax.data.readers.parquet import ParquetRows, find_files
from care_jax.data.rows import Rows, images_of, make_example

SUBSETS = ("", "choices", "logic")
NAME = "geometry3k"
_LETTERS = "ABCD"


def open_rows(path: str, *, split: str = "", subset: str = "") -> Rows:
    """The problems of a split: train, val or test.

    Args:
        path: folder of either release, or the hub id of the parquet release.
        subset: "" for open questions; "choices" to list the four choices; "logic" for open
            questions with the diagram's logic forms in the text (folder release only).

    Raises:
        ValueError: unknown split or subset, or the folder holds neither release.
    """
    hub.check_split(NAME, split)
    if subset not in SUBSETS:
        raise ValueError(f"geometry3k's subset must be one of {SUBSETS}, got {subset!r}")
    root = hub.find(path, ["data/*.parquet"])
    folder = root / split if (root / split).is_dir() else root
    problems = sorted(folder.glob("*/data.json"), key=lambda file: _in_order(file.parent.name))
    if problems:
        return Rows(len(problems), lambda index: _problem(problems[index].parent, subset))
    if subset == "logic":
        raise ValueError(
            f"geometry3k's subset 'logic' needs InterGPS's folders (train/0/data.json) in "
            f"{str(root)!r}, got parquet files; change the source's path, or its subset to ''"
        )
    table = ParquetRows(find_files(root, "validation" if split == "val" else split))

    def example(index: int) -> Example:
        row = table[index]
        has_choices = subset == "choices"
        return make_example(
            id=row.get("id"),
            position=f"{split}-{index}",
            source=NAME,
            question=row.get("problem"),
            answer=row.get("ground_truth" if has_choices else "answer"),
            images=images_of(row.get("images"), root),
            choices=row.get("choices") if has_choices else (),
            needs_placeholder=True,
        )

    return Rows(len(table), example)


def _problem(folder: pathlib.Path, subset: str) -> Example:
    row = _read(folder / "data.json")
    question, letter, choices = row.get("problem_text"), row.get("answer"), row.get("choices")
    if not isinstance(letter, str) or not isinstance(choices, list):
        raise Unusable("no answer")
    if letter not in _LETTERS[: len(choices)] or not letter:
        raise Unusable("answer not among the choices")
    if subset == "logic":
        forms = _read(folder / "logic_form.json").get("diagram_logic_form") or []
        question = f"{question}\nDiagram: {'; '.join(map(str, forms))}"
    return make_example(
        id=folder.name,
        source=NAME,
        question=question,
        answer=letter if subset == "choices" else choices[_LETTERS.index(letter)],
        images=images_of("img_diagram.png", folder),
        choices=choices if subset == "choices" else (),
    )


def _read(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise Unusable(f"{path.name} missing")
    with path.open("rb") as file:
        return parse_object(file.read(MAX_ROW_BYTES + 1))


def _in_order(name: str) -> tuple[int, str]:
    return (int(name) if name.isdecimal() else -1, name)
