"""Checkpoints of a run: state, data position, seed and metadata, written atomically."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import orbax.checkpoint as ocp


class Restored(NamedTuple):
    """A restored checkpoint.

    Attributes:
        state: as saved, with the requested shardings.
        step: the step it was saved at.
        data_position: examples or batches (the unit of the data pipeline) already consumed.
        rng: the seed from which the run derives every random key by step.
        metadata: as saved, JSON types.
    """

    state: Any
    step: int
    data_position: int
    rng: int
    metadata: dict[str, Any]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested config dicts to dotted keys, with values as JSON restores them."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.loads(json.dumps(value))
    return flat


class _Manager(ocp.CheckpointManager):
    """Disables Orbax's preemption check, whose steps would mix with the run's sync points."""

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """The checkpoints in one folder, which all processes of a run share.

    `save` returns once the arrays are copied; the files are written asynchronously. A step exists
    only once all its files are written, so a kill at any time leaves the previous step restorable.
    `close`, or leaving the `with` block, waits for the last save.

    Args:
        folder: created if missing.
        keep: number of latest steps to keep; older ones are deleted.
        fingerprint: what determines the shapes of the state, such as the backbone's config.
    """

    def __init__(self, folder: str | pathlib.Path, *, keep: int, fingerprint: Mapping[str, Any]):
        if keep < 1:
            raise ValueError(f"keep_checkpoints must be at least 1, got {keep}")
        self.folder = pathlib.Path(folder).absolute()
        self._fingerprint = _flat(fingerprint)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, cleanup_tmp_directories=True
        )
        self._manager = _Manager(
            self.folder,
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "progress": ocp.JsonCheckpointHandler(),
            },
        )

    @property
    def latest_step(self) -> int | None:
        """The last saved step; None in an empty folder."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: Any, data_position: int, rng: int, metadata: Mapping[str, Any]
    ) -> None:
        """Saves one step, which must be later than all saved steps.

        Args:
            state: tree of arrays.
            data_position, rng, metadata: see `Restored`; metadata holds JSON types.
        """
        if self.latest_step is not None and step <= self.latest_step:
            raise ValueError(
                f"step {step} is not after step {self.latest_step} in {self.folder}; restore it "
                "first or choose another --workdir"
            )
        progress = {
            "data_position": data_position,
            "rng": rng,
            "metadata": dict(metadata),
            "fingerprint": self._fingerprint,
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress)
            ),
        )

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """Restores a step, the latest by default.

        Args:
            abstract_state: tree of `ShapeDtypeStruct`s with shardings; the mesh may differ from
                the one at the save.

        Raises:
            ValueError: there is no such step, or it was saved under another fingerprint.
        """
        step = self.latest_step if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise ValueError(
                f"expected checkpoint {'of any step' if step is None else step} in {self.folder}, "
                f"found steps {sorted(self._manager.all_steps())}; check --workdir"
            )
        progress = self._manager.restore(
            step, args=ocp.args.Composite(progress=ocp.args.JsonRestore())
        )["progress"]
        self._check_fingerprint(progress["fingerprint"])
        state = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        )["state"]
        return Restored(
            state, step, progress["data_position"], progress["rng"], progress["metadata"]
        )

    def _check_fingerprint(self, saved: Mapping[str, Any]) -> None:
        ours = self._fingerprint
        differing = [
            f"{key} (checkpoint {saved.get(key, 'unset')}, config {ours.get(key, 'unset')})"
            for key in sorted(saved.keys() | ours.keys())
            if saved.get(key, "unset") != ours.get(key, "unset")
        ]
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise ValueError(
                f"the checkpoint in {self.folder} is of another model: {', '.join(differing[:3])}"
                f"{more}; use the config it was saved with or another --workdir"
            )

    def wait(self) -> None:
        """Returns once everything saved so far is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save and closes the manager."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
