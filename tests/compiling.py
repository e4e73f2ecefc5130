"""Processes that find the compiler of TPUs or GPUs that are not there.

`make test` puts libtpu and the CUDA compiler beside the environment, not in it: jax would else ask
them for devices at every start.
"""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def output_with(compiler: str, *arguments: str) -> str:
    """What Python prints with these arguments; `compiler` is "libtpu" or "cuda"."""
    folder = pathlib.Path(sys.prefix, compiler)
    if not folder.is_dir():
        pytest.skip(f"needs {compiler} in {folder}, where `make test` puts it")
    path = f"{folder}:{ROOT}:{ROOT / 'tests'}"
    own = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
