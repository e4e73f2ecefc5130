"""A second run on a machine compiles nothing; what takes long to compile is announced."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

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


def test_no_programs_are_kept_even_in_a_folder_of_the_environment(tmp_path):
    program = PROGRAM.replace("keep_programs", "keep_no_programs")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", CACHE.upper(): str(tmp_path / "own")}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    for source, is_written in ((program, False), (PROGRAM, True)):
        command = [sys.executable, "-c", source]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        assert (tmp_path / "own").exists() == is_written


def test_a_folder_of_the_users_own_stays(tmp_path):
    """JAX_COMPILATION_CACHE_DIR in the environment sets the same key."""
    before = jax.config.values[CACHE]
    jax.config.update(CACHE, str(tmp_path / "own"))
    compilation.keep_programs()
    assert jax.config.values[CACHE] == str(tmp_path / "own")
    jax.config.update(CACHE, before)


def double(x):
    return jnp.sin(x) * 2 @ x


def triple(x):
    return jnp.sin(x) * 3 @ x


def swapped(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def flipped(one, other):
    data = bytearray(one.read_bytes())
    data[len(data) // 2] ^= 1
    one.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "num_found"),
    [
        (lambda one, other: None, 2),
        (flipped, 1),
        (lambda one, other: one.write_bytes(one.read_bytes()[:-9]), 1),
        (lambda one, other: one.write_bytes(b""), 1),
        (lambda one, other: one.unlink(), 1),
        (swapped, 0),
    ],
    ids=["none", "flipped", "cut", "emptied", "removed", "swapped"],
)
def test_a_damaged_program_is_compiled_again(tmp_path, capsys, damage, num_found):
    """JAX alone runs `triple` in place of `double` once their entries are swapped."""
    names = CACHE, "jax_persistent_cache_min_entry_size_bytes"
    before = {name: jax.config.values[name] for name in names}
    compilation.keep_programs()

    def computed():
        """Both programs, compiled or read from the folder, which is opened anew."""
        jax.clear_caches()
        compilation_cache.reset_cache()
        return [np.asarray(jax.jit(each)(jnp.ones((9, 9)))) for each in (double, triple)]

    try:
        for name, value in zip(names, (str(tmp_path), -1), strict=True):
            jax.config.update(name, value)
        expected = computed()
        one, other = (next(tmp_path.glob(f"jit_{name}*")) for name in ("double", "triple"))
        damage(one, other)
        capsys.readouterr()
        for number in (num_found, 2):  # the second time all are found, and nothing is said
            num_before = compilation.counts()["compiled"]
            np.testing.assert_array_equal(computed(), expected)
            assert compilation.counts()["compiled"] == num_before + 2 - number
            is_said = number < 2 and damage.__name__ != "<lambda>"
            assert ("was damaged; compiling it again" in capsys.readouterr().err) >= is_said
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


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
