"""Checkpoints of a run: state and metadata, written atomically.

A step is committed with the SHA-256 of its files (`integrity`). A step that does not match is never
restored: its folder is renamed to `<step>.damaged`, and the previous step is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers
from orbax.checkpoint.options import AtomicityMode, AtomicityOptions

from care_jax.devices import distributed
from care_jax.devices.whole_file import write_whole
from care_jax.report.console import print_line
from care_jax.run import integrity, mounts
from care_jax.run.progress import by_dotted_key, check_same_steps, read_progress
from care_jax.run.ranking import Ranking

_DAMAGED = ".damaged"
# Orbax rewrites these at the commit; they hold timestamps only.
_NOT_HASHED = ("_CHECKPOINT_METADATA", "commit_success.txt")
_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
_QUICK_BYTES = 2**20  # larger files are hashed only before a restore


class Restored(NamedTuple):
    """A restored checkpoint."""

    state: Any  # as saved, with the requested shardings
    step: int  # the steps done, from which data and random keys of the next one follow
    metadata: dict[str, Any]  # as saved, JSON types
    in_flight: dict[str, Any] | None  # description of `InFlightSave`


class InFlightSave(NamedTuple):
    """Unfinished work that is saved beside the state."""

    arrays: dict[str, Any]
    description: dict[str, Any]  # JSON types


class _Manager(ocp.CheckpointManager):
    """Keeps the error of a save that still waits for other processes.

    Disables Orbax's preemption check, whose steps would mix with the run's sync points.
    """

    failure: Exception | None = None

    def reached_preemption(self, step: int) -> bool:
        return False

    def _wait_for_checkpointers(self) -> None:
        try:
            super()._wait_for_checkpointers()
        except Exception as error:
            self.failure = error
            raise


class Checkpoints:
    """The checkpoints in one folder, which all processes of a run share.

    `save` returns once the arrays are copied; the files are written asynchronously. A step exists
    only once all its files are written, so a kill at any time leaves the previous step restorable.
    `close`, or leaving the `with` block, waits for the last save. A save that fails is reported by
    `has_failed` and may be followed by one of a later step; two in a row raise their error.

    Opening compares the sizes of all files, and hashes small ones. A restore first hashes every
    file of its step; the files are divided among the processes, which gather the results.

    Args:
        folder: created if missing.
        keep: number of latest steps to keep; older ones are deleted, except the best.
        fingerprint: what determines the shapes of the state, such as the backbone's config.
        settings: the run's, saved with every step, see `read_progress`; JSON types.
        keep_best: number of best steps to keep in addition.
        best_metric, evaluation: see `Ranking`; the evaluation is saved with the metrics.

    Raises:
        ValueError: all steps are damaged, or processes list different ones.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        *,
        keep: int,
        fingerprint: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        keep_best: int = 0,
        best_metric: str = "acc",
        evaluation: Mapping[str, Any] | None = None,
    ):
        if keep < 1:
            raise ValueError(f"keep_checkpoints must be at least 1, got {keep}")
        self.folder = pathlib.Path(folder).absolute()
        self._fingerprint = by_dotted_key(fingerprint)
        self._settings, self._keep_best = dict(settings or {}), keep_best
        self._ranking = Ranking(best_metric, evaluation or {})
        self._saving = 0  # the step that is being written
        self._error: Exception | None = None  # of the last save, if it failed
        self._is_retry = False  # the save before the last one failed
        self._without_manifest: set[int] = set()  # steps already reported
        self._whole: set[int] = set()  # steps whose files were hashed, and match
        self._mark_damaged_steps()
        # A bucket without hierarchical namespaces has no atomic rename of folders, and gcsfuse
        # refuses to rename one, so on FUSE mounts a marker file commits the step.
        is_bucket = mounts.is_fuse(self.folder)
        mode = AtomicityMode.COMMIT_FILE if is_bucket else AtomicityMode.ATOMIC_RENAME
        latest = checkpoint_managers.LatestN(keep)
        best = checkpoint_managers.BestN(
            get_metric_fn=self._ranking.value, n=keep_best, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            create=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
            cleanup_tmp_directories=True,
            atomicity_options=AtomicityOptions(mode=mode),
            best_fn=self._ranking.value,  # makes the manager store the metrics of a step
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([latest, best]),
        )
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            "progress": ocp.JsonCheckpointHandler(),  # its file is read by `read_progress`
            "in_flight": ocp.StandardCheckpointHandler(),
        }
        self._manager = _Manager(self.folder, options=options, item_handlers=handlers)
        check_same_steps({self.folder: self.steps})
        self._ranking.read({step: self._manager.metrics(step) or {} for step in self.steps})
        if not self.steps:
            self._refuse_if_damaged()

    @property
    def steps(self) -> Sequence[int]:
        """The saved steps, in order."""
        return sorted(self._manager.all_steps())

    @property
    def latest_step(self) -> int | None:
        """The last saved step; None in an empty folder."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The saved step with the highest best_metric, the last on a tie; None without any."""
        return self._ranking.best(self.steps)

    def is_among_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether a step with these metrics must be kept as one of the best."""
        return self._ranking.is_among(self._keep_best, metrics, self.steps)

    def _rank(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """A step's metrics as they are stored; says which steps do not compare with them."""
        left, differing = self._ranking.add(step, metrics, self.steps)
        if left and self._keep_best:
            print_line(
                f"checkpoints {left} in {self.folder} were evaluated with another "
                f"{', '.join(differing)} than step {step}; they are not compared with it, and no "
                "longer kept as the best"
            )
        return self._ranking.stored[step]

    def save(
        self,
        step: int,
        state: Any,
        metadata: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        in_flight: InFlightSave | None = None,
    ) -> None:
        """Saves one step, which must be later than all saved steps.

        `state` is a tree of arrays, `metadata` of JSON types; `metrics` are of the step's
        evaluation, if there was one.
        """
        if self.latest_step is not None and step <= self.latest_step:
            raise ValueError(
                f"step {step} is not after step {self.latest_step} in {self.folder}; restore it "
                "first, or choose another --workdir"
            )
        progress: dict[str, Any] = {"metadata": dict(metadata), "fingerprint": self._fingerprint}
        progress["settings"] = self._settings
        self._settle()  # the callback of the last save reads `_saving`
        if self._error is not None:
            _print_error(
                f"checkpoint {self._saving} in {self.folder} could not be saved ({self._error}); "
                f"step {step} is saved instead"
            )
        self._error, self._is_retry = None, self._error is not None
        self._manager.failure = None
        self._saving = step
        stored = self._rank(step, metrics or {})
        items: dict[str, Any] = {"state": ocp.args.StandardSave(state)}
        if in_flight is not None:
            progress["in_flight"] = in_flight.description
            items["in_flight"] = ocp.args.StandardSave(in_flight.arrays)
        items["progress"] = ocp.args.JsonSave(progress)
        with self._with_os_errors():
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=stored)

    def has_failed(self) -> bool:
        """Whether the last save ended with an error; False while it goes on.

        Raises:
            OSError: the save before it failed too, or it failed on this of several processes.
        """
        if not self._manager.is_saving_in_progress():
            self._settle()
        elif self._manager.failure is not None and not distributed.is_alone():
            # The processes wait for each other to commit a step, for 20 minutes if one has failed,
            # and could not save it again meanwhile. Its error ends them all.
            with self._with_os_errors():
                raise self._manager.failure
        return self._error is not None

    def _settle(self) -> None:
        """Waits for the last save; raises its error if the save before it failed too."""
        try:
            self.wait()
        except Exception as error:
            if self._is_retry:
                raise
            self._error = error
            if jax.process_index() == 0:  # the next save may need the space
                for left in self.folder.glob(f"{self._saving}.*tmp*"):
                    shutil.rmtree(left, ignore_errors=True)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step that was evaluated after it was saved."""
        self.wait()
        stored = self._rank(step, metrics)
        if jax.process_index() == 0:
            # In the manager's format; the manager itself cannot change a saved step.
            folder = self.folder / str(step) / "metrics"
            folder.mkdir(exist_ok=True)
            write_whole(folder / "metrics", json.dumps(stored))
            integrity.update_manifest(self.folder / str(step), "metrics/metrics")
        distributed.gather_json(step)  # a barrier: the file is written
        self._manager.reload()

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """Restores a step, by default the latest that is not damaged.

        `abstract_state` is a tree of `ShapeDtypeStruct`s with shardings; the mesh may differ from
        the one at the save.

        Raises:
            ValueError: no such step, a damaged one, or one saved under another fingerprint.
        """
        if step is None:
            step = self.latest_whole_step()
        elif step in self.steps:
            self.check_whole(step)
        if step is None or step not in self.steps:
            raise ValueError(
                f"expected checkpoint {'of any step' if step is None else step} in {self.folder}, "
                f"found steps {self.steps}; correct --workdir"
            )
        progress = self._progress(step)
        items = {"state": ocp.args.StandardRestore(abstract_state)}
        state = self._manager.restore(step, args=ocp.args.Composite(**items))["state"]
        return Restored(state, step, progress["metadata"], progress.get("in_flight"))

    def restore_in_flight(self, shapes: Any, step: int) -> dict[str, Any]:
        """The arrays that were saved as `in_flight` with a restored step; see `restore`."""
        args = ocp.args.Composite(in_flight=ocp.args.StandardRestore(shapes))
        return self._manager.restore(step, args=args)["in_flight"]

    def restore_params(self, abstract_params: Any, step: int, *, is_whole: bool = False) -> Any:
        """Restores only the entry "params" of a saved state, see `restore`.

        A step that `is_whole`, as another instance has found it, is not hashed again.
        """
        if not is_whole:
            self.check_whole(step)
        self._progress(step)
        item = {"params": abstract_params}
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(self.folder / str(step) / "state", args=args)["params"]

    def _progress(self, step: int) -> dict[str, Any]:
        return read_progress(self.folder, step, self._fingerprint)

    def latest_whole_step(self) -> int | None:
        """The last saved step whose files match its manifest; None in an empty folder.

        Damaged steps are renamed, with a line on stderr for each. ValueError: all are damaged.
        """
        step = latest = self.latest_step
        while step is not None and not self.verify(step):
            step = self.latest_step
        if latest is not None and step is None:
            self._refuse_if_damaged()
        return step

    def best_whole_step(self) -> int | None:
        """As `best_step`, of the steps whose files match their manifest; renames the others."""
        step = self.best_step
        while step is not None and not self.verify(step):
            step = self.best_step
        return step

    def verify(self, step: int) -> bool:
        """Whether a saved step's files match its manifest; if not, renames its folder.

        They are hashed once.
        """
        if step in self._whole:
            return True
        self.wait()
        folder = self.folder / str(step)
        fault = integrity.shared_damage(folder, _label(step))
        if not integrity.has_manifest(folder) and step not in self._without_manifest:
            self._without_manifest.add(step)
            _print_error(
                f"checkpoint {step} in {self.folder} has no {integrity.MANIFEST}; restored without "
                "verification"
            )
        if fault:
            self._mark_damaged({step: fault})
            self._manager.reload()
            check_same_steps({self.folder: self.steps})
        else:
            self._whole.add(step)
        return not fault

    def check_whole(self, step: int) -> None:
        """Raises ValueError if a saved step's files do not match its manifest; see `verify`."""
        if not self.verify(step):
            raise ValueError(
                f"checkpoint {step} in {self.folder} is damaged and was renamed to "
                f"{step}{_DAMAGED}; choose one of the steps {self.steps}"
            )

    def _write_manifest(self) -> None:
        """Called on process 0 when all processes have written a step, before the commit."""
        written = [*self.folder.glob(f"{self._saving}.*tmp*"), self.folder / str(self._saving)]
        integrity.write_manifest(written[0], leave_out=_NOT_HASHED, of=_label(self._saving))

    def _mark_damaged_steps(self) -> None:
        """Renames the steps that have a file of a wrong size or a small file of a wrong hash."""
        found = {}
        if jax.process_index() == 0 and self.folder.is_dir():
            steps = [path for path in self.folder.iterdir() if path.name.isdecimal()]
            found = {
                path.name: integrity.find_damage(
                    path, of=_label(path.name), most_bytes=_QUICK_BYTES
                )
                for path in steps
            }
        found = distributed.gather_json(found)[0]
        self._mark_damaged(
            {int(step): found[step] for step in sorted(found, key=int) if found[step]}
        )

    def _mark_damaged(self, faults: Mapping[int, str]) -> None:
        """Renames damaged steps on the first process; `faults` is the same on all."""
        for step, fault in faults.items():
            _print_error(f"checkpoint {step} is damaged: {fault}; renamed to {step}{_DAMAGED}")
            if jax.process_index() == 0:
                names = [f"{step}{_DAMAGED}", *(f"{step}{_DAMAGED}.{i}" for i in range(1, 100))]
                free = next(name for name in names if not (self.folder / name).exists())
                # `move` copies and removes where folders cannot be renamed (gcsfuse).
                shutil.move(self.folder / str(step), self.folder / free)
        if faults:
            distributed.gather_json(len(faults))  # a barrier: the folders are renamed

    def _refuse_if_damaged(self) -> None:
        damaged = sorted(path.name for path in self.folder.glob(f"*{_DAMAGED}*"))
        if distributed.gather_json(bool(damaged))[0]:
            raise ValueError(
                f"every checkpoint in {self.folder} is damaged ({', '.join(damaged)}); restore one "
                "from a copy, or remove these folders to restart the stage"
            )

    def wait(self) -> None:
        """Returns once everything saved so far is on disk; OSError if it could not be written."""
        with self._with_os_errors():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _with_os_errors(self) -> Iterator[None]:
        """Turns TensorStore's error about a file it cannot write into an OSError with the path."""
        try:
            yield
        except ValueError as error:
            if code := _SYSTEM_ERROR.search(str(error)):
                number = int(code.group(1))
                path = str(self.folder / str(self._saving))
                raise OSError(number, os.strerror(number), path) from error
            raise

    def close(self) -> None:
        """Waits for the last save and closes the manager."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A save that failed too must not hide the first error.
        with contextlib.suppress(*() if kind is None else (Exception,)):
            self.close()


def _label(step: int | str) -> str:
    """What a step's manifest says that it is of, since two steps have the same files."""
    return f"checkpoint {step}"


def _print_error(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr, flush=True)
