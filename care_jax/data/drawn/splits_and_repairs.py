"""Splits, checks, random generators and repairs of the sources that are drawn on demand."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np

SPLITS = ("train", "test")
_TEST_SHARE = 8  # one in this many keys belongs to the test split


def check(source: Any) -> None:
    """Rejects a source with a wrong setting, naming the setting and its value.

    The source is a dataclass with `num_examples` and `split`; all its float fields are
    probabilities.
    """
    if source.num_examples < 1:
        raise ValueError(f"num_examples must be at least 1, got {source.num_examples}")
    if source.split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {source.split!r}")
    for field in dataclasses.fields(source):
        share = getattr(source, field.name)
        if field.type == "float" and not 0.0 <= share <= 1.0:
            raise ValueError(f"{field.name} must lie in [0, 1], got {share}")


def rng_of(source: Any, index: int) -> np.random.Generator:
    """The random generator of an example, seeded by seed, split and index.

    IndexError: there is no such example; this also ends a loop over the source.
    """
    if not 0 <= index < source.num_examples:
        raise IndexError(f"index {index} is outside 0..{source.num_examples - 1}")
    return np.random.default_rng((source.seed, SPLITS.index(source.split), index))


def split_of(key: str) -> str:
    """The split of the example with a content key."""
    return "test" if zlib.crc32(key.encode()) % _TEST_SHARE == 0 else "train"


def repair(wrong: str, cue: str, right: str) -> tuple[str, str]:
    """The wrong rationale with the cue, joined as in RL, and the right one after a space."""
    return f"{wrong}{cue}", spaced(cue, right)


def spaced(before: str, text: str) -> str:
    """The text with a space in front, unless it starts or `before` ends with whitespace."""
    return text if before[-1:].isspace() or text[:1].isspace() else f" {text}"
