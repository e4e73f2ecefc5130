"""`config.json`: the configuration of a run, and the versions of this code and its libraries."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess

from ml_collections import ConfigDict

from care_jax.devices.whole_file import write_whole

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGES = (
    *("care_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers"),
    *("tokenizers", "grain", "ml_collections", "safetensors", "math-verify", "sympy"),
)


def write_config(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Writes config.json, with the versions of code and libraries."""
    fields = json.loads(config.to_json_best_effort()) | {"versions": versions()}
    write_whole(workdir / "config.json", json.dumps(fields, indent=2) + "\n")


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
