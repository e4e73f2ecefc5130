"""GSM8K and MATH: mathematics in words, with a worked solution that a cold start can imitate.

GSM8K (openai/gsm8k): `question`, and `answer`, a solution with calculator notes `<<6*7=42>>` and
the number after `####`. MATH (DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500):
`problem`, and `solution` with the answer in its last `\\boxed{}`, or also in `answer`. Both come as
JSON lines or parquet; GSM8K has a Socratic configuration besides `main/`, and MATH-lighteval the
problems of `data/` again by subject. A response is
`<{think_tag}>solution</{think_tag}><answer>answer</answer>`.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from care_jax.batch import Example, Unusable
from care_jax.data.readers import hub
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.readers.parquet import ParquetRows, find_files
from care_jax.data.rows import Rows, locate, make_example
from care_jax.rewards.equivalence.boxes import find_boxes

_CALCULATION = re.compile(r"<<[^<>]*>>")


def open_gsm8k(path: str, *, split: str = "", think_tag: str = "think") -> Rows:
    """The questions of GSM8K; of a release its folder `main/` is read.

    Args:
        path: a file, a folder of the release, or its hub id.
        split: "train", "test" or "all"; empty for a file, or for a folder of one split.

    Raises:
        ValueError: there are no such files, or no split is given and there are several.
    """
    folder = _folder(hub.find(path, ["main/*.parquet"]), "main")
    return _open(folder, "gsm8k", _of_gsm8k, split, think_tag)


def open_math(path: str, *, split: str = "", think_tag: str = "think") -> Rows:
    """The problems of MATH; `level`, `type` and `subject` stay in `Example.extra`.

    Args, errors: as of `open_gsm8k`; of a release its folder `data/`, if it has one.
    """
    folder = _folder(hub.find(path, ["data/*.parquet", "*.parquet", "*.jsonl"]), "data")
    return _open(folder, "math", _of_math, split, think_tag)


def _folder(release: pathlib.Path, configuration: str) -> pathlib.Path:
    folder = release / configuration
    return folder if folder.is_dir() else release


def _open(
    release: pathlib.Path,
    source: str,
    parts_of: Callable[[Mapping[str, Any]], tuple[Any, str, str]],
    split: str,
    think_tag: str,
) -> Rows:
    stem = "*" if split in ("", hub.ALL) else split
    files = sorted(release.glob(f"{stem}.jsonl")) if release.is_dir() else [release]
    if files and files[0].suffix in (".jsonl", ".json"):
        hub.check_files(files, release, split)
        tables = [JsonRows(file) for file in files]
    else:
        tables = [ParquetRows(find_files(release, split))]
    ends = list(itertools.accumulate(map(len, tables)))

    def example(index: int) -> Example:
        part, row_index = locate(ends, index)
        row = tables[part][row_index]
        question, rationale, answer = parts_of(row)
        used = ("question", "problem", "solution", "answer", "unique_id")
        return make_example(
            id=row.get("unique_id"),
            position=f"{split}-{index}" if split else index,
            source=source,
            question=question,
            answer=answer,
            images=(),
            rationale=rationale,
            response=f"<{think_tag}>{rationale}</{think_tag}><answer>{answer}</answer>",
            extra={name: value for name, value in row.items() if name not in used},
            needs_image=False,
        )

    return Rows(ends[-1], example)


def _of_gsm8k(row: Mapping[str, Any]) -> tuple[Any, str, str]:
    """(question, rationale, answer) of a row."""
    solution, found, number = _text(row, "answer").rpartition("####")
    if not found or not number.strip():
        raise Unusable("no number after ####")
    return row.get("question"), _CALCULATION.sub("", solution).strip(), number.strip()


def _of_math(row: Mapping[str, Any]) -> tuple[Any, str, str]:
    """(question, rationale, answer) of a row."""
    solution = _text(row, "solution").strip()
    boxes = [content for _, _, content in find_boxes(solution)]
    answer = row.get("answer") or (boxes[-1] if boxes else "")
    if not isinstance(answer, str) or not answer.strip():
        raise Unusable("no boxed answer in the solution")
    return row.get("problem"), solution, answer.strip()


def _text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row.get(name), str):
        raise Unusable(f"{name} is not text", f"{row.get(name)!r:.60}")
    return row[name]
