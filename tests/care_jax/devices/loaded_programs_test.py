"""Compiled programs are dropped before their memory mappings are too many, and not without need."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax.devices import loaded_programs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings are counted on Linux")


@pytest.fixture
def limit(monkeypatch, tmp_path):
    """Sets how many mappings a process may have."""

    def set_limit(most):
        (tmp_path / "max_map_count").write_text(f"{most}\n")

    monkeypatch.setattr(loaded_programs, "_MOST_MAPPINGS", tmp_path / "max_map_count")
    loaded_programs.drop_if_many()  # counts from here on
    loaded_programs._counts["kept"] = 0
    yield set_limit
    loaded_programs._counts["kept"] = 0


@pytest.fixture
def program():
    """A jitted function, and the programs it has in memory: one for each shape."""

    @jax.jit
    def program(x):
        return jnp.sort(jnp.sin(x) @ x.T, axis=-1).sum(0)

    return program


def test_programs_go_when_most_mappings_are_taken_and_compute_the_same_again(limit, program):
    inputs = [jnp.linspace(0, 1, 16 * n).reshape(n, 16) for n in range(1, 30)]
    results = [np.asarray(program(x)) for x in inputs]
    taken = loaded_programs.num_mappings()
    limit(2 * taken)
    assert not loaded_programs.drop_if_many()
    limit(taken)
    assert not loaded_programs.drop_if_many()  # nothing was loaded since it looked
    program(jnp.ones((40, 16)))
    assert loaded_programs.drop_if_many()
    assert program._cache_size() == 0
    assert loaded_programs.num_mappings() < taken - len(inputs)
    for x, result in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(program(x), result)


def test_what_dropping_leaves_is_not_dropped_for_again(limit, program):
    """Where other mappings alone are most of the limit, programs are not compiled at each step."""
    program(jnp.ones((3, 16)))
    limit(loaded_programs.num_mappings() + 200)
    assert loaded_programs.drop_if_many()
    program(jnp.ones((3, 16)))
    assert program._cache_size() == 1
    assert not loaded_programs.drop_if_many()
    assert program._cache_size() == 1


def test_other_devices_keep_their_programs(limit, program, monkeypatch):
    limit(1)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    program(jnp.ones((3, 16)))
    assert not loaded_programs.drop_if_many()
    assert program._cache_size() == 1
