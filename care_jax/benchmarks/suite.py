"""Loads benchmarks by name from the files of their releases.

Rows are kept as released, without images, and checked when a benchmark is opened. Images are read
on access, one row group at a time, and decoded as lmms-eval does. It ignores transparency, and
clips grey images of 16 bits; training puts transparent parts on white, and scales 16 bits.

A module that scores a benchmark has `parse`, `is_correct` and `question`; `mmmu_pro` is the
simplest.
"""

from __future__ import annotations

import functools
import io
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from PIL import Image, ImageOps

from care_jax.batch import Example, Unusable
from care_jax.benchmarks.judge import Case, Judge
from care_jax.benchmarks.releases import RELEASES, find_files
from care_jax.benchmarks.row_checks import check_rows, find_images
from care_jax.benchmarks.rows import gold_of
from care_jax.benchmarks.samples import Answers, Questions, QuestionVerdict, Sample
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.readers.parquet import ParquetRows, columns_without_bytes
from care_jax.prompts.images import encoded

Row = dict[str, Any]
BLANK = "num_images_of_one_colour"  # field of `Example.extra`, where there is any
# The subject of a row of MMMU is part of its id, `validation_<subject>_<number>`.
_MMMU_ID = re.compile(r"[^_]+_(.+)_\d+")


class Benchmark(Sequence[Example]):
    """The questions of a benchmark; their rows, for scoring, are in `rows`.

    Args:
        name: a key of `RELEASES`.
        path: file or folder of the release.

    Attributes:
        notes: what is unusual about the rows, see `row_checks.check_rows`.

    Raises:
        ValueError: no such benchmark, no file of it at the path, or a row that it cannot have.
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
        self._places: list[str] = []  # in their files, for messages
        self.ids: list[str] = []
        files = find_files(pathlib.Path(path).expanduser(), self.release)
        self.notes = check_rows(name, self.release, self._read(files))

    def _read(self, files: Sequence[pathlib.Path]) -> Iterator[tuple[str, str, Row]]:
        """Keeps the rows of the files without their images; yields place, id and the whole row."""
        for file in files:
            read = _read_parquet if file.suffix == ".parquet" else _read_json_lines
            for place, row, whole, images in read(file):
                self.rows.append(row)
                self.ids.append(_id_of(row))
                self._images.append(images)
                self._places.append(place)
                yield place, self.ids[-1], whole

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row = self.rows[index] | self._images[index]()
        question = self.scorer.question(row)
        images = [self._image(index, row, field) for field in question.images]
        num_blank = sum(image.getcolors(1) is not None for image in images)
        return Example(
            id=self.ids[index],
            source=self.name,
            images=tuple(images),
            question=question.text,
            answer=gold_of(row),
            choices=question.options,
            extra=self.rows[index] | ({BLANK: num_blank} if num_blank else {}),
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

    def _image(self, index: int, row: Row, field: str) -> Image.Image:
        (image,) = find_images(row, field)  # of a known format, see `check_rows`
        try:
            with Image.open(io.BytesIO(encoded(image))) as opened:
                return ImageOps.exif_transpose(opened).convert("RGB")
        except Exception as error:  # of any decoder
            raise ValueError(
                f"expected an image in the field {field!r} of {self._places[index]}, got "
                f"{'bytes' if isinstance(image, bytes) else image} that cannot be decoded "
                f"({error}); {self.release.advice}"
            ) from error


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


_ReadRow = tuple[str, Row, Row, Callable[[], Row]]


def _read_json_lines(path: pathlib.Path) -> Iterator[_ReadRow]:
    """(place, row, the row with its images, a function that reads them) of each row."""
    table, folder = JsonRows(path), {"folder": path.parent}
    for index, number in enumerate(table.numbers):
        try:
            row = table[index]
        except Unusable as error:
            raise ValueError(
                f"expected JSON on line {number} of {str(path)!r}, got {error}; repair the file"
            ) from error
        yield f"line {number} of {path}", row, row | folder, folder.copy


def _read_parquet(path: pathlib.Path) -> Iterator[_ReadRow]:
    """As `_read_json_lines`; the images are read twice, as the first table keeps some of them."""
    texts = ParquetRows([path], columns_without_bytes([path]))
    whole, later = ParquetRows([path]), ParquetRows([path])
    folder = {"folder": path.parent}

    def images(index: int) -> Row:
        return later[index] | folder

    for index in range(len(texts)):
        row = functools.partial(images, index)
        yield f"row {index + 1} of {path}", texts[index], whole[index] | folder, row
