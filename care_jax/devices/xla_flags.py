"""Defaults of XLA's flags and memory share, which the environment overrides.

With jax 0.10.2 few are needed: the TPU and GPU compilers overlap collectives with computation by
default, and the flags often set for that change nothing ("XLA's flags" in docs/performance.md).
"""

from __future__ import annotations

import os

PRESETS = ("auto", "none")
# Empty: with the YNN library of jaxlib 0.10.2 a CPU update takes 15% longer and 0.8 GiB more
# memory, and decoding is no faster (docs/performance.md). Other devices ignore the flag.
_FLAGS = {"xla_cpu_experimental_ynn_fusion_type": ""}
# JAX takes 75% of a GPU's memory; `flops.CHIPS`, and so `care_jax.aot`, counts on 90%.
_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MEMORY_NAMES = (_MEMORY, "XLA_CLIENT_MEM_FRACTION")
_MEMORY_SHARE = "0.9"


def set_defaults(preset: str = "auto") -> list[str]:
    """Sets XLA's flags and memory share; call it before JAX initialises its devices.

    With the preset "none", and where the environment has a value, nothing is set. Returns what was
    set, as NAME=value.
    """
    if preset == "none":
        return []
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={value}" for name, value in _FLAGS.items() if f"--{name}=" not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    assigned = [f"XLA_FLAGS={flag}" for flag in missing]
    if not any(name in os.environ for name in _MEMORY_NAMES):
        os.environ[_MEMORY] = _MEMORY_SHARE
        assigned.append(f"{_MEMORY}={_MEMORY_SHARE}")
    return assigned
