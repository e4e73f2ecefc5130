"""A training stage: its state and steps, and when it is evaluated and saved.

Step k of a checkpoint or an evaluation means after k steps. An evaluation writes a line of
metrics.jsonl, of stage "rl_eval" or "sft_eval". It has its own RNG keys and timers, so it does not
affect training.

A step that changes no file but its logs is finished while the devices work on the next one
(`Stage.catch_up`), always before the next step's updates and before a state is saved.

A state is checked (`guards`), then evaluated, then saved, because evaluations decide which
checkpoints are kept. A broken state ends the stage. A run that is stopped during an evaluation
saves the step, and so does a single process whose evaluation fails; the resumed run evaluates it,
unless metrics.jsonl has the result, and adds the metrics to the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from care_jax.batch import Example, ImitationBatch
from care_jax.data.pipeline import Batches
from care_jax.devices import distributed, loaded_programs, sharding
from care_jax.learning.logprobs import ForwardOptions, score_rows
from care_jax.learning.train_step import TrainState, map_microbatches
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.report.console import Pace, format_line, print_line, progress
from care_jax.report.metrics import host_usage, on_host
from care_jax.rewards.failures import RewardFailed
from care_jax.run.checkpoint import Checkpoints, InFlightSave
from care_jax.run.guards import SkippedUpdates, StateCheck, UpdateBatch
from care_jax.run.run import Run
from care_jax.run.workdir import open_checkpoints
from models.attention.packed import AttentionImpl
from models.backbone import Params

_ASKED_EVERY = 16  # steps of a cold start on several processes

# (params, name=stage, step=step) -> metrics, as `evaluate.Evaluator`.
Evaluate = Callable[..., dict[str, float]]


@contextlib.contextmanager
def open_stage(
    run: Run,
    name: str,
    state: TrainState,
    nll: Callable[[Params, Any], Any],
    evaluate: Evaluate | None = None,
    rebuild: Callable[[int], UpdateBatch] | None = None,
) -> Iterator[Stage]:
    """Begins a stage, or resumes it from its last checkpoint; evaluates it if due.

    Args:
        name: "sft" or "rl".
        state: the initial state, or its shapes if the stage is resumed, which deletes the arrays
            before it restores others.
        nll: (params, batch) -> mean of -log π over the batch's responses, for `guards`.
        evaluate: gives the metrics of weights; not called if the stage's eval_every is 0.
        rebuild: gives the batch of an earlier step again; needed if `read` follows several updates.

    Raises:
        distributed.Preempted: the run was preempted; the current state is saved.
        FloatingPointError: an update or a state is broken; names the last good checkpoint.
        RewardFailed: the reward function fails; the current state is saved.
        OSError: it could not be saved then.
    """
    with open_checkpoints(run, name) as checkpoints:
        start, metadata, in_flight = 0, {}, None
        if checkpoints.latest_step is not None:
            shapes = sharding.abstract(state)
            for array in jax.tree.leaves(state):
                if isinstance(array, jax.Array) and not array.is_deleted():
                    array.delete()  # the caller may hold the parameters, and two may not fit
            restored = checkpoints.restore(shapes)
            state, start, metadata = restored.state, restored.step, restored.metadata
            in_flight = restored.in_flight
            del restored
        run.metrics.begin(name, start)
        stage = Stage(run, name, checkpoints, state, nll, evaluate, rebuild, start, in_flight)
        del state
        stage.begin(metadata)
        try:
            yield stage
        except distributed.Preempted as stopped:
            stage.save_now()
            where = stopped.args or (f"before {name} step {stage.num_done}",)
            raise distributed.Preempted(*where) from None
        except RewardFailed:
            stage.save_now()
            raise


@dataclasses.dataclass
class Stage:
    """One training stage, as `open_stage` yields it.

    `state` is the current one. `start` is 0 or the step of the restored checkpoint. `num_done`
    steps are done. `num_decoded` counts the tokens decoded so far, RL's. `saved_beside` gives what
    else is saved.
    """

    run: Run
    name: str
    checkpoints: Checkpoints
    state: TrainState
    nll: Callable[[Params, Any], Any]
    evaluate: Evaluate | None
    rebuild: Callable[[int], UpdateBatch] | None
    start: int
    in_flight: dict[str, Any] | None = None  # of the restored checkpoint, see `Restored`
    saved_beside: Callable[[], InFlightSave | None] = lambda: None

    def __post_init__(self):
        section = self.run.config[self.name]
        self._num_steps, self._eval_every = section.num_steps, section.eval_every
        self._check = StateCheck(self.run, self.name, self.checkpoints)
        self._updates = SkippedUpdates(self.run, self.name, self.state.params, self._check.advice)
        self._pace = Pace(self._num_steps)
        self._timed = time.perf_counter(), self.start  # time and first step of the next line
        # Steps, metrics on the devices, and their batches unless `rebuild` gives them.
        self._unread: list[tuple[int, Any, UpdateBatch | None]] = []
        self._unfinished: Callable[[], None] | None = None  # finishes the last step
        self._last: tuple[int, UpdateBatch] | None = None  # the last step, and its batch
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})  # the last step evaluated
        self.num_done, self.num_decoded = self.start, 0
        self._lengths: list[int] | None = None  # of the sources of the training data

    def begin(self, metadata: Mapping[str, Any]) -> None:
        """Checks the state that the stage starts from, and evaluates it if due and not done yet.

        `metadata` is that of the restored checkpoint.
        """
        self.num_decoded = metadata.get("num_decoded", 0)
        self._lengths = metadata.get("lengths")
        self._check.begin(self.start, self.state, metadata)
        if self._eval_every and self.evaluate:
            name = f"{self.name}_eval"
            # Without a checkpoint an earlier start may have had other weights or questions.
            is_resumed = self.checkpoints.latest_step is not None
            self.run.metrics.begin(name, self.start + 1 if is_resumed else 0)
            if self._is_evaluated(self.start) and not self.run.metrics.line(name, self.start):
                metrics = self._measure()
                if self.start == self.checkpoints.latest_step:
                    self.checkpoints.add_metrics(self.start, metrics)

    def steps(self, batches: Batches) -> Iterator[tuple[int, list[Example], list[TokenizedPrompt]]]:
        """The number, examples and prompts of every remaining step."""
        if self._lengths not in (None, batches.lengths):
            print_line(
                f"the training data has {_of(batches.lengths)} rows, at {self.name} step "
                f"{self.start} it had {_of(self._lengths)}: from here on the order is that of the "
                "new data, in which rows may repeat; put the old files back to go on as before"
            )
        self._lengths = batches.lengths
        self._timed = time.perf_counter(), self.start
        left = batches.iterate(self.start, self._num_steps)
        for step, examples, prompts in progress(left, self.name, self.start, self._num_steps):
            if distributed.is_preempted():
                raise distributed.Preempted
            # All processes ask together, which waits for the devices; so does decoding.
            is_asked = distributed.is_alone() or self.name == "rl" or step % _ASKED_EVERY == 0
            if is_asked and any(distributed.gather_json(self.checkpoints.has_failed())):
                self.save()
            loaded_programs.drop_if_many()
            yield step, examples, prompts

    def updated(self, step: int, metrics: Any, batch: UpdateBatch) -> None:
        """Records an update applied to `state`; its metrics stay on the devices until `read`.

        `batch` has this process's rows on the host, and their examples.
        """
        self._last = step, batch
        self._unread.append((step, metrics, None if self.rebuild else batch))

    def not_updated(self, step: int) -> None:
        """Records an update without a response, which must not be applied.

        The optimizer's moments and the weight decay would move the parameters.
        """
        self._unread.append((step, None, None))

    def read(self, *, num_left: int = 0) -> list[dict[str, float]]:
        """The metrics of each update since the last call; {} if it was skipped or not applied.

        The last `num_left` updates are left to the next call, so that devices may still run them.
        """
        stop = max(len(self._unread) - num_left, 0)
        unread, self._unread = self._unread[:stop], self._unread[stop:]

        def read(step: int, metrics: Any, batch: UpdateBatch | None) -> dict[str, float]:
            if metrics is None:
                return {}
            metrics = jax.device_get(metrics)
            return self._updates.applied(step, metrics, lambda: batch or self._batch_of(step))

        return [read(*update) for update in unread]

    def _batch_of(self, step: int) -> UpdateBatch:
        """The rows and examples of a step's update, rebuilt if it was not the last."""
        assert self._last is not None and self.rebuild is not None
        last, batch = self._last
        return batch if step == last else self.rebuild(step)

    def is_logged(self, step: int) -> bool:
        """Whether the step has a line on the console."""
        return step % self.run.config.log_every == 0 or step == self._num_steps - 1

    def log(
        self, step: int, metrics: Mapping[str, Any], shown: Mapping[str, str] | None = None
    ) -> None:
        """Writes the metrics of a step; prints them if the step is logged.

        `shown` has the names to print of those that are printed, by default all under their own.
        """
        metrics = {**metrics, **self._updates.counted()}
        self.run.metrics.write(self.name, step, metrics | host_usage())
        left = self._pace.left(step)
        if self.is_logged(step):
            began, first = self._timed
            self._timed = time.perf_counter(), step + 1
            seconds = (self._timed[0] - began) / (step + 1 - first)
            shown = shown or {name: name for name in metrics}
            values = on_host({shown[name]: metrics[name] for name in shown if name in metrics})
            print_line(format_line(self.name, step, self._num_steps, values, seconds, left))

    def finish(self, step: int, write: Callable[[], None] | None = None) -> None:
        """Logs the step by `write`; checks, evaluates and saves the state after it, if that is due.

        If it is not, `write` is left to `catch_up`, and the step is unfinished until then.
        """
        num_done = step + 1

        def finished() -> None:
            if write is not None:
                write()
            self.num_done = num_done

        self._unfinished = finished
        is_saved = num_done % self.run.config.checkpoint_every == 0 or num_done == self._num_steps
        is_due = is_saved or self._is_evaluated(num_done)
        if is_due or write is None:
            self.catch_up()
        if not is_due:
            return
        self.read()
        began = time.perf_counter()
        self._check.check(self.num_done, self.state, self._loss)
        if self._is_evaluated(num_done):
            try:
                metrics = self._measure()
            except Exception:
                # The steps are not lost with it. Other processes may still be evaluating.
                if distributed.is_alone():
                    self.save_now()
                raise
            is_saved |= self.checkpoints.is_among_best(metrics)
        self._timed = self._timed[0] + time.perf_counter() - began, self._timed[1]
        if is_saved:
            self.save()

    @property
    def is_behind(self) -> bool:
        """Whether the last step is still to be finished, by `catch_up`."""
        return self._unfinished is not None

    def catch_up(self) -> None:
        """Finishes the last step if it is not yet; called while devices work on the next one."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished()

    def save(self) -> None:
        """Saves the state with its evaluation, if any, unless it is saved already."""
        self.catch_up()
        if self.num_done <= (self.checkpoints.latest_step or 0):
            return
        self.read()
        self._check.check(self.num_done, self.state, self._loss)
        step, metrics = self._evaluated
        self.checkpoints.save(
            self.num_done,
            self.state,
            {"num_decoded": self.num_decoded, **self._check.saved(), "lengths": self._lengths},
            metrics if step == self.num_done else None,
            self.saved_beside(),
        )

    def save_now(self) -> None:
        """As `save`, and waits for it. OSError: it could not be written."""
        self.save()
        self.checkpoints.wait()

    def _loss(self) -> float | None:
        """Loss of the current policy on the last batch, in nats per token."""
        if self._last is None:
            return None
        placed = sharding.put_batch(self._last[1][0], self.run.train_batch_sharding)
        return float(self.nll(self.state.params, placed))

    def _is_evaluated(self, num_done: int) -> bool:
        if not self._eval_every or self.evaluate is None:
            return False
        if num_done == 0:
            return self.run.config.evaluate.at_start
        return num_done % self._eval_every == 0 or num_done == self._num_steps

    def _measure(self) -> dict[str, float]:
        assert self.evaluate is not None  # `_is_evaluated` is False without it
        began, step = time.perf_counter(), self.num_done
        metrics = self.evaluate(self.state.params, name=self.name, step=step)
        timed = metrics | {"seconds": time.perf_counter() - began}
        self.run.metrics.write(f"{self.name}_eval", step, timed)
        self._evaluated = step, metrics
        return metrics


def _of(lengths: Iterable[int]) -> str:
    return " + ".join(map(str, lengths))


def forward_options(run: Run, attention: AttentionImpl | None = None) -> ForwardOptions:
    """The options of the forward pass of training.

    By default `attention` is that of `model.attention`, not compared with XLA.
    """
    model = run.config.model
    attention = attention or run.attention()
    return ForwardOptions(jnp.dtype(model.compute_dtype), model.remat, attention)


def compile_score(run: Run, stage: str, options: ForwardOptions) -> Callable:
    """The jitted (params, batch) -> log-probabilities at the tokens of the batch's rows."""

    def score(params, batch):
        def one(batch):
            routes = batch.routes if stage == "rl" and run.objective.replays_routes else None
            return score_rows(params, batch.rows, run.policy.config, options, routes)[0]

        return map_microbatches(one, batch, run.config[stage].microbatch_size)

    return jax.jit(run.placed(score), out_shardings=run.train_batch_sharding)


def compile_nll(run: Run, score: Callable) -> Callable[[Params, Any], jax.Array]:
    """(params, batch) -> mean of -log π, in nats, over the trained tokens."""

    def mean(logp, is_trained):
        return -jnp.where(is_trained, logp, 0.0).sum() / jnp.maximum(is_trained.sum(), 1)

    mean_program = jax.jit(mean, out_shardings=sharding.replicated(run.mesh))

    def nll(params, batch):
        is_imitated = isinstance(batch, ImitationBatch)
        is_trained = batch.rows.predictor >= 0 if is_imitated else batch.is_trained
        return mean_program(score(params, batch), is_trained)

    return nll
