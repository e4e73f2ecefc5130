"""Checks that end a stage at a broken update, or before it saves a broken state.

A state may be saved if it is finite, and not far worse than the last saved one:

    every array of the state, the optimizer's included, is finite
    ‖θ‖ <= max_norm_factor · ‖θ_last‖
    L <= max_loss_factor · max(log V, L_last)

θ are the parameters. L is the mean of -log π_θ, in nats, over the response tokens of the last
batch. The last state is the last one saved, or the one the stage began with. A uniform distribution
over the vocabulary of V tokens has L = log V.

An update whose loss or gradient is not finite is skipped and counted, or ends the stage. With
`max_skipped` above 0 the compiled update leaves the state unchanged (`train_step.update`), and the
stage ends after more than `max_skipped` in a row. With 0 it ends at the first. The batch that ends
it is written to `workdir/nonfinite`; the error names the step, the prompts and the tensors.

All processes read the same replicated sums, and so decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.batch import Example, ImitationBatch, TrainBatch
from care_jax.devices import distributed, sharding
from care_jax.learning.train_step import BROKEN_GRADIENTS, TrainState
from care_jax.report.metrics import check_finite
from care_jax.run.checkpoint import Checkpoints
from care_jax.run.run import Run
from models.backbone import Params

FOLDER = "nonfinite"
_METADATA = "state_check"  # entry of a checkpoint's metadata: norm and loss of its state
_MOST_NAMED = 3  # tensors or prompts in an error

# This process's rows of an update, and the examples that it read for the update.
UpdateBatch = tuple[TrainBatch | ImitationBatch, Sequence[Example]]


class Measured(NamedTuple):
    """The measures of a state that the next one is compared with."""

    norm: float  # ‖θ‖ over all parameters
    loss: float | None  # L in nats per token; None before the first batch


class StateCheck:
    """Checks the states of one stage, "sft" or "rl"."""

    def __init__(self, run: Run, stage: str, checkpoints: Checkpoints):
        self._run, self._stage, self._checkpoints = run, stage, checkpoints
        self._tensor_sums = compile_tensor_sums(run)
        self._last = Measured(0.0, None)
        self._passed: tuple[int, Measured] = (-1, self._last)  # the step checked last

    def begin(self, step: int, state: TrainState, metadata: Mapping[str, Any]) -> None:
        """Checks the state that the stage starts from, or that of a restored checkpoint.

        Raises:
            FloatingPointError: an array is not finite.
        """
        found = self._sums(state)
        if faults := not_finite(found):
            message = f"{self._stage} starts from a broken state: {faults}"
            if step:
                earlier = [saved for saved in self._checkpoints.steps if saved < step]
                source = f"checkpoint {earlier[-1]}" if earlier else "the start of the stage"
                message += f"; remove {self._checkpoints.folder / str(step)}, then run the same "
                message += f"command to resume from {source}"
            raise FloatingPointError(message)
        saved = metadata.get(_METADATA) or {}
        self._last = Measured(_norm(found), saved.get("loss"))
        self._passed = step, self._last

    def check(self, step: int, state: TrainState, loss: Callable[[], float | None]) -> None:
        """Checks the state after `step` steps, once; `loss` computes its L.

        Raises:
            FloatingPointError: it is broken; names the fault and the last good checkpoint.
        """
        if self._passed[0] == step:
            return
        found = self._sums(state)
        now = Measured(_norm(found), loss())
        section = self._run.config.state_check
        fault = not_finite(found) or divergence(
            now,
            self._last,
            log_vocabulary=math.log(self._run.policy.config.text.vocab_size),
            max_norm_factor=section.max_norm_factor,
            max_loss_factor=section.max_loss_factor,
        )
        if fault:
            raise FloatingPointError(
                f"the state after {step} steps of {self._stage} is broken and was not saved: "
                f"{fault}; {self.advice()}"
            )
        self._passed = step, now

    def saved(self) -> dict[str, Any]:
        """Makes the state checked last the new reference; returns its entry in the metadata."""
        self._last = self._passed[1]
        return {_METADATA: self._last._asdict()}

    def advice(self) -> str:
        """Names the last good checkpoint and how to go on from it."""
        stage, step = self._stage, self._checkpoints.latest_step
        if step is None:
            return (
                f"no checkpoint of {stage} was saved before; lower {stage}.learning_rate and start "
                "again with the same --workdir"
            )
        return (
            f"the last good checkpoint is {self._checkpoints.folder / str(step)}; run the same "
            "command to resume from it, or export it with --config.stages=\"('export',)\" and "
            f"train the export (model.path) with a lower {stage}.learning_rate in a new --workdir"
        )

    def _sums(self, state: TrainState) -> dict[str, tuple[float, float]]:
        trees = {"params": state.params, "optimizer": state.opt_state}
        return _named(self._tensor_sums(trees), trees)


def check_weights(run: Run, params: Params, name: str, advice: str) -> None:
    """Rejects weights that are not finite: a ValueError with `name`, the tensors and `advice`."""
    if faults := not_finite(_named(compile_tensor_sums(run)(params), params)):
        raise ValueError(f"{name} must have finite weights, got {faults}; {advice}")


def not_finite(found: Mapping[str, tuple[float, float]]) -> str:
    """Names the tensors that are not finite, "" if none. `found` is from `_named`."""
    bad = [f"{name} ({count:.0f} values)" for name, (count, _) in found.items() if count]
    return f"NaN or infinity in {_first_of(bad, ' tensors')}" if bad else ""


def divergence(
    now: Measured,
    last: Measured,
    *,
    log_vocabulary: float,
    max_norm_factor: float,
    max_loss_factor: float,
) -> str:
    """How a finite state has diverged since the last one; "" if it has not."""
    # A norm of 0 has no multiples.
    if last.norm and not now.norm <= max_norm_factor * last.norm:
        return (
            f"the norm of its parameters is {now.norm:.4g}, was {last.norm:.4g} in the last good "
            f"state, a factor above state_check.max_norm_factor {max_norm_factor:g}"
        )
    before = log_vocabulary if last.loss is None else max(log_vocabulary, last.loss)
    if now.loss is not None and not now.loss <= max_loss_factor * before:
        was = "" if last.loss is None else f", was {last.loss:.4g} in the last good state"
        return (
            f"its loss on the last batch is {now.loss:.4g} nats per token{was}, above "
            f"state_check.max_loss_factor {max_loss_factor:g} times {before:.4g} (a uniform guess "
            f"has {log_vocabulary:.4g})"
        )
    return ""


def compile_tensor_sums(run: Run) -> Callable:
    """The jitted tree -> [L, 2], replicated.

    For each of the L floating tensors: how many values are not finite, and the sum of squares. A
    tensor in host memory is copied to the devices first, as in an update.
    """

    def tensor_sums(tree):
        def sums(x):
            wide = jax.device_put(x, jax.memory.Space.Device).astype(jnp.float32)
            return jnp.stack([(~jnp.isfinite(wide)).sum().astype(jnp.float32), (wide**2).sum()])

        leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.stack([sums(x) for x in leaves])

    return jax.jit(tensor_sums, out_shardings=sharding.replicated(run.mesh))


def _named(sums: jax.Array, tree: Any) -> dict[str, tuple[float, float]]:
    """The two sums of each floating tensor by its path, such as "params.text.embed.table"."""
    paths = (path for path, x in _paths(tree).items() if jnp.issubdtype(x.dtype, jnp.floating))
    rows = map(tuple, np.asarray(sums.addressable_data(0)).tolist())
    return dict(zip(paths, rows, strict=True))


def _norm(found: Mapping[str, tuple[float, float]]) -> float:
    squares = [square for name, (_, square) in found.items() if name.startswith("params.")]
    return math.sqrt(sum(squares))


class SkippedUpdates:
    """Counts the skipped updates of one stage, "sft" or "rl", and ends it.

    `params` (shapes suffice) give the names of the trained tensors; `advice` names the last good
    checkpoint.
    """

    def __init__(self, run: Run, stage: str, params: Params, advice: Callable[[], str]):
        self._run, self._stage, self._advice = run, stage, advice
        self._most = run.config[stage].max_skipped
        self._names = [*_paths(run.partition(params)[0])]
        self._in_a_row = self._count = 0

    def applied(
        self, step: int, metrics: Mapping[str, Any], batch: Callable[[], UpdateBatch]
    ) -> dict[str, float]:
        """The metrics of an update that was applied; {} if it was skipped.

        `metrics` are on the host; `batch` gives the update's.

        Raises:
            FloatingPointError: a broken update was not skipped, or too many in a row were.
        """
        scalars = {name: float(x) for name, x in metrics.items() if name != BROKEN_GRADIENTS}
        is_broken = not all(map(math.isfinite, scalars.values()))
        if is_broken and self._skips(scalars):
            return {}
        advice = self._advice_on(step, metrics, *batch()) if is_broken else ""
        check_finite(step, self._stage, scalars, advice)
        self._in_a_row = 0
        return scalars

    def counted(self) -> dict[str, int]:
        """The number of updates skipped since the last call, as a metric; {} if none may be."""
        count, self._count = self._count, 0
        return {"skipped_updates": count} if self._most else {}

    def _skips(self, scalars: Mapping[str, float]) -> bool:
        """Counts an update that was skipped; False if it was not, or too many in a row were."""
        if not self._most or all(math.isfinite(scalars[name]) for name in ("loss", "grad_norm")):
            return False
        self._count += 1
        self._in_a_row += 1
        return self._in_a_row <= self._most

    def _advice_on(
        self,
        step: int,
        metrics: Mapping[str, Any],
        batch: TrainBatch | ImitationBatch,
        examples: Sequence[Example],
    ) -> str:
        """The error's text: tensors, prompts and batch of a broken update, and advice."""
        key = f"{self._stage}.max_skipped"
        parts = []
        if self._in_a_row > self._most:
            parts.append(f"{self._in_a_row} updates in a row were skipped, {key} is {self._most}")
        pairs = zip(self._names, metrics.get(BROKEN_GRADIENTS, ()), strict=False)
        if names := [name for name, is_broken in pairs if is_broken]:
            parts.append(f"gradients with NaN or infinity: {_first_of(names)}")
        read = [f"{example.source} {example.id}" for example in examples]
        ids = [name for names in distributed.gather_json(read) for name in names]
        parts += [f"prompts {_first_of(ids)}", self._dump(step, batch, ids)]
        if not self._most:
            parts.append(f"set {key} above 0 to skip such updates")
        return "; ".join([*parts, self._advice()])

    def _dump(self, step: int, batch: TrainBatch | ImitationBatch, ids: Sequence[str]) -> str:
        """Writes this process's rows and the ids of all; returns where, or why writing failed."""
        number = jax.process_index()
        name = f"{self._stage}_step_{step}" + (f"_process_{number}" if number else "") + ".npz"
        path = self._run.workdir / FOLDER / name
        arrays: dict[str, Any] = {where: _storable(x) for where, x in _paths(batch).items()}
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                np.savez(file, examples=np.array(ids), **arrays)
        except OSError as error:  # must not hide why the stage ends
            return f"their batch could not be written to {path} ({error.strerror})"
        return f"their batch is in {path}"


def _paths(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, such as "params.text.embed.table"."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in pairs}


def _first_of(names: Sequence[str], what: str = "") -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more{what}" if more > 0 else "")


def _storable(array: Any) -> np.ndarray:
    """Casts bfloat16, which NumPy's file format lacks, to float32."""
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.kind == "V" else array
