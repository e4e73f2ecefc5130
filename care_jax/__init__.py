"""CARE: reinforcement learning for vision-language models that learns from failures."""

import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from care_jax.from_python import train_on as train_on

# Only the tokenizers and templates of transformers are used, so its warning about a missing torch
# is switched off.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# A notebook without ipywidgets needs none: the bars of a run are lines there.
warnings.filterwarnings("ignore", message="IProgress not found")


def __getattr__(name: str) -> Any:
    """`train_on`, which imports JAX, once it is asked for."""
    if name == "train_on":
        from care_jax.from_python import train_on

        return train_on
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
