"""The type checker, as pyproject.toml sets it up, finds nothing in the program."""

import pathlib
import shutil
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
MISTAKES = """
import jax.numpy as jnp
from jaxtyping import Array, Float

def scaled(x: Float[Array, "B T"], factor: float | None) -> Float[Array, "B T"]:
    return x * factor.real

scaled(jnp.zeros((1, 1)), "2")
scaled(jnp.zeros((1, 1)))
scaled(undefined, 2.0)
scaled(jnp.zeros((1, 1)), 2.0).shpae
"""
RULES = (
    "reportOptionalMemberAccess",
    "reportArgumentType",
    "reportCallIssue",
    "reportUndefinedVariable",
    "reportAttributeAccessIssue",
)


def check_types(folder: pathlib.Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_program_has_no_type_errors():
    result = check_types(ROOT)
    assert result.returncode == 0, f"\n{result.stdout}{result.stderr}"


def test_planted_mistakes_are_named(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]
    for folder in settings["include"]:
        (tmp_path / folder).mkdir()
    (tmp_path / folder / "mistakes.py").write_text(MISTAKES)
    result = check_types(tmp_path)
    named = [rule for rule in RULES if f"({rule})" in result.stdout]
    assert named == list(RULES), f"\n{result.stdout}{result.stderr}"
