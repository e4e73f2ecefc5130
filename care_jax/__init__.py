"""CARE: reinforcement learning for vision-language models that learns from failures."""

import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from care_jax.from_python import Trained

# Only the tokenizers and templates of transformers are used, so its warning about a missing torch
# is switched off.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def train_on(
    config: "ConfigDict",
    train: Iterable[Mapping[str, Any]],
    test: Iterable[Mapping[str, Any]] | None = None,
    reward: Callable | None = None,
    *,
    workdir: str | pathlib.Path,
) -> "Trained":
    """Trains on rows given from Python, in a notebook, say; see `care_jax.from_python`."""
    from care_jax import from_python  # it imports JAX

    return from_python.train_on(config, train, test, reward, workdir=workdir)
