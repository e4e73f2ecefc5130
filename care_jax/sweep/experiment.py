"""An experiment: a file that declares its arms and how they are compared."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from care_jax.sweep.figures import PANELS
from care_jax.sweep.measures import BENCHMARKS, MEASURES

_COLUMNS = ("acc", "gain", "lead", BENCHMARKS, "response_tokens", "decoded_tokens")
_PANELS = ("accuracy", "by_tokens")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a file of `experiments/` declares.

    Attributes:
        path: of the file.
        title: first line of its docstring.
        arms: ARMS, arm name to changed configuration keys, in the order of the table.
        reference: REFERENCE, the arm that others are compared with, seed by seed.
        columns: COLUMNS of the table, names of `measures.MEASURES`.
        panels: PANELS of the figure, names of `figures.PANELS`.
        get_config: "arm@base" to its configuration, see `configs/arms.py`.
    """

    path: pathlib.Path
    title: str
    arms: Mapping[str, Mapping[str, Any]]
    reference: str
    columns: tuple[str, ...]
    panels: tuple[str, ...]
    get_config: Callable[[str], ConfigDict]

    @property
    def name(self) -> str:
        return self.path.stem


def load_experiment(path: pathlib.Path) -> Experiment:
    """Reads an experiment's file.

    Raises:
        ValueError: the file is missing, lacks a declaration, or uses an unknown name in one.
    """
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(
            f"--experiment must be a file such as experiments/baselines.py, got {path}; choose one "
            "of experiments/"
        )
    spec = importlib.util.spec_from_file_location(f"experiments.{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the file is there, and ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in ("ARMS", "REFERENCE", "get_config") if not hasattr(module, name)]
    if missing or not module.__doc__:
        raise ValueError(
            f"{path} must have a docstring, ARMS, REFERENCE and get_config; it lacks "
            f"{', '.join(missing) or 'a docstring'}"
        )
    experiment = Experiment(
        path=path,
        title=module.__doc__.splitlines()[0],
        arms=module.ARMS,
        reference=module.REFERENCE,
        columns=getattr(module, "COLUMNS", _COLUMNS),
        panels=getattr(module, "PANELS", _PANELS),
        get_config=module.get_config,
    )
    for what, names, known in (
        ("REFERENCE", (experiment.reference,), experiment.arms),
        ("COLUMNS", experiment.columns, (*MEASURES, BENCHMARKS)),
        ("PANELS", experiment.panels, PANELS),
    ):
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{what} of {path} must be among {', '.join(known)}, got {name!r}; change it"
                )
    return experiment
