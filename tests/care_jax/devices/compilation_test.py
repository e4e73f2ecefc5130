"""A second run on a machine compiles nothing; what takes long to compile is announced."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from care_jax.devices import compilation

CACHE = "jax_compilation_cache_dir"
PROGRAM = """
import jax, jax.numpy as jnp
from care_jax.devices import compilation
compilation.keep_programs()
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3))).block_until_ready()
print(compilation.counts())
"""


def counts(folder):
    environment = {name: value for name, value in os.environ.items() if name != CACHE.upper()}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def test_a_second_run_finds_all_programs_of_the_first(tmp_path):
    first, second = counts(tmp_path), counts(tmp_path)
    assert first["compiled"] > 0 and first["found"] == 0
    assert second == {"compiled": 0, "found": first["compiled"]}
    assert [path.name for path in tmp_path.iterdir()] == ["care_jax"]


def test_a_folder_of_the_users_own_stays(tmp_path):
    """JAX_COMPILATION_CACHE_DIR in the environment sets the same key."""
    before = jax.config.values[CACHE]
    jax.config.update(CACHE, str(tmp_path / "own"))
    compilation.keep_programs()
    assert jax.config.values[CACHE] == str(tmp_path / "own")
    jax.config.update(CACHE, before)


@pytest.mark.parametrize("home", [None, "file/home"])
def test_without_a_home_programs_are_compiled_anew(tmp_path, monkeypatch, caplog, home):
    """A container may run as a user without one, or whose home cannot be written."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def home_of():
        if home is None:
            raise RuntimeError("Could not determine home directory.")
        return tmp_path / home

    monkeypatch.setattr(compilation.pathlib.Path, "home", home_of)
    before = jax.config.values[CACHE]
    jax.config.update(CACHE, None)
    try:
        compilation.keep_programs()
        assert jax.config.values[CACHE] is None
    finally:
        jax.config.update(CACHE, before)
    (line,) = caplog.messages
    assert line.startswith("compiled programs are not kept (")


class OverAtOnce(threading.Timer):
    """A timer whose time is over when it starts."""

    def start(self):
        self.function(*self.args)


def test_a_program_is_announced_once_its_compilation_takes_long(monkeypatch):
    said = []

    def update(x, length):
        """Takes `length` times as long to compile as to trace."""
        for number in range(length):
            x = jnp.sin(x * number) @ x
        return x

    def helper(x):
        return x + 1

    monkeypatch.setattr(compilation.threading, "Timer", OverAtOnce)
    with compilation.Announcer(said.append, {"update": "the update"}, expected=2):
        program = jax.jit(update, static_argnums=1)
        for length in (40, 41, 41, 42):
            program(jnp.ones((3, 3)), length)
        jax.jit(helper)(jnp.ones(5))
    assert said == [
        f"compiling the update ({n})..." for n in ("1 of 2", "2 of 2", "3 for another shape")
    ]
    program(jnp.ones((3, 3)), 43)
    assert len(said) == 3
    monkeypatch.undo()
    monkeypatch.setattr(compilation, "_SILENT_SECONDS", 60.0)
    with compilation.Announcer(said.append, {"update": "the update"}, expected=2):
        program(jnp.ones((3, 3)), 44)
    assert len(said) == 3
