"""What XLA is told by default."""

from __future__ import annotations

import os

# With jaxlib 0.10.2's YNN library an update on a CPU takes 15% longer and 0.8 GiB more memory, and
# decoding is no faster (`perf.update_memory`, `perf.decode`).
_DEFAULTS = {"xla_cpu_experimental_ynn_fusion_type": ""}


def set_defaults() -> None:
    """Puts the defaults into XLA_FLAGS, before JAX first asks for devices.

    A flag that stands there already keeps its value. Other devices pay no heed to a CPU's flags.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [
        f"--{name}={value}" for name, value in _DEFAULTS.items() if f"--{name}=" not in flags
    ]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
