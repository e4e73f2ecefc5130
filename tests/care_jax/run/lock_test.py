"""The lock of a workdir, with real processes; other hosts are names in its file."""

import errno
import fcntl
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from care_jax.run import lock
from care_jax.run.lock import NAME, held

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOLD = """
import pathlib, sys, time
from care_jax.devices import workdir_lock
with workdir_lock.held(pathlib.Path(sys.argv[1])):
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
    assert first.returncode == 0 and (tmp_path / NAME).read_bytes() == b""
    with held(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_killed_process_blocks_nobody_on_its_host(tmp_path):
    first = start(tmp_path)
    assert first.stdout.readline() == "held\n"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == first.pid
    began = time.monotonic()
    with held(tmp_path):
        assert time.monotonic() - began < 1


def test_the_lock_is_free_behind_a_run_that_failed(tmp_path):
    with pytest.raises(KeyboardInterrupt), held(tmp_path):
        raise KeyboardInterrupt
    with held(tmp_path), pytest.raises(ValueError, match="is in use"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "_BEAT", 0.05)
    monkeypatch.setattr(lock, "_POLL", 0.02)
    monkeypatch.setattr(lock, "_PATIENCE", 0.4)


def elsewhere(path, beat):
    record = {"pid": 7, "host": "far", "boot": "b", "since": "then", "beat": beat}
    path.with_suffix(".new").write_text(json.dumps(record))
    os.replace(path.with_suffix(".new"), path)


def test_a_run_on_another_host_is_alive_while_it_rewrites_the_file(tmp_path, quick, capfd):
    """As on a bucket, where each host has an flock of its own."""
    path, ended = tmp_path / NAME, threading.Event()
    elsewhere(path, 0)

    def beat():
        for count in range(1, 1000):
            if ended.wait(0.05):
                return
            elsewhere(path, count)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        message = r"in use by process 7 on host far \(since then\)"
        with pytest.raises(ValueError, match=message), held(tmp_path):
            pass
    finally:
        ended.set()
        thread.join()
    assert "names process 7 on host far (since then); looking for up to" in capfd.readouterr().err
    assert json.loads(path.read_text())["host"] == "far"  # left as it was


def test_a_run_that_was_killed_on_another_host_is_succeeded_after_a_while(tmp_path, quick):
    elsewhere(tmp_path / NAME, 5)
    began = time.monotonic()
    with held(tmp_path):
        assert 0.4 <= time.monotonic() - began < 5
        first = json.loads((tmp_path / NAME).read_text())
        time.sleep(0.3)
        assert json.loads((tmp_path / NAME).read_text())["beat"] > first["beat"] == 0


def test_without_flock_the_rewriting_holds_the_lock(tmp_path, quick, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path), pytest.raises(ValueError, match="in use by process"), held(tmp_path):
        pass
    record = {"host": socket.gethostname(), "boot": lock._boot_id(), "pid": 2**22 + 1}
    (tmp_path / NAME).write_text(json.dumps(record))
    began = time.monotonic()
    with held(tmp_path):
        assert time.monotonic() - began < 0.3  # no such process


def test_a_rewrite_closes_the_file(tmp_path, monkeypatch):
    """Only then do other hosts see it in a bucket, where fsync is not enough for a new file."""
    called = []
    for name in ("pwrite", "close"):
        call = getattr(os, name)

        def recorded(file, *rest, name=name, call=call):
            called.append((name, file))
            return call(file, *rest)

        monkeypatch.setattr(os, name, recorded)
    with held(tmp_path):
        (file,) = (file for name, file in called if name == "pwrite")
        assert ("close", file) in called[called.index(("pwrite", file)) :]


def test_who_lost_the_lock_to_another_host_stops(tmp_path, quick, monkeypatch, capfd):
    stopped = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: stopped.set())
    with held(tmp_path):
        elsewhere(tmp_path / NAME, 0)
        assert stopped.wait(5)
    assert "in use by process 7 on host far" in capfd.readouterr().err
