"""Opens a source of examples by its name in the configuration.

A reader is a module with `open_rows(path, ...) -> Rows`, registered by a line of `_FILES`. A source
that is drawn on demand is a sequence, registered by a line of `DRAWN`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from care_jax.batch import Example
from care_jax.data.drawn.readings import ReadingsSource
from care_jax.data.drawn.synthetic import SyntheticSource
from care_jax.data.drawn.word_problems import WordProblems
from care_jax.data.mixture import check_weights
from care_jax.data.readers import chartqa, geometry3k, jsonl, parquet, shards, virl39k, vision_r1
from care_jax.data.rows import Rows

# name -> (reader, the options it takes besides the path)
_FILES: dict[str, tuple[Callable[..., Sequence[Example]], tuple[str, ...]]] = {
    "jsonl": (jsonl.open_rows, ("images", "images_outside")),
    "parquet": (parquet.open_rows, ("split", "columns", "images", "images_outside")),
    "arrayrecord": (shards.open_rows, ("subset",)),
    "chartqa": (chartqa.open_rows, ("split", "subset")),
    "geometry3k": (geometry3k.open_rows, ("split", "subset")),
    "virl39k": (virl39k.open_rows, ("images", "images_outside")),
    "vision_r1_cold": (vision_r1.open_rows, ("images", "images_outside", "think_tag")),
}
# name -> (sequence, the mistakes and repairs of the cold start's teacher that it can draw)
DRAWN: dict[str, tuple[Callable[..., Sequence[Example]], tuple[str, ...]]] = {
    "synthetic": (SyntheticSource, ("teacher_error", "cue_share")),
    "readings": (ReadingsSource, ("misread_share", "teacher_error", "cue_share")),
    "word_problems": (WordProblems, ("cue_share",)),
}
SOURCES = (*DRAWN, *_FILES)
MIXTURE = "mixture"  # of several sources
# Configuration keys of a source that are passed to `open_source` unchanged.
_OPTIONS = (
    "path",
    "split",
    "subset",
    "images",
    "images_outside",
    "columns",
    "num_examples",
    "tolerance",
    "min_pixels",
    "max_pixels",
    "seed",
)


def options_of(section: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for `open_source` from a source's section of the configuration."""
    return {option: section[option] for option in _OPTIONS}


def check_section(
    name: str, section: Mapping[str, Any], *, min_pixels: int, max_pixels: int
) -> None:
    """Checks a source's section of the configuration.

    Args:
        name: of the section, for the message.
        section: one source, or a mixture of them.
        min_pixels, max_pixels: image sizes for sources that set none (0).

    Raises:
        ValueError: the section is invalid; the message says what to change.
    """
    is_mixture = section["source"] == MIXTURE
    if is_mixture != bool(section["parts"]):
        raise ValueError(
            f"{name}.parts must hold sources for a mixture and be empty for any other source, got "
            f"{len(section['parts'])} for {section['source']!r}; change source or parts"
        )
    parts = section["parts"] if is_mixture else (section,)
    check_weights([part["weight"] for part in parts])
    for part in parts:
        if part["source"] not in SOURCES:
            choices = ", ".join((*SOURCES, MIXTURE))
            raise ValueError(f"{name}.source must be one of {choices}, got {part['source']!r}")
        low, high = part["min_pixels"] or min_pixels, part["max_pixels"] or max_pixels
        if not 0 < low <= high:
            raise ValueError(
                f"{name}: images of {part['source']} would have {low} to {high} pixels; change "
                "its min_pixels or max_pixels, or those of data"
            )
        if not 0 <= part["tolerance"] < 1:
            raise ValueError(f"{name}: tolerance must lie in [0, 1), got {part['tolerance']}")


def open_source(
    name: str,
    *,
    path: str = "",
    split: str = "",
    subset: str = "",
    images: str = "",
    images_outside: bool = False,
    columns: Mapping[str, str] | None = None,
    num_examples: int = 0,
    tolerance: float = 0.0,
    min_pixels: int = 0,
    max_pixels: int = 0,
    seed: int = 0,
    kinds: Sequence[str] = (),
    teacher_error: float = 0.0,
    misread_share: float = 0.0,
    cue_share: float = 0.0,
    cue: str = "",
    think_tag: str = "think",
) -> Sequence[Example]:
    """A random-access sequence of examples; reading a row of a file may raise `Unusable`.

    Args:
        name: one of `DRAWN`, or the format of the files at `path`.
        path: a file, a folder, or a hub id.
        split, subset: parts of a release; for a drawn source, split "" is "train".
        images: folder that image paths are relative to; empty for the release's folder.
        images_outside: allows image paths that lead out of that folder.
        columns: column names for the parquet source.
        num_examples: number of examples to draw; for a release, of its first rows, 0 for all.
        tolerance, min_pixels, max_pixels: set on every example; 0 leaves the field unchanged.
        seed, kinds, teacher_error, misread_share, cue_share, cue: of a drawn source; no kinds: all.
        think_tag: name of the tag in responses that the source composes.

    Raises:
        ValueError: unknown source, or an argument that the source does not take.
    """
    if name not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {name!r}")
    if num_examples < 0:
        raise ValueError(f"num_examples must not be negative, got {num_examples}")
    given: dict[str, Any] = {"split": split, "subset": subset, "images": images}
    given |= {"images_outside": images_outside, "columns": dict(columns or {})}
    if not any(given["columns"].values()):
        given["columns"] = {}
    takes = ("split",) if name in DRAWN else _FILES[name][1]
    for option, value in given.items():
        if value and option not in takes:
            raise ValueError(f"source {name!r} takes no {option}, got {value!r}; clear it")
    taught: dict[str, Any] = {"teacher_error": teacher_error, "misread_share": misread_share}
    taught |= {"cue_share": cue_share}
    draw, draws = DRAWN.get(name, (None, ()))
    for option, value in taught.items():
        if value and option not in draws:
            takers = " and ".join(other for other in DRAWN if option in DRAWN[other][1])
            raise ValueError(
                f"{option} {value} is for drawn sources ({takers}), not for {name!r}; set it to 0"
            )
    if draw is not None:
        if path:
            raise ValueError(f"the {name} source reads no file, got path {path!r}; clear it")
        options = {option: taught[option] for option in draws} | ({"kinds": kinds} if kinds else {})
        source = draw(
            num_examples,
            seed=seed,
            split=split or "train",
            cue=cue,
            think_tag=think_tag,
            **options,
        )
    else:
        source = _open_files(name, path, num_examples, given | {"think_tag": think_tag})
    changes = {"tolerance": tolerance, "min_pixels": min_pixels, "max_pixels": max_pixels}
    changes = {field: value for field, value in changes.items() if value}
    if not changes:
        return source
    return Rows(len(source), lambda index: dataclasses.replace(source[index], **changes))


def _open_files(
    name: str, path: str, num_examples: int, options: Mapping[str, Any]
) -> Sequence[Example]:
    reader, takes = _FILES[name]
    rows = reader(path, **{option: options[option] for option in takes})
    if num_examples > len(rows):
        raise ValueError(
            f"num_examples {num_examples} exceeds the {len(rows)} rows of {path!r}; lower it, or "
            "set it to 0 for all"
        )
    return Rows(num_examples, rows.__getitem__) if num_examples else rows
