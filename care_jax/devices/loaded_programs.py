"""Drops compiled programs before the process reaches Linux's limit on memory mappings.

XLA loads every kernel of a CPU program as three mappings, and an update is compiled for every shape
of rows: 40 steps of `configs/repair.py` take 58,000 mappings. Above `vm.max_map_count`, 65,530 by
default, "LLVM compilation error: Cannot allocate memory" and a segmentation fault end the process,
however much memory is free. Programs for other devices are not dropped.
"""

from __future__ import annotations

import pathlib
from collections import Counter

import jax
from absl import logging

_LOADED = "/jax/core/compile/backend_compile_duration"  # a program compiled, or read from the cache
_MAPPINGS = pathlib.Path("/proc/self/maps")
_MOST_MAPPINGS = pathlib.Path("/proc/sys/vm/max_map_count")
_MOST_FILLED = 0.6  # share of the limit; the rest is for programs loaded until the next call
# loaded: programs since the last count of mappings; kept: mappings left after the last drop.
_counts: Counter[str] = Counter()


def drop_if_many() -> bool:
    """Drops all compiled programs if mappings are near the limit; returns whether it did.

    To be called before every step and every batch of an evaluation. A program needed again is read
    from the compilation cache or recompiled, and computes the same.
    """
    if not _counts:
        _counts.update(loaded=1, kept=0)
        jax.monitoring.register_event_duration_secs_listener(_count)
    # Counting takes 0.5 ms per thousand mappings, so it is skipped if nothing was loaded.
    if not _counts["loaded"] or jax.default_backend() != "cpu" or not _MOST_MAPPINGS.exists():
        return False
    _counts["loaded"] = 0
    mappings, most = num_mappings(), int(_MOST_MAPPINGS.read_text(encoding="utf-8"))
    if mappings - _counts["kept"] < _MOST_FILLED * (most - _counts["kept"]):
        return False
    jax.clear_caches()
    _counts["kept"] = num_mappings()
    logging.warning(
        "dropped the compiled programs, which used most of the %d memory mappings of a process "
        "(%d before, %d now); those needed again are loaded or recompiled. Raise the limit to keep "
        "them: sysctl vm.max_map_count=1048576",
        most,
        mappings,
        _counts["kept"],
    )
    return True


def num_mappings() -> int:
    """Number of memory mappings of this process."""
    with _MAPPINGS.open("rb") as lines:
        return sum(1 for _ in lines)


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    _counts["loaded"] += event == _LOADED
