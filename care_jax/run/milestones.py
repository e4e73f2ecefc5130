"""The steps of a training stage after which it is evaluated or saved.

Step k means: after k steps, with the weights of checkpoint k; 0 is before the first. An evaluation
is a line of metrics.jsonl, of stage "rl_eval" or "sft_eval" at step k. It has draws and clocks of
its own, so that training goes on as without it.

A state is checked before it is evaluated or saved (`state_check`): a broken one ends the stage. An
evaluation comes before the save of its step, which it decides about. A run that is stopped
inside an evaluation saves the step first; the resumed run evaluates it and adds the result to the
checkpoint. A result that is written is not computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from care_jax.devices import distributed
from care_jax.learning.train_step import TrainState
from care_jax.run.checkpoint import Checkpoints
from care_jax.run.run import Run
from care_jax.run.state_check import StateCheck
from models.backbone import Params

# (params, name=stage, step=step) -> metrics, as `evaluate.Evaluator`.
Evaluate = Callable[..., dict[str, float]]


class Milestones:
    """Evaluates and saves one stage.

    Args:
        run: the run.
        stage: "sft" or "rl".
        checkpoints: of the stage.
        evaluate: gives the metrics of weights; not called if the stage's eval_every is 0.
        state_check: of the stage.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        checkpoints: Checkpoints,
        evaluate: Evaluate | None,
        state_check: StateCheck,
    ):
        self._run, self._stage, self._checkpoints = run, stage, checkpoints
        self._state_check = state_check
        self._evaluate = evaluate if run.config[stage].eval_every else None
        self._num_steps = run.config[stage].num_steps
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})  # the last step evaluated

    def begin(self, step: int, state: TrainState, metadata: Mapping[str, Any]) -> None:
        """Checks the state that the stage starts from, and evaluates it if due and not done yet.

        Args:
            step: 0, or that of the restored checkpoint.
            state: before the first step.
            metadata: of the restored checkpoint.

        Raises:
            distributed.Preempted: the run was told to stop.
            FloatingPointError: the state is broken.
        """
        self._state_check.begin(step, state, metadata)
        if self._evaluate is None:
            return
        self._run.metrics.begin(f"{self._stage}_eval", step + 1)
        if self._is_evaluated(step) and not self._run.metrics.has_line(f"{self._stage}_eval", step):
            metrics = self._metrics(step, state.params)
            if step == self._checkpoints.latest_step:
                self._checkpoints.add_metrics(step, metrics)

    def is_due(self, step: int) -> bool:
        """Whether the stage is evaluated or saved after so many steps."""
        return self._is_evaluated(step) or self._is_saved(step)

    def reach(self, step: int, state: TrainState, metadata: Mapping[str, Any]) -> float:
        """Checks, evaluates and saves the state after `step` steps, if that is due.

        Returns:
            the seconds of check and evaluation.

        Raises:
            distributed.Preempted: the run was told to stop; the state is saved.
            FloatingPointError: the state is broken.
        """
        began, is_best = time.perf_counter(), False
        if self.is_due(step):
            self._state_check.check(step, state)
        if self._is_evaluated(step):
            try:
                metrics = self._metrics(step, state.params)
            except distributed.Preempted:
                self.save(step, state, metadata)
                raise
            is_best = self._checkpoints.is_among_best(metrics)
        seconds = time.perf_counter() - began
        if is_best or self._is_saved(step):
            self.save(step, state, metadata)
        return seconds

    def save(self, step: int, state: TrainState, metadata: Mapping[str, Any]) -> None:
        """Saves the state after `step` steps, unless it is saved, with its evaluation if any.

        Raises:
            FloatingPointError: the state is broken.
        """
        if step <= (self._checkpoints.latest_step or 0):
            return
        self._state_check.check(step, state)
        evaluated, metrics = self._evaluated
        self._checkpoints.save(
            step,
            state,
            step,
            self._run.config.seed,
            {**metadata, **self._state_check.saved()},
            metrics if evaluated == step else None,
        )

    def _is_evaluated(self, step: int) -> bool:
        if self._evaluate is None:
            return False
        if step == 0:
            return self._run.config.evaluate.at_start
        return step % self._run.config[self._stage].eval_every == 0 or step == self._num_steps

    def _is_saved(self, step: int) -> bool:
        return step % self._run.config.checkpoint_every == 0 or step == self._num_steps

    def _metrics(self, step: int, params: Params) -> dict[str, float]:
        assert self._evaluate is not None  # `_is_evaluated` is False without it
        began = time.perf_counter()
        metrics = self._evaluate(params, name=self._stage, step=step)
        timed = metrics | {"seconds": time.perf_counter() - began}
        self._run.metrics.write(f"{self._stage}_eval", step, timed)
        self._evaluated = step, metrics
        return metrics
