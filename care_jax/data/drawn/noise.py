"""What the sources that are drawn on demand share: splits, checks, and how a repair is written."""

from __future__ import annotations

import zlib
from collections.abc import Collection

SPLITS = ("train", "test")
_TEST_SHARE = 8  # one in this many keys belongs to the test split


def check(
    num_examples: int,
    split: str,
    *,
    kinds: Collection[str],
    known: Collection[str],
    **shares: float,
) -> None:
    """Refuses the settings of a source that cannot be drawn.

    Args:
        num_examples: length of the source.
        split: one of `SPLITS`.
        kinds: of question that it is to ask.
        known: those that it can ask.
        shares: probabilities by name.

    Raises:
        ValueError: naming the setting and its value.
    """
    if num_examples < 1:
        raise ValueError(f"num_examples must be at least 1, got {num_examples}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if not kinds or not set(kinds) <= set(known):
        raise ValueError(f"kinds must be taken from {', '.join(known)}, got {kinds}")
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {share}")


def check_index(index: int, num_examples: int) -> None:
    """Raises IndexError if there is no such example, which also ends a loop over a source."""
    if not 0 <= index < num_examples:
        raise IndexError(f"index {index} is outside 0..{num_examples - 1}")


def split_of(key: str) -> str:
    """The split to which an example belongs that a key determines."""
    return "test" if zlib.crc32(key.encode()) % _TEST_SHARE == 0 else "train"


def repair(wrong: str, cue: str, right: str) -> tuple[str, str]:
    """A rationale with the cue, joined as in RL, and the right rationale behind a space."""
    return f"{wrong}{cue}", spaced(cue, right)


def spaced(before: str, text: str) -> str:
    """A text with a space in front, unless what is before it ends in one or it starts with one."""
    return text if before[-1:].isspace() or text[:1].isspace() else f" {text}"
