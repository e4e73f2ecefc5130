"""Whether a training state may be saved: it is finite, and not far worse than the last saved one.

    every array of the state, the optimizer's included, is finite
    ‖θ‖ <= max_norm_factor · ‖θ_last‖
    L <= max_loss_factor · max(log V, L_last)

θ are the parameters and L is the mean of -log π over the response tokens that were trained on last,
in nats, computed with θ. The last state is the last one saved, or the one the stage began with. A
model that knows nothing, uniform over its vocabulary of V tokens, has L = log V.

All processes get the same replicated numbers, and so decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.devices import sharding
from care_jax.learning.train_step import TrainState
from care_jax.run.checkpoint import Checkpoints
from care_jax.run.run import Run
from models.backbone import Params

_METADATA = "state_check"  # of a checkpoint: norm and loss of its state
_MOST_NAMED = 3  # tensors


class Measured(NamedTuple):
    """What is compared with the next state.

    Attributes:
        norm: ‖θ‖ over all parameters.
        loss: L in nats per token; None before the first batch.
    """

    norm: float
    loss: float | None


class StateCheck:
    """Checks the states of one stage.

    Args:
        run: the run.
        stage: "sft" or "rl".
        checkpoints: of the stage.
        loss: gives L of parameters on the batch that was trained on last; None if there was none.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        checkpoints: Checkpoints,
        loss: Callable[[Params], Any] = lambda params: None,
    ):
        self._run, self._stage, self._checkpoints, self._loss = run, stage, checkpoints, loss
        self._tensor_sums = compile_tensor_sums(run)
        self._last = Measured(0.0, None)
        self._passed: tuple[int, Measured] = (-1, self._last)  # the step checked last

    def begin(self, step: int, state: TrainState, metadata: Mapping[str, Any]) -> None:
        """Checks the state that the stage starts from or goes on with.

        Args:
            step: 0, or that of the restored checkpoint.
            state: before the first step.
            metadata: of the restored checkpoint.

        Raises:
            FloatingPointError: an array is not finite.
        """
        found = self._sums(state)
        if faults := not_finite(found):
            folder = self._checkpoints.folder
            earlier = [saved for saved in self._checkpoints.steps if saved < step]
            raise FloatingPointError(
                f"{self._stage} starts from a broken state: {faults}"
                + (
                    f"; remove {folder / str(step)}, so that the same command goes on from "
                    + (f"checkpoint {earlier[-1]}" if earlier else "the start of the stage")
                    if step
                    else ""
                )
            )
        saved = metadata.get(_METADATA) or {}
        self._last = Measured(_norm(found), saved.get("loss"))
        self._passed = step, self._last

    def check(self, step: int, state: TrainState) -> None:
        """Checks the state after `step` steps, once.

        Raises:
            FloatingPointError: it is broken; says how, and which checkpoint is good.
        """
        if self._passed[0] == step:
            return
        found = self._sums(state)
        loss = self._loss(state.params)
        now = Measured(_norm(found), None if loss is None else float(loss))
        section = self._run.config.state_check
        fault = not_finite(found) or worse(
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
        """Makes the state checked last the one to compare with; its entry in the metadata."""
        self._last = self._passed[1]
        return {_METADATA: self._last._asdict()}

    def advice(self) -> str:
        """Which checkpoint is good, and what can be done with it."""
        stage, step = self._stage, self._checkpoints.latest_step
        if step is None:
            return (
                f"no checkpoint of {stage} was saved before; lower {stage}.learning_rate and start "
                "again with the same --workdir"
            )
        return (
            f"the last good checkpoint is {self._checkpoints.folder / str(step)}: the same command "
            "goes on from it, --config.stages=\"('export',)\" exports it, and a new --workdir with "
            f"that export as model.path and a lower {stage}.learning_rate trains it on"
        )

    def _sums(self, state: TrainState) -> dict[str, tuple[float, float]]:
        trees = {"params": state.params, "optimizer": state.opt_state}
        return _named(self._tensor_sums(trees), trees)


def check_weights(run: Run, params: Params, name: str, advice: str) -> None:
    """Refuses weights that are not finite.

    Args:
        run: the run.
        params: from a file.
        name: of the file or folder, for the message.
        advice: what the message ends with.

    Raises:
        ValueError: names the tensors.
    """
    if faults := not_finite(_named(compile_tensor_sums(run)(params), params)):
        raise ValueError(f"{name} has weights that are no numbers: {faults}; {advice}")


def not_finite(found: Mapping[str, tuple[float, float]]) -> str:
    """Names the tensors that are not finite; "" if all are.

    Args:
        found: by tensor, how many of its values are not finite, and the sum of squares.
    """
    bad = {name: count for name, (count, _) in found.items() if count}
    named = (f"{name} ({count:.0f} values)" for name, count in [*bad.items()][:_MOST_NAMED])
    more = f" and {len(bad) - _MOST_NAMED} more tensors" if len(bad) > _MOST_NAMED else ""
    return f"NaN or infinite: {', '.join(named)}{more}" if bad else ""


def worse(
    now: Measured,
    last: Measured,
    *,
    log_vocabulary: float,
    max_norm_factor: float,
    max_loss_factor: float,
) -> str:
    """How a state with finite arrays has exploded since the last one; "" if it has not."""
    # Of no norm at all every other is an infinite multiple.
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


def _named(sums: jax.Array, tree: Any) -> dict[str, tuple[float, float]]:
    """The two sums of each floating tensor by its path, such as "params.text.embed.table"."""
    paths = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    ]
    rows = np.asarray(sums.addressable_data(0)).tolist()
    return {path: (count, square) for path, (count, square) in zip(paths, rows, strict=True)}


def _norm(found: Mapping[str, tuple[float, float]]) -> float:
    squares = [square for name, (_, square) in found.items() if name.startswith("params.")]
    return math.sqrt(sum(squares))


def compile_tensor_sums(run: Run) -> Callable:
    """The jitted tree -> [L, 2], replicated, for `state_check`.

    For each of the L floating tensors: how many values are not finite, and the sum of squares. Of
    a tensor in host memory a copy is made on the devices, as an update does.
    """

    def tensor_sums(tree):
        def sums(x):
            wide = jax.device_put(x, jax.memory.Space.Device).astype(jnp.float32)
            return jnp.stack([(~jnp.isfinite(wide)).sum().astype(jnp.float32), (wide**2).sum()])

        leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.stack([sums(x) for x in leaves])

    return jax.jit(tensor_sums, out_shardings=sharding.replicated(run.mesh))
