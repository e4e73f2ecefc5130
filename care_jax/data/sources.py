"""Opens a source of examples by its name in the configuration.

A source is a function or class that returns a sequence of examples, registered in `SOURCES`. Its
parameters are its options. A source with a `path` reads files; any other draws its examples on
demand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from care_jax.batch import Example
from care_jax.data.drawn.readings import ReadingsSource
from care_jax.data.drawn.synthetic import SyntheticSource
from care_jax.data.drawn.word_problems import WordProblems
from care_jax.data.mixture import check_weights
from care_jax.data.readers import (
    chartqa,
    geometry3k,
    jsonl,
    parquet,
    shards,
    virl39k,
    vision_r1,
    worked_math,
)
from care_jax.data.rows import Rows

SOURCES: dict[str, Callable[..., Sequence[Example]]] = {
    "synthetic": SyntheticSource,
    "readings": ReadingsSource,
    "word_problems": WordProblems,
    "jsonl": jsonl.open_rows,
    "parquet": parquet.open_rows,
    "arrayrecord": shards.open_rows,
    "chartqa": chartqa.open_rows,
    "geometry3k": geometry3k.open_rows,
    "virl39k": virl39k.open_rows,
    "vision_r1_cold": vision_r1.open_rows,
    "gsm8k": worked_math.open_gsm8k,
    "math": worked_math.open_math,
}
MIXTURE = "mixture"  # of several sources


def has_option(name: str, option: str) -> bool:
    """Whether there is a source of this name with this option."""
    return name in SOURCES and option in inspect.signature(SOURCES[name]).parameters


def is_drawn(name: str) -> bool:
    """Whether a source draws its examples on demand, and reads no file."""
    return name in SOURCES and not has_option(name, "path")


def parts_of(section: Any) -> Sequence[Any]:
    """The sections of a mixture's sources; of any other source, its section alone."""
    return section["parts"] if section["source"] == MIXTURE else (section,)


def check_section(name: str, section: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Rejects a section of the configuration that is neither a source nor a mixture of several.

    `data` has `min_pixels` and `max_pixels` for sources that set none (0).
    """
    if (section["source"] == MIXTURE) != bool(section["parts"]):
        raise ValueError(
            f"{name}.parts must hold sources for a mixture and be empty for any other source, got "
            f"{len(section['parts'])} for {section['source']!r}; change source or parts"
        )
    parts = parts_of(section)
    check_weights([part["weight"] for part in parts])
    for number, part in enumerate(parts):
        key = f"{name}.parts.{number}" if section["source"] == MIXTURE else name
        if part["source"] not in SOURCES:
            choices = ", ".join((*SOURCES, MIXTURE))
            near = difflib.get_close_matches(part["source"].lower(), SOURCES, 1)
            advice = f"write {near[0]!r}" if near else f"set config.{key}.source"
            if name == "data.sft":
                advice += ", or leave 'sft' out of --config.stages"
            raise ValueError(
                f"{key}.source must be one of {choices}, got {part['source']!r}; {advice}"
            )
        low, high = (part[key] or data[key] for key in ("min_pixels", "max_pixels"))
        if low > high:
            raise ValueError(
                f"{name}: min_pixels must not exceed max_pixels, got min_pixels {low} and "
                f"max_pixels {high} for {part['source']}; change its own, or those of data"
            )


def open_section(
    key: str, section: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sequence[Example]:
    """Opens the source of a section, see `source` in configs/common.py, that is not a mixture.

    `settings` are the run's, by option name, for the sources that have these options.

    Raises:
        ValueError: it cannot be opened; begins with `key`, the section's.
    """
    if not section["path"] and not is_drawn(section["source"]):
        raise ValueError(
            f"{key}.path must name a file, a folder or a hub id for the source "
            f"{section['source']!r}, got ''; set config.{key}.path"
        )
    own = {key: section[key] for key in section if key not in ("source", "seed", "weight", "parts")}
    own["columns"] = {name: column for name, column in section["columns"].items() if column}
    with named(key):
        return open_source(section["source"], settings={"seed": section["seed"], **settings}, **own)


@contextlib.contextmanager
def named(key: str) -> Iterator[None]:
    """Puts the key of a section before errors of its source."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def open_source(
    name: str,
    *,
    num_examples: int = 0,
    tolerance: float = 0.0,
    min_pixels: int = 0,
    max_pixels: int = 0,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Sequence[Example]:
    """A random-access sequence of examples; reading a row of a file may raise `Unusable`.

    Args:
        name: one of `SOURCES`.
        num_examples: number of examples to draw; of a file, to use its first rows, 0 for all.
        tolerance, min_pixels, max_pixels: set on every example; 0 leaves the field unchanged.
        settings: options that are ignored if the source does not take them.
        options: those of the source; empty or 0 means not set.

    Raises:
        ValueError: unknown source, or an option that the source does not take.
    """
    if name not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {name!r}")
    takes = inspect.signature(SOURCES[name]).parameters
    if "num_examples" in takes:
        options["num_examples"] = num_examples
    needed = {key for key, parameter in takes.items() if parameter.default is parameter.empty}
    options = {key: value for key, value in options.items() if value or key in needed}
    for option, value in options.items():
        if option not in takes:
            advice = "clear it"
            if option == "path":
                advice = "set source to its reader, such as 'jsonl', or clear it"
            raise ValueError(f"source {name!r} takes no {option}, got {value!r}; {advice}")
    defaults = {key: value for key, value in (settings or {}).items() if key in takes}
    source = SOURCES[name](**defaults | options)
    if num_examples and "num_examples" not in takes:
        if not len(source):
            raise ValueError(f"source {name!r} must have rows, got none in {options.get('path')!r}")
        if num_examples > len(source):
            raise ValueError(
                f"num_examples {num_examples} exceeds the {len(source)} rows of "
                f"{options.get('path')!r}; lower it, or set it to 0 for all"
            )
        source = Rows(num_examples, source.__getitem__)
    changes = {"tolerance": tolerance, "min_pixels": min_pixels, "max_pixels": max_pixels}
    changes = {field: value for field, value in changes.items() if value}
    if not changes:
        return source
    return Rows(len(source), lambda index: dataclasses.replace(source[index], **changes))
