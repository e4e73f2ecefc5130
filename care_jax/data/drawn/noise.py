"""What the sources that are drawn on demand share: splits, checks, and how a repair is written."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection
from typing import Any

import numpy as np

SPLITS = ("train", "test")
_TEST_SHARE = 8  # one in this many keys belongs to the test split


def check(source: Any, known: Collection[str]) -> None:
    """Refuses the settings of a source that cannot be drawn, naming the setting and its value.

    It is a dataclass with `num_examples`, `split` and `kinds`, which are among those known; all of
    its fields that are floats are probabilities.
    """
    if source.num_examples < 1:
        raise ValueError(f"num_examples must be at least 1, got {source.num_examples}")
    if source.split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {source.split!r}")
    if not source.kinds or not set(source.kinds) <= set(known):
        raise ValueError(f"kinds must be taken from {', '.join(known)}, got {source.kinds}")
    for field in dataclasses.fields(source):
        share = getattr(source, field.name)
        if field.type == "float" and not 0.0 <= share <= 1.0:
            raise ValueError(f"{field.name} must lie in [0, 1], got {share}")


def rng_of(source: Any, index: int) -> np.random.Generator:
    """The random numbers of an example: a function of seed, split and index.

    An IndexError if there is no such example, which also ends a loop over a source.
    """
    if not 0 <= index < source.num_examples:
        raise IndexError(f"index {index} is outside 0..{source.num_examples - 1}")
    return np.random.default_rng((source.seed, SPLITS.index(source.split), index))


def split_of(key: str) -> str:
    """The split to which an example belongs that a key determines."""
    return "test" if zlib.crc32(key.encode()) % _TEST_SHARE == 0 else "train"


def repair(wrong: str, cue: str, right: str) -> tuple[str, str]:
    """A rationale with the cue, joined as in RL, and the right rationale behind a space."""
    return f"{wrong}{cue}", spaced(cue, right)


def spaced(before: str, text: str) -> str:
    """A text with a space in front, unless what is before it ends in one or it starts with one."""
    return text if before[-1:].isspace() or text[:1].isspace() else f" {text}"
