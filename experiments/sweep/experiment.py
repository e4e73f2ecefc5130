"""An experiment: a file that declares its arms and how they are compared."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from experiments.sweep.figures import names_of_panels, panel_named
from experiments.sweep.measures import (
    BENCHMARK_COLUMNS,
    BENCHMARKS,
    measure_named,
    names_of_measures,
)

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
        columns: COLUMNS of the table, names of measures, see `measures`.
        panels: PANELS of the figure, names of `figures.PANELS` or of measures.
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


def load_experiment(
    path: pathlib.Path,
    *,
    arms: Sequence[str] = (),
    columns: Sequence[str] = (),
    panels: Sequence[str] = (),
) -> Experiment:
    """Reads an experiment's file.

    Args:
        path: of the file.
        arms: of the file's; empty: all of them.
        columns, panels: in place of those that the file declares.

    Raises:
        ValueError: the file is missing, lacks a declaration, or there is an unknown name in one or
            among the arguments.
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
    _check_names("--arms", path, arms, module.ARMS.__getitem__, module.ARMS)
    experiment = Experiment(
        path=path,
        title=module.__doc__.splitlines()[0],
        arms={arm: keys for arm, keys in module.ARMS.items() if arm in (arms or module.ARMS)},
        reference=module.REFERENCE,
        columns=tuple(columns) or getattr(module, "COLUMNS", _COLUMNS),
        panels=tuple(panels) or getattr(module, "PANELS", _PANELS),
        get_config=module.get_config,
    )
    _check_names("REFERENCE", path, (experiment.reference,), module.ARMS.__getitem__, module.ARMS)
    measures = [*names_of_measures(), BENCHMARKS]
    own = tuple(name for name in experiment.columns if name not in BENCHMARK_COLUMNS)
    _check_names("--columns" if columns else "COLUMNS", path, own, measure_named, measures)
    panel_names = names_of_panels()
    what = "--panels" if panels else "PANELS"
    _check_names(what, path, experiment.panels, panel_named, panel_names)
    return experiment


def _check_names(
    what: str,
    path: pathlib.Path,
    names: Sequence[str],
    find: Callable[[str], Any],
    known: Iterable[str],
) -> None:
    for name in names:
        try:
            find(name)
        except KeyError:
            raise ValueError(
                f"{what} of {path} must be among {', '.join(known)}, got {name!r}; change it"
            ) from None
