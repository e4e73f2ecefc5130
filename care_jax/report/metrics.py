"""Metrics of a run, under the same names in metrics.jsonl, TensorBoard, wandb and MLflow.

Steps are counted from 0 within each stage ("sft", "rl", "evaluate_rl", ...). A line of
metrics.jsonl is one flat object: stage, step, then the metrics by name. A resumed run drops the
lines of the steps that it will repeat, so that every step appears once.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import psutil
import tensorboardX
import tensorboardX.summary

from care_jax.devices import compilation, distributed
from care_jax.report import about, pictures
from care_jax.report.console import print_line
from care_jax.report.records import keep_records, read_records
from care_jax.report.trackers import Mlflow, TrackedRun, Wandb, columns

Scalar = Any  # int, float, or an array of one element, on the host or on a device


def on_host(metrics: Mapping[str, Scalar]) -> dict[str, int | float]:
    """Python numbers, fetched in one transfer."""
    fetched = jax.device_get(dict(metrics))  # sorts the names
    return {name: np.asarray(fetched[name]).item() for name in metrics}


def check_finite(
    step: int,
    stage: str,
    metrics: Mapping[str, Scalar],
    advice: str = "lower the learning rate or resume from an earlier checkpoint",
) -> None:
    """Raises a FloatingPointError that names stage, step and the NaN or infinite metrics."""
    values = on_host(metrics)
    bad = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise FloatingPointError(
            f"{stage} step {step}: expected finite metrics, got {', '.join(bad)}; {advice}"
        )


def device_memory() -> dict[str, float]:
    """Peak memory of the first local device in GiB, if its backend reports it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {} if peak is None else {"device_memory_gib": peak / 2**30}


def host_usage() -> dict[str, float]:
    """Of this process: resident memory in GiB, open files, threads, compiled programs so far."""
    process = psutil.Process()
    return {
        "host/memory_gib": process.memory_info().rss / 2**30,
        "host/open_files": process.num_fds(),
        "host/threads": process.num_threads(),
        **{f"host/programs_{name}": number for name, number in compilation.counts().items()},
    }


def _markdown(group: Mapping[str, Any]) -> str:
    """A heading, and each response as an indented block below its figures."""
    name = f"{group['source']} {group['id']}"
    parts = [f"**{name}** {group['question']}\n\ngold answer: {group['gold']}"]
    for row in columns(group):
        text = "\n".join(f"    {line}" for line in row.pop("text").splitlines())
        parts.append(" · ".join(f"{key} {x}" for key, x in row.items()) + f"\n\n{text}")
    return "\n\n".join(parts)


class MetricWriter:
    """Writes workdir/metrics.jsonl and workdir/tensorboard/<stage>, on the first process only.

    TensorBoard has the settings of a stage as hyperparameters, and all of them as text.

    Args:
        settings: the fields of config.json; none by default.
        wandb_project, mlflow_experiment: where to send metrics besides, see `trackers`.

    Raises:
        ValueError: wandb or mlflow is needed and not installed.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        settings: Mapping[str, Any] | None = None,
        *,
        wandb_project: str = "",
        mlflow_experiment: str = "",
    ):
        self.path = pathlib.Path(workdir) / "metrics.jsonl"
        self._is_writer = jax.process_index() == 0
        self._settings = settings or {}
        self._boards: dict[str, tensorboardX.SummaryWriter] = {}
        self._refused: OSError | None = None  # the first one in a TensorBoard thread
        self._left_out: dict[str, Counter[str]] = {}
        tracked = TrackedRun(self.path.parent.resolve(), self._settings)
        wanted = ((Wandb, wandb_project), (Mlflow, mlflow_experiment)) if self._is_writer else ()
        self._trackers = [tracker(tracked, name) for tracker, name in wanted if name]

    def begin(self, stage: str, start_step: int = 0) -> None:
        """Starts or resumes a stage; its lines from `start_step` on are dropped."""
        if not self._is_writer:
            return
        self._open(stage, start_step)
        if len(self._boards) == 1:  # in the run's first seconds, such as of a wrong key
            for tracker in self._trackers:
                tracker.begin(stage)
        else:
            self._track(lambda tracker: tracker.begin(stage))

    def _open(self, stage: str, start_step: int) -> None:
        if stage in self._boards:
            raise ValueError(f"stage {stage} has begun already; call begin once per stage")
        keep_records(self.path, lambda r: r.get("stage") != stage or r["step"] < start_step)
        folder = str(self.path.parent / "tensorboard" / stage)
        try:
            self._boards[stage] = tensorboardX.SummaryWriter(folder, purge_step=start_step)
        except OSError as error:
            error.filename = error.filename or "/dev/shm"  # where the lock of its queue is
            raise
        self._keep_refusals(self._boards[stage], folder)
        if self._settings:
            self._describe(stage)

    def line(self, stage: str, step: int) -> dict[str, float] | None:
        """The metrics of a step's line in metrics.jsonl, on all processes; None without one."""
        found = None
        if self._is_writer:
            records = (record for _, record in read_records(self.path))
            found = next((r for r in records if (r.get("stage"), r["step"]) == (stage, step)), None)
        if (found := distributed.gather_json(found)[0]) is None:
            return None
        return {name: value for name, value in found.items() if name not in ("stage", "step")}

    def left_out(self, stage: str) -> Counter[str]:
        """What a stage leaves out, by reason: counted by the caller, written with its every line.

        Counts are written as `left_out/reason`, summed over the processes, all of which must ask
        for the counter.
        """
        return self._left_out.setdefault(stage, Counter())

    def write(self, stage: str, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Appends one line of finite scalars; begins the stage if it has not begun.

        Raises:
            FloatingPointError: a metric is NaN or infinite.
            ValueError: a metric is named "stage" or "step".
        """
        values = on_host(metrics) | self._counted(stage)
        check_finite(step, stage, values)
        if reserved := metrics.keys() & {"stage", "step"}:
            raise ValueError(f"no metric may be named {sorted(reserved)[0]!r}; rename it")
        if not self._is_writer:
            return
        if stage not in self._boards:
            self._open(stage, step)
            self._track(lambda tracker: tracker.begin(stage))
        # Opened for each line: a mounted bucket has a line only once the file is closed.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage, "step": step, **values}) + "\n")
        for name, value in values.items():
            self._boards[stage].add_scalar(name, value, step)
        if self._refused is not None:
            raise self._refused
        self._track(lambda tracker: tracker.log(stage, step, values))

    def show(self, stage: str, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Sends prompts and responses to TensorBoard, as images and text, and to the trackers.

        The stage has begun. `groups` are from `Report.add`; each is stored whole.
        """
        if not self._is_writer or not groups:
            return
        for number, group in enumerate(groups):
            self._boards[stage].add_text(f"rollouts/{number}", _markdown(group), step)
            if (image := pictures.first(group)) is not None:
                pixels = np.asarray(image.convert("RGB"))
                self._boards[stage].add_image(f"rollouts/{number}", pixels, step, dataformats="HWC")
        self._track(lambda tracker: tracker.show(stage, step, groups))

    def _track(self, call: Callable[[Wandb | Mlflow], None]) -> None:
        """Calls every tracker; one that fails is left out from then on."""
        for tracker in [*self._trackers]:
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                reason = " ".join(str(error).split()) or type(error).__name__
                print_line(
                    f"{type(tracker).__name__} failed ({reason}); the run goes on without it, and "
                    f"{self.path} has the metrics"
                )

    def _counted(self, stage: str) -> dict[str, int]:
        if stage not in self._left_out:
            return {}
        values: Counter[str] = Counter()
        for counts in distributed.gather_json(dict(self._left_out[stage])):
            for reason, count in counts.items():
                values[f"left_out/{reason.replace(' ', '_')}"] += count
        return dict(sorted(values.items()))

    def close(self, error: type[BaseException] | None = None) -> None:
        """Closes TensorBoard and the trackers, which show whether an exception ended the run."""
        for board in self._boards.values():
            board.close()
        self._track(lambda tracker: tracker.close(error))
        if self._refused is not None:
            raise self._refused

    def _describe(self, stage: str) -> None:
        """The settings, as TensorBoard's hyperparameters and as text."""
        board = self._boards[stage]
        values = {
            key: value if isinstance(value, int | float | str) else json.dumps(value)
            for key, value in about.hyperparameters(self._settings, stage)
        }
        # Not `add_hparams`, which would make a run of its own beside the stage's. Without the first
        # summary, which lists the metrics, TensorBoard offers all that the stage has.
        _, start, _ = tensorboardX.summary.hparams(values, {})
        assert board.file_writer is not None  # until it is closed
        board.file_writer.add_summary(start)
        text = json.dumps(self._settings, indent=2, ensure_ascii=False)
        board.add_text("settings", "\n".join(f"    {line}" for line in text.splitlines()))

    def _keep_refusals(self, board: tensorboardX.SummaryWriter, folder: str) -> None:
        """Keeps an OSError of the board's writer thread, for `write` and `close` to raise.

        Otherwise the thread would end, and the main thread would block when its queue is full.
        """

        def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                try:
                    return function(*args)
                except OSError as error:
                    error.filename = error.filename or folder
                    self._refused = self._refused or error
                    return None

            return call

        assert board.file_writer is not None  # until it is closed
        record = board.file_writer.event_writer._ev_writer
        for name in ("write_event", "flush", "close"):
            setattr(record, name, guarded(getattr(record, name)))

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # On a full disk closing fails too, and would hide the first error.
        with contextlib.suppress(*() if kind is None else (Exception,)):
            self.close(kind)
