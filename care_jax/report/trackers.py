"""Metrics sent to wandb and MLflow: a run per stage of a workdir, which a resumed stage continues.

Steps sent there cannot be dropped. A resumed stage sends the steps that it repeats once more, with
the same values: wandb ignores them, MLflow keeps both points.

All runs of a process end as the process does: an exception in RL also marks the run of its cold
start as failed, until a restart ends well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from care_jax.devices import distributed
from care_jax.report import about, pictures

# Shown for a response on TensorBoard and wandb.
_COLUMNS = ("role", "acc", "reward", "advantage", "tokens", "reason", "components", "text")
_MOST_PARAMS = 100  # in one request to MLflow
_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")  # characters no name may have
_STOPPED = (distributed.Preempted, KeyboardInterrupt)


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The workdir whose stages are sent, and its settings: the fields of config.json."""

    workdir: pathlib.Path
    settings: Mapping[str, Any]

    def name(self, stage: str) -> str:
        return f"{self.workdir.name}/{stage}"

    def number(self, stage: str) -> str:
        """The same for a resumed stage, different for each run and workdir.

        The first line of starts.jsonl tells a run from another one that had or has the same path,
        in an emptied folder or on another machine.
        """
        path = self.workdir / "starts.jsonl"
        begun = path.read_bytes().partition(b"\n")[0] if path.exists() else b""
        return hashlib.sha256(f"{self.workdir}/{stage}".encode() + begun).hexdigest()[:16]

    def tags(self, stage: str) -> dict[str, str]:
        """Stage, objective and model."""
        tags = {
            "stage": stage,
            "objective": about.objective_of(self.settings),
            "model": about.model_of(self.settings),
        }
        return {name: tag for name, tag in tags.items() if tag}


class Wandb:
    """Runs of a wandb project, in a group named after the workdir; ValueError if not installed."""

    def __init__(self, tracked: TrackedRun, project: str):
        self._wandb = _import("wandb", "metrics.wandb_project")
        self._tracked, self._project = tracked, project
        self._runs: dict[str, Any] = {}

    def begin(self, stage: str) -> None:
        tracked = self._tracked
        self._runs[stage] = self._wandb.init(
            project=self._project,
            group=tracked.workdir.name,
            name=tracked.name(stage),
            job_type=stage,
            tags=[tag[:64] for tag in tracked.tags(stage).values()],  # the longest that it takes
            config=dict(tracked.settings),
            allow_val_change=True,  # some keys may change on resume
            id=tracked.number(stage),
            resume="allow",
            reinit="create_new",  # stages follow one another in one process
            dir=str(tracked.workdir),
        )

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._runs[stage].log(dict(values), step=step)

    def show(self, stage: str, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Sends groups, from `Report.add`, as a table with a row per response."""
        table = self._wandb.Table(columns=["name", "image", "question", "gold", *_COLUMNS])
        for group in groups:
            image = pictures.first(group)
            shown = None if image is None else self._wandb.Image(image)
            head = f"{group['source']} {group['id']}", shown, group["question"], group["gold"]
            for row in columns(group):
                table.add_data(*head, *row.values())
        self._runs[stage].log({"rollouts": table}, step=step)

    def close(self, error: type[BaseException] | None = None) -> None:
        """Ends the runs, as failed if an exception of this type ends the process."""
        for run in self._runs.values():
            run.finish(exit_code=int(error is not None))


class Mlflow:
    """Runs of an MLflow experiment, at MLFLOW_TRACKING_URI; ValueError if not installed."""

    def __init__(self, tracked: TrackedRun, experiment: str):
        self._mlflow = _import("mlflow", "metrics.mlflow_experiment")
        self._tracked, self._client = tracked, self._mlflow.MlflowClient()
        self._experiment = self._mlflow.set_experiment(experiment).experiment_id
        self._runs: dict[str, str] = {}  # ids by stage

    def begin(self, stage: str) -> None:
        client, tracked, number = self._client, self._tracked, self._tracked.number(stage)
        found = client.search_runs([self._experiment], f"tags.care_jax_run = '{number}'")
        if found:
            self._runs[stage] = found[0].info.run_id
            client.update_run(self._runs[stage], status="RUNNING")
            return
        tags = {"care_jax_run": number, **tracked.tags(stage)}
        run = client.create_run(self._experiment, run_name=tracked.name(stage), tags=tags)
        self._runs[stage] = run.info.run_id
        param = self._mlflow.entities.Param
        params = [param(key, _text(value)) for key, value in about.flat(tracked.settings)]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run.info.run_id, params=params[first : first + _MOST_PARAMS])

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        now, metric = round(time.time() * 1000), self._mlflow.entities.Metric
        named = ((_NOT_IN_MLFLOW.sub("_", name), value) for name, value in values.items())
        metrics = [metric(name, value, now, step) for name, value in named]
        # In another thread, as a server that does not answer must not stop the run.
        self._client.log_batch(self._runs[stage], metrics=metrics, synchronous=False)

    def show(self, stage: str, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: responses are in report.html."""

    def close(self, error: type[BaseException] | None = None) -> None:
        """Ends the runs, as failed or killed if an exception of this type ends the process."""
        self._mlflow.flush_async_logging()
        status = "FINISHED"
        if error is not None:
            status = "KILLED" if issubclass(error, _STOPPED) else "FAILED"
        for run_id in self._runs.values():
            self._client.set_terminated(run_id, status=status)


def columns(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The responses of a group by column."""
    return [
        {name: response[name] for name in _COLUMNS}
        | {"components": ", ".join(f"{key} {x}" for key, x in response["components"].items())}
        for response in group["responses"]
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _import(name: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{key} needs {name}, which is not installed; pip install 'care_jax[{name}]' or leave "
            "the key empty"
        ) from error
