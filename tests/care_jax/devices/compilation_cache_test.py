"""A run that is started again compiles nothing, and counts what it found."""

import os
import subprocess
import sys

import jax

from care_jax.devices import compilation_cache

CACHE = "jax_compilation_cache_dir"
PROGRAM = """
import pathlib, sys
import jax, jax.numpy as jnp
from care_jax.devices import compilation_cache
compilation_cache.keep_programs(pathlib.Path(sys.argv[1]))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3))).block_until_ready()
print(compilation_cache.counts())
"""


def counts(workdir):
    environment = {name: value for name, value in os.environ.items() if name != CACHE.upper()}
    command = [sys.executable, "-c", PROGRAM, str(workdir)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | {"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def test_a_second_start_finds_all_programs_of_the_first(tmp_path):
    first, second = counts(tmp_path), counts(tmp_path)
    assert first["compiled"] > 0 and first["found"] == 0
    assert second == {"compiled": 0, "found": first["compiled"]}


def test_a_folder_of_the_users_own_stays(tmp_path):
    """JAX_COMPILATION_CACHE_DIR in the environment sets the same key."""
    before = jax.config.values[CACHE]
    jax.config.update(CACHE, str(tmp_path / "own"))
    compilation_cache.keep_programs(tmp_path / "run")
    assert jax.config.values[CACHE] == str(tmp_path / "own")
    jax.config.update(CACHE, before)
