"""An experiment: a file that declares its arms and how they are compared."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.sweep.figures import PANELS, panel_named
from experiments.sweep.measures import BENCHMARK_COLUMNS, BENCHMARKS, NAMES, measure_named

_COLUMNS = f"acc,gain,lead,{BENCHMARKS},response_tokens,decoded_tokens"
_PANELS = "accuracy,by_tokens"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a file of `experiments/` declares."""

    path: pathlib.Path
    title: str  # the first line of its docstring
    arms: Mapping[str, Mapping[str, Any]]  # arm -> changed keys, in the order of the table
    reference: str  # the arm that the others are compared with, seed by seed
    columns: tuple[str, ...]  # of the table, names of measures
    panels: tuple[str, ...]  # of the figure, names of `figures.PANELS` or of measures
    get_config: Callable[[str], ConfigDict]  # of "arm@base", see `configs/arms.py`

    @property
    def name(self) -> str:
        return self.path.stem


def load_experiment(
    path: pathlib.Path, *, arms: str = "", reference: str = "", columns: str = "", panels: str = ""
) -> Experiment:
    """Reads an experiment's file.

    `arms` selects arms by name, separated by commas; empty: all. `reference`, `columns` and
    `panels` replace the file's.

    Raises:
        ValueError: the file is missing or lacks a declaration; a declaration or an argument has an
            unknown name.
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

    def unknown(what: str, known: Iterable[str], name: str) -> ValueError:
        return ValueError(
            f"{what} of {path} must be among {', '.join(known)}, got {name!r}; change it"
        )

    def names(what: str, text: str, find: Callable, known: Iterable[str]) -> tuple[str, ...]:
        for name in text.split(","):
            try:
                find(name)
            except KeyError:
                raise unknown(what, known, name) from None
        return tuple(text.split(","))

    find_arm = module.ARMS.__getitem__
    chosen = names("--arms", arms or ",".join(module.ARMS), find_arm, module.ARMS)
    if (reference or module.REFERENCE) not in module.ARMS:
        raise unknown(
            "--reference" if reference else "REFERENCE", module.ARMS, reference or module.REFERENCE
        )
    return Experiment(
        path=path,
        title=module.__doc__.splitlines()[0],
        arms={arm: keys for arm, keys in module.ARMS.items() if arm in chosen},
        reference=reference or module.REFERENCE,
        columns=names(
            "--columns" if columns else "COLUMNS",
            columns or getattr(module, "COLUMNS", _COLUMNS),
            lambda name: name in BENCHMARK_COLUMNS or measure_named(name),
            (*NAMES, BENCHMARKS),
        ),
        panels=names(
            "--panels" if panels else "PANELS",
            panels or getattr(module, "PANELS", _PANELS),
            panel_named,
            (*PANELS, *NAMES),
        ),
        get_config=module.get_config,
    )
