"""What XLA is told by default."""

import os
import subprocess
import sys

import pytest

from care_jax.devices import xla_flags
from care_jax.devices.flops import CHIPS, GIB

FLAG = "--xla_cpu_experimental_ynn_fusion_type="


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", FLAG),
        ("--xla_dump_to=dumped", f"--xla_dump_to=dumped {FLAG}"),
        (f"{FLAG}dot", f"{FLAG}dot"),
    ],
)
def test_a_flag_that_is_given_stays(monkeypatch, given, wanted):
    monkeypatch.setenv("XLA_FLAGS", given)
    xla_flags.set_defaults()
    xla_flags.set_defaults()
    assert os.environ["XLA_FLAGS"] == wanted


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_a_gpu_gives_the_share_of_its_memory_that_aot_counts_on(monkeypatch, name):
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}dot")
    monkeypatch.setenv(name, "0.5")
    assert xla_flags.set_defaults() == [] and os.environ[name] == "0.5"
    monkeypatch.delenv(name)
    for other in xla_flags._MEMORY_NAMES:
        monkeypatch.delenv(other, raising=False)
    assert xla_flags.set_defaults("none") == []
    assert xla_flags.set_defaults() == ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"]
    assert float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == 0.9
    assert CHIPS["h100"].hbm == pytest.approx(0.9 * 79.1 * GIB)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")


def test_xla_knows_the_flags_and_no_longer_calls_the_library():
    program = """
import sys
from care_jax.devices import xla_flags
if sys.argv[1] == "defaults":
    xla_flags.set_defaults()
import jax, jax.numpy as jnp
x = jnp.ones((512, 512))
print("ynn" in jax.jit(lambda x: (x @ x).sum(0)).lower(x).compile().as_text())
"""
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    found = [
        subprocess.run(
            [sys.executable, "-c", program, case],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for case in ("none", "defaults")
    ]
    assert found == ["True", "False"]
