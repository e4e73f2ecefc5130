"""The lock of a workdir, with real processes."""

import errno
import fcntl
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from care_jax.run.lock import NAME, held

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOLD = """
import pathlib, sys, time
from care_jax.run import lock
with lock.held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def start(workdir):
    """A process that asks for the lock, and holds it until it gets a line."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(workdir)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_process_is_refused_by_the_firsts_id_and_host(tmp_path):
    first = start(tmp_path)
    assert first.stdout.readline() == "held\n"
    _, error = start(tmp_path).communicate(timeout=60)
    message = f"{tmp_path} is in use by process {first.pid} on host {socket.gethostname()} (since 2"
    assert f"ValueError: {message}" in error
    with pytest.raises(ValueError, match=f"in use by process {first.pid} on"), held(tmp_path):
        pass
    first.communicate("\n", timeout=60)
    assert first.returncode == 0
    with held(tmp_path):
        assert (tmp_path / NAME).read_text().startswith(f"process {os.getpid()} on host ")


def test_a_killed_process_blocks_nobody_on_its_host(tmp_path):
    first = start(tmp_path)
    assert first.stdout.readline() == "held\n"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert f"process {first.pid} on" in (tmp_path / NAME).read_text()
    with held(tmp_path):
        pass


def test_the_lock_is_free_behind_a_run_that_failed(tmp_path):
    with pytest.raises(KeyboardInterrupt), held(tmp_path):
        raise KeyboardInterrupt
    with held(tmp_path), pytest.raises(ValueError, match="is in use"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capfd):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path):
        told = f"{tmp_path} cannot be locked (not supported); start no second run in it\n"
        assert capfd.readouterr().err == told
