"""Default XLA flags."""

from __future__ import annotations

import os

# With the YNN library of jaxlib 0.10.2, a CPU update takes 15% longer and 0.8 GiB more memory, and
# decoding is no faster (`perf.update_memory`, `perf.decode`).
_DEFAULTS = {"xla_cpu_experimental_ynn_fusion_type": ""}


def set_defaults() -> None:
    """Adds the defaults to XLA_FLAGS; call it before JAX initialises its devices.

    A flag that is already set keeps its value. Other devices ignore the CPU flags.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [
        f"--{name}={value}" for name, value in _DEFAULTS.items() if f"--{name}=" not in flags
    ]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
