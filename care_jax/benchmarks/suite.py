"""Loads benchmarks by name from the files of their releases.

A release is a parquet file, a folder of parquet files, or a file of JSON lines with the images next
to it. A folder has the layout of `hf download --repo-type dataset`: the file name
starts with the split, and a configuration is a parent folder. Rows are kept as released, without
images. Images are read on access, one row group at a time.

A module that scores a benchmark has `parse`, `is_correct` and `question`; `mmmu_pro` is the
simplest.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from PIL import Image, ImageOps

from care_jax.batch import Example, Unusable
from care_jax.benchmarks import mathverse, mathvision, mathvista, mmmu, mmmu_pro
from care_jax.benchmarks.judge import Case, Judge
from care_jax.benchmarks.rows import gold_of
from care_jax.benchmarks.samples import Answers, Questions, QuestionVerdict, Sample
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.readers.parquet import ParquetRows, columns_without_bytes

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Release:
    """A benchmark's scorer, and the files of its release.

    Attributes:
        scorer: the module that builds prompts and scores answers.
        split: file name up to the first hyphen.
        groups: fields, of a row or of its `metadata`, whose values are its categories.
        configuration: parent folder of the files, if a release has several; empty for any.
        in_average: whether it is one of the six benchmarks of the macro average (sec:setup).
    """

    scorer: ModuleType
    split: str
    groups: tuple[str, ...]
    configuration: str = ""
    in_average: bool = True


_VISTA = ("question_type", "answer_type", "language", "source", "category", "task", "context",
          "grade")  # fmt: skip
_VERSE = ("problem_version", "question_type", "subject", "subfield")
_VISION = ("subject", "level")
_PRO = ("subject", "topic_difficulty")
RELEASES = {
    "mathvista": Release(mathvista, "testmini", _VISTA),
    "mathverse": Release(mathverse, "testmini", _VERSE),
    "mathvision": Release(mathvision, "test", _VISION),
    # A subset of the one above, so excluded from the mean.
    "mathvision_testmini": Release(mathvision, "testmini", _VISION, in_average=False),
    "mmmu": Release(mmmu, "validation", ("question_type", "topic_difficulty")),
    "mmmu_pro": Release(mmmu_pro, "test", _PRO, "standard (10 options)"),
    "mmmu_pro_vision": Release(mmmu_pro, "test", _PRO, "vision"),
}
# The subject of a row of MMMU is part of its id, `validation_<subject>_<number>`.
_MMMU_ID = re.compile(r"[^_]+_(.+)_\d+")


class Benchmark(Sequence[Example]):
    """The questions of a benchmark; their rows, for scoring, are in `rows`.

    Args:
        name: a key of `RELEASES`.
        path: file or folder of the release.

    Raises:
        ValueError: no such benchmark, or no file of it at the path.
    """

    def __init__(self, name: str, path: str | pathlib.Path):
        if name not in RELEASES:
            raise ValueError(
                f"evaluate.benchmarks must name one of {', '.join(RELEASES)}, got {name!r}"
            )
        self.name, self.release = name, RELEASES[name]
        self.scorer = self.release.scorer
        self.rows: list[Row] = []
        self._images: list[Callable[[], Row]] = []
        for file in _files(pathlib.Path(path).expanduser(), self.release):
            read = _read_parquet if file.suffix == ".parquet" else _read_json_lines
            rows, images = read(file)
            self.rows += rows
            self._images += images
        if not self.rows:
            raise ValueError(
                f"expected rows of {name} in {str(path)!r}, got none; download it again"
            )
        self.ids = [_id_of(row) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row = self.rows[index] | self._images[index]()
        question = self.scorer.question(row)
        return Example(
            id=self.ids[index],
            source=self.name,
            images=tuple(self._image(row, field) for field in question.images),
            question=question.text,
            answer=gold_of(row),
            choices=question.options,
            extra=self.rows[index],
        )

    def fingerprint(self) -> list[tuple[str, str, str]]:
        """What tells these rows from others: the id, question and gold answer of each."""
        texts = (str(row.get("question")) for row in self.rows)
        return list(zip(self.ids, texts, map(gold_of, self.rows), strict=True))

    def questions(self, judge: Judge | None) -> Questions:
        """The questions and their scoring, by rules and an optional judge."""
        judged = functools.partial(self.judged, judge=judge)
        return Questions(self.name, self, self.verdicts, self.categories, judged)

    def categories(self, sample: Sample) -> list[str]:
        """The values of the fields `Release.groups`, and each skill of MathVista."""
        row = self.rows[sample["doc_id"]]
        fields = row | (row.get("metadata") or {})
        groups = [f"skill/{skill}" for skill in fields.get("skills") or ()]
        if self.name == "mmmu" and (match := _MMMU_ID.fullmatch(sample["id"])):
            groups.append(f"subject/{match.group(1)}")
        names = [name for name in self.release.groups if fields.get(name) not in (None, "")]
        return groups + [f"{name}/{fields[name]}" for name in names]

    def verdicts(self, answers: Answers) -> list[QuestionVerdict]:
        """Verdicts of the rules."""
        scorer, verdicts = self.scorer, []
        for index, texts in zip(answers.indices, answers.texts, strict=True):
            row = self.rows[index]
            accs = [float(scorer.is_correct(text, row)) for text in texts]
            is_parsed = all(scorer.parse(text, row) is not None for text in texts)
            verdicts.append(QuestionVerdict(accs, is_parsed))
        return verdicts

    def judged(self, samples: Sequence[Sample], judge: Judge | None) -> list[Sample]:
        """The samples with the verdicts of a judge on free answers that are parsed but wrong.

        Their field `judges` has the verdicts of each judge so far, by its name, on each response:
        null if it was not asked or failed. What a judge has said it is not asked again.
        `acc_judged` is the accuracy after this judge; None if there is no verdict of it.
        """
        if judge is None:
            return [sample | {"acc_judged": None} for sample in samples]
        said: list[list[bool | None]] = [
            list(sample.get("judges", {}).get(judge.name) or [None] * len(sample["resps"]))
            for sample in samples
        ]
        cases = {
            (number, index): Case(
                sample["input"], sample["target"], sample["filtered_resps"][index]
            )
            for number, sample in enumerate(samples)
            for index in self._free_and_wrong(sample)
            if said[number][index] is None
        }
        for (number, index), word in zip(cases, judge.verdicts([*cases.values()]), strict=True):
            said[number][index] = word
        return [
            _with_verdicts(sample, judge.name, words)
            for sample, words in zip(samples, said, strict=True)
        ]

    def _free_and_wrong(self, sample: Sample) -> Iterator[int]:
        """The responses to a question without options that have an answer, but a wrong one."""
        row = self.rows[sample["doc_id"]]
        if self.scorer.question(row).options:
            return
        accs = sample.get("accs", [sample["acc"]])
        for index, (text, acc) in enumerate(zip(sample["resps"], accs, strict=True)):
            if not acc and self.scorer.parse(text, row) is not None:
                yield index

    def _image(self, row: Row, field: str) -> Image.Image:
        # `image` is the path of the image in `decoded_image`; JSON lines have only the path.
        value = row.get(field) or row.get("image")
        if isinstance(value, dict) and value.get("bytes"):
            image = Image.open(io.BytesIO(value["bytes"]))
        elif path := value.get("path") if isinstance(value, dict) else value:
            image = Image.open(row["folder"] / path)
        else:
            raise ValueError(
                f"row {_id_of(row)} of {self.name} has no image in its field {field!r}; download "
                "the release again"
            )
        with image:
            # As the official harness does, whose library turns images by their EXIF tag.
            return ImageOps.exif_transpose(image).convert("RGB")


def _with_verdicts(sample: Sample, judge: str, words: list[bool | None]) -> Sample:
    if all(word is None for word in words):
        return sample | {"acc_judged": None}
    accs = sample.get("accs", [sample["acc"]])
    judged = [acc if word is None else word for acc, word in zip(accs, words, strict=True)]
    return sample | {
        "acc_judged": sum(judged) / len(judged),
        "judges": sample.get("judges", {}) | {judge: words},
    }


def _id_of(row: Row) -> str:
    found = (row.get(field) for field in ("pid", "id", "sample_index"))
    return str(next((value for value in found if value is not None), ""))


def _files(path: pathlib.Path, release: Release) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    for suffix in ("parquet", "jsonl"):
        files = sorted(path.rglob(f"*.{suffix}")) if path.is_dir() else []
        if release.configuration:
            named = [f for f in files if release.configuration in f.relative_to(path).parts]
            # The path may be the configuration folder itself.
            files = named or (files if path.name == release.configuration else [])
        # test-00000-of-00001.parquet, not testmini-...
        files = [f for f in files if f.stem.partition("-")[0] == release.split]
        if files:
            return files
    raise ValueError(
        f"expected {release.split}-*.parquet or {release.split}.jsonl "
        f"{f'under {release.configuration!r} ' if release.configuration else ''}in {str(path)!r}, "
        "got no such file; point evaluate.benchmarks at a downloaded release"
    )


def _read_json_lines(path: pathlib.Path) -> tuple[list[Row], list[Callable[[], Row]]]:
    rows, table = [], JsonRows(path)
    for index, number in enumerate(table.numbers):
        try:
            rows.append(table[index])
        except Unusable as error:
            raise ValueError(
                f"expected JSON on line {number} of {str(path)!r}, got {error}; repair the file"
            ) from error
    return rows, [lambda: {"folder": path.parent}] * len(rows)


def _read_parquet(path: pathlib.Path) -> tuple[list[Row], list[Callable[[], Row]]]:
    texts, whole = ParquetRows([path], columns_without_bytes([path])), ParquetRows([path])

    def images(index: int) -> Row:
        return whole[index] | {"folder": path.parent}

    indices = range(len(texts))
    return [texts[i] for i in indices], [functools.partial(images, i) for i in indices]
