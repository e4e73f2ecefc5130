"""The settings of the type checker name planted mistakes; `make lint` checks the program."""

import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

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


@pytest.mark.exhaustive
def test_planted_mistakes_are_named(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]
    for folder in settings["include"]:
        (tmp_path / folder).mkdir()
    (tmp_path / folder / "mistakes.py").write_text(MISTAKES)
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    named = [rule for rule in RULES if f"({rule})" in result.stdout]
    assert named == list(RULES), f"\n{result.stdout}{result.stderr}"
