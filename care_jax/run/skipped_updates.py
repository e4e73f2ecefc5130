"""Updates whose loss or gradient is not finite: skipped and counted, or the end of the stage.

With `max_skipped` above 0 the compiled update leaves the state as it was (`train_step.update`), and
the stage ends after more than so many in a row. With 0 it ends at the first. Either way the batch
is written to `workdir/nonfinite`, and the error names the step, the prompts and the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from care_jax.batch import Example, ImitationBatch, TrainBatch
from care_jax.learning.train_step import BROKEN_GRADIENTS
from care_jax.report.metrics import check_finite
from care_jax.run.run import Run
from models.backbone import Params

FOLDER = "nonfinite"
_MOST_NAMED = 3  # prompts and tensors in the error


class SkippedUpdates:
    """Counts the skipped updates of one stage, and ends it.

    Args:
        run: the run.
        stage: "sft" or "rl".
        params: of the state, or their shapes; for the names of the trained tensors.
        advice: says which checkpoint is good.
    """

    def __init__(self, run: Run, stage: str, params: Params, advice: Callable[[], str]):
        self._run, self._stage, self._advice = run, stage, advice
        self._most = run.config[stage].max_skipped
        self._names = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, _ in jax.tree_util.tree_leaves_with_path(run.partition(params)[0])
        ]
        self._in_a_row = self._count = 0

    def applied(
        self,
        step: int,
        metrics: Mapping[str, Any],
        batch_of: Callable[[], tuple[TrainBatch | ImitationBatch, Sequence[Example]]],
    ) -> dict[str, float]:
        """The metrics of an update that was applied; {} if it was skipped.

        Args:
            step: of the stage.
            metrics: of the update, on the host.
            batch_of: gives this process's rows and examples of the update.

        Raises:
            FloatingPointError: the update is broken and not skipped, or one too many in a row.
        """
        scalars = {name: float(x) for name, x in metrics.items() if name != BROKEN_GRADIENTS}
        is_broken = not all(map(math.isfinite, scalars.values()))
        if is_broken and self._skips(scalars):
            return {}
        advice = self._advice_on(step, metrics, *batch_of()) if is_broken else ""
        check_finite(step, self._stage, scalars, advice)
        self._in_a_row = 0
        return scalars

    def _skips(self, scalars: Mapping[str, float]) -> bool:
        """Counts an update that the program has skipped; False if it has not, or too many."""
        if not self._most or all(math.isfinite(scalars[name]) for name in ("loss", "grad_norm")):
            return False
        self._count += 1
        self._in_a_row += 1
        return self._in_a_row <= self._most

    def counted(self) -> dict[str, int]:
        """The metric of the updates skipped since the last call; {} where none may be."""
        count, self._count = self._count, 0
        return {"skipped_updates": count} if self._most else {}

    def _advice_on(
        self,
        step: int,
        metrics: Mapping[str, Any],
        batch: TrainBatch | ImitationBatch,
        examples: Sequence[Example],
    ) -> str:
        """What the error says of a broken update, and what can be done."""
        key = f"{self._stage}.max_skipped"
        parts = []
        if self._in_a_row > self._most:
            parts.append(f"{self._in_a_row} updates in a row were skipped, {key} is {self._most}")
        pairs = zip(self._names, metrics.get(BROKEN_GRADIENTS, ()), strict=False)
        if names := [name for name, is_broken in pairs if is_broken]:
            parts.append(f"gradients NaN or infinite: {_few(names)}")
        ids = [f"{example.source} {example.id}" for example in examples]
        parts += [f"prompts {_few(ids)}", self._dump(step, batch, ids)]
        if not self._most:
            parts.append(f"{key} above 0 skips such updates")
        return "; ".join([*parts, self._advice()])

    def _dump(self, step: int, batch: TrainBatch | ImitationBatch, ids: Sequence[str]) -> str:
        """Writes this process's rows; returns where, or why not."""
        number = jax.process_index()
        name = f"{self._stage}_step_{step}" + (f"_process_{number}" if number else "") + ".npz"
        path = self._run.workdir / FOLDER / name
        arrays: dict[str, Any] = {
            jax.tree_util.keystr(where, simple=True, separator="."): _storable(np.asarray(x))
            for where, x in jax.tree_util.tree_leaves_with_path(batch)
        }
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                np.savez(file, examples=np.array(ids), **arrays)
        except OSError as error:  # must not hide why the stage ends
            return f"their batch could not be written to {path} ({error.strerror})"
        return f"their batch is in {path}"


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _storable(array: np.ndarray) -> np.ndarray:
    """NumPy's file format has no bfloat16."""
    return array.astype(np.float32) if array.dtype.kind == "V" else array
