"""The releases of the benchmarks, and the files that are read of each.

A release is a parquet file, a folder of parquet files, or a file of JSON lines with the images next
to it. A folder has the layout of `hf download --repo-type dataset`: the file name starts with the
split, and a configuration is a parent folder.
"""

from __future__ import annotations

import dataclasses
import pathlib
from types import ModuleType

from care_jax.benchmarks import mathverse, mathvision, mathvista, mmmu, mmmu_pro
from care_jax.data.readers import hub

_SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclasses.dataclass(frozen=True)
class Release:
    """A benchmark's scorer, and the files of its release.

    Attributes:
        scorer: the module that builds prompts and scores answers.
        repository: its hub id.
        split: file name up to the first hyphen.
        num_rows: of the split, as published.
        fields: that every row has.
        groups: fields, of a row or of its `metadata`, whose values are its categories.
        configuration: parent folder of the files, if a release has several; empty for any.
        min_options: number of options that at least one row has.
        in_average: whether it is one of the six benchmarks of the macro average (sec:setup).
    """

    scorer: ModuleType
    repository: str
    split: str
    num_rows: int
    fields: tuple[str, ...]
    groups: tuple[str, ...]
    configuration: str = ""
    min_options: int = 0
    in_average: bool = True

    @property
    def advice(self) -> str:
        """How to get its files."""
        return (
            f"hf download {self.repository} --repo-type dataset --local-dir FOLDER, and point "
            "evaluate.benchmarks at the folder"
        )


_ASKED = ("id", "question", "answer")
_VISTA = ("question_type", "answer_type", "language", "source", "category", "task", "context",
          "grade")  # fmt: skip
_VERSE = ("problem_version", "question_type", "subject", "subfield")
_VISION = ("subject", "level")
_PRO = ("subject", "topic_difficulty")
RELEASES = {
    "mathvista": Release(
        mathvista, "AI4Math/MathVista", "testmini", 1000,
        ("pid", "question", "choices", "answer", "answer_type"), _VISTA,
    ),
    "mathverse": Release(
        mathverse, "CaraJ/MathVerse-lmmseval", "testmini", 3940,
        ("sample_index", "question", "answer", "question_type", "problem_version"), _VERSE,
    ),
    "mathvision": Release(
        mathvision, "MathLLMs/MathVision", "test", 3040, _ASKED, _VISION
    ),
    # A subset of the one above, so excluded from the mean.
    "mathvision_testmini": Release(
        mathvision, "MathLLMs/MathVision", "testmini", 304, _ASKED, _VISION,
        in_average=False,
    ),
    "mmmu": Release(
        mmmu, "MMMU/MMMU", "validation", 900,
        (*_ASKED, "options", "question_type", "image_1"), ("question_type", "topic_difficulty"),
    ),
    # Most rows of both have ten options, some as few as two.
    "mmmu_pro": Release(
        mmmu_pro, "MMMU/MMMU_Pro", "test", 1730, (*_ASKED, "options", "image_1"), _PRO,
        "standard (10 options)", 5,
    ),
    "mmmu_pro_vision": Release(
        mmmu_pro, "MMMU/MMMU_Pro", "test", 1730, ("id", "image", "options", "answer"), _PRO,
        "vision", 5,
    ),
}  # fmt: skip


def find_files(path: pathlib.Path, release: Release) -> list[pathlib.Path]:
    """The files of a release at a path, at least one, sorted.

    Raises:
        ValueError: there is none, or those of several revisions.
    """
    if path.suffix in _SUFFIXES and path.is_file():
        return [path]
    for suffix in _SUFFIXES[:2]:
        files = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else []
        if release.configuration:
            named = [f for f in files if release.configuration in f.relative_to(path).parts]
            # The path may be the configuration folder itself.
            files = named or (files if path.name == release.configuration else [])
        # test-00000-of-00001.parquet, not testmini-...
        files = [f for f in files if f.stem.partition("-")[0] == release.split]
        if files:
            hub.check_files(files, path, release.split)
            return files
    raise ValueError(
        f"expected {release.split}-*.parquet or {release.split}.jsonl "
        f"{f'under {release.configuration!r} ' if release.configuration else ''}in {str(path)!r}, "
        f"got {_what_is_at(path)}; {release.advice}"
    )


def _what_is_at(path: pathlib.Path) -> str:
    if path.suffix == ".tsv":
        return "a TSV of another harness, which is not read"
    if not path.is_dir():
        return f"a {path.suffix or 'nameless'} file" if path.exists() else "nothing: no such path"
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*.*") if file.is_file())
    return f"no such file ({', '.join(names[:4]) or 'the folder is empty'})"
