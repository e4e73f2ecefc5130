"""`config.json`: a run's configuration and all versions; `starts.jsonl`: each of its starts."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from care_jax.config.keys import leaves
from care_jax.devices.whole_file import write_whole

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGES = (
    *("care_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers"),
    *("tokenizers", "grain", "ml_collections", "safetensors", "math-verify", "sympy"),
)


def write_config(config: ConfigDict, workdir: pathlib.Path, given: Collection[str] = ()) -> None:
    """Writes config.json, with the versions of code and libraries, and what came from Python.

    An evaluation or export does not overwrite the config.json of a training run.
    """
    if not _trains(config.stages) and _trains(config_before(workdir).get("stages") or ()):
        return
    fields = _fields(config) | {"versions": versions(), "given": [*given]}
    write_whole(workdir / "config.json", json.dumps(fields, indent=2) + "\n")


def config_before(workdir: pathlib.Path) -> dict[str, Any]:
    """The fields that `write_config` wrote; none if there is no such file, or a damaged one."""
    try:
        found = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _trains(stages: Collection[str]) -> bool:
    return not {"sft", "rl"}.isdisjoint(stages)


def write_start(
    config: ConfigDict,
    workdir: pathlib.Path,
    mesh: Mesh,
    overridden: Collection[str],
    given: Collection[str] = (),
) -> None:
    """Appends a line to starts.jsonl, as config.json has the last training run only.

    A line is {"time": ISO 8601 in UTC, "command", "stages", "devices", "changed": {key: value},
    "given"}: changed are the keys set on the command line, given the stages whose examples came
    from Python.
    """
    fields = leaves(_fields(config))
    prefixes = tuple(f"{key.partition('[')[0]}." for key in overridden)
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(sys.orig_argv),
        "stages": list(config.stages),
        "devices": f"{mesh.size} × {mesh.devices.flat[0].device_kind}",
        "changed": {key: value for key, value in fields if f"{key}.".startswith(prefixes)},
        "given": [*given],
    }
    with (workdir / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(start, ensure_ascii=False) + "\n")


def _fields(config: ConfigDict) -> dict[str, Any]:
    """The configuration as JSON has it, which has no infinite numbers: they become strings."""
    return json.loads(config.to_json_best_effort(), parse_constant=str)


def command(argv: list[str]) -> str:
    """The command line of a process, without folders of Python and of an installed program."""
    program = pathlib.PurePath(argv[1]).name if len(argv) > 1 else ""
    is_installed = program == "care-jax"
    name = program if is_installed else pathlib.PurePath(argv[0]).name
    return shlex.join([name, *argv[1 + is_installed :]])


def versions() -> dict[str, str]:
    """Version of each package that is installed, of Python, and the commit if it is known."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := _commit():
        found["commit"] = commit
    return found


def _commit() -> str:
    """The commit, with "+" if files were modified; outside git, that of the container image."""
    if not (_ROOT / ".git").exists():
        return os.environ.get("CARE_JAX_COMMIT", "")
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=8", "--dirty=+"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
