"""Malformed input of every kind, as many as asked for."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from tests import fuzz

KINDS = tuple(fuzz.KINDS)
_COLUMNS = ("kind", "examples", *fuzz.OUTCOMES, "seconds")


def run(kinds: Sequence[str], num_examples: int, seed: int) -> list[str]:
    """Prints a row of a table for each kind; returns the kinds that failed."""
    print(f"| {' | '.join(_COLUMNS)} |\n| --- |{' ---: |' * (len(_COLUMNS) - 1)}")
    return [kind for kind in kinds if not _is_right(kind, num_examples, seed)]


def _is_right(kind: str, num_examples: int, seed: int) -> bool:
    """Prints a row of the table, or the failure; returns whether there was none."""
    try:
        outcomes, seconds = fuzz.timed(kind, num_examples, seed)
    except Exception:
        print(f"| {kind} | {num_examples} | **failed** |\n", flush=True)
        traceback.print_exc()
        return False
    counts = " | ".join(f"{outcomes[name]}" for name in fuzz.OUTCOMES)
    print(f"| {kind} | {num_examples} | {counts} | {seconds:.0f} |", flush=True)
    return True
