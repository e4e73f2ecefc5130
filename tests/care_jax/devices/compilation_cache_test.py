"""A run that is started again compiles nothing anew, which it says."""

import os
import subprocess
import sys

PROGRAM = """
import pathlib, sys
import jax, jax.numpy as jnp
from care_jax.devices import compilation_cache
compilation_cache.keep_programs(pathlib.Path(sys.argv[1]))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3))).block_until_ready()
print(compilation_cache.counts())
"""


def counts(workdir, **environment):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", PROGRAM, str(workdir)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def test_a_second_start_finds_all_programs_of_the_first(tmp_path):
    first, second = counts(tmp_path), counts(tmp_path)
    assert first["compiled"] > 0 and first["found"] == 0
    assert second == {"compiled": 0, "found": first["compiled"]}


def test_a_folder_of_the_users_own_is_left_to_be_it(tmp_path):
    own, workdir = tmp_path / "own", tmp_path / "run"
    counts(workdir, JAX_COMPILATION_CACHE_DIR=str(own))
    assert own.exists() and not workdir.exists()
