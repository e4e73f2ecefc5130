"""`care_jax.main` for the soak test: its metrics also have the memory that is in use.

Resident memory also has what glibc keeps for later, tens of MiB more or less from step to step.
With PYTHONMALLOC=malloc all objects and arrays are allocated by glibc, which counts them exactly.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import jax

from care_jax import main
from care_jax.devices.loaded_programs import num_mappings
from care_jax.run import stage

EVERY = 10  # steps between two collections of garbage, of which the memory in use is free
_USED = ("hblkhd", "uordblks")  # bytes in use, mapped one by one and in arenas
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (*_FIELDS, "fordblks", "keepcost")]


class Usage:
    """`host_usage` of every step, with the memory in use as of every 10th."""

    def __init__(self) -> None:
        self._count = ctypes.CDLL("libc.so.6").mallinfo2
        self._count.restype = _Mallinfo2
        self._host_usage, self._calls, self._found = stage.host_usage, 0, {}

    def __call__(self) -> dict[str, Any]:
        if self._calls % EVERY == 0:
            gc.collect()
            counted = self._count()
            self._found = {
                "host/used_gib": sum(getattr(counted, name) for name in _USED) / 2**30,
                "host/live_arrays": len(jax.live_arrays()),
                "host/mappings": num_mappings(),
            }
        self._calls += 1
        return self._host_usage() | self._found


if __name__ == "__main__":
    stage.host_usage = Usage()
    main.run_main()
