"""The lock of a workdir, also held by another process."""

import errno
import fcntl
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from care_jax.run.lock import NAME, held, new_folder

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOLD = """
import pathlib, sys, time
from care_jax.run import lock
with lock.held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_by_the_firsts_id_and_host_until_it_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == "held\n"
    holder = f"process {first.pid} on host {socket.gethostname()} (since 2"
    with pytest.raises(ValueError) as error, held(tmp_path):
        pass
    assert str(error.value).startswith(f"{tmp_path} is in use by {holder}")
    first.kill()
    first.communicate(timeout=60)
    assert (tmp_path / NAME).read_text().startswith(holder)
    with held(tmp_path):
        assert (tmp_path / NAME).read_text().startswith(f"process {os.getpid()} on host ")


def test_a_process_alone_is_locked_without_its_devices(tmp_path):
    """As `prepare` is, beside a run that has them; here there are none of the platform."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True)


def test_the_lock_is_free_behind_a_run_that_failed(tmp_path):
    with pytest.raises(KeyboardInterrupt), held(tmp_path):
        raise KeyboardInterrupt
    with held(tmp_path), pytest.raises(ValueError, match="is in use"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capfd):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path):
        line = f"{tmp_path} cannot be locked (not supported); do not start a second run in it\n"
        assert capfd.readouterr().err == line


def test_the_lock_holds_though_its_file_is_removed_or_damaged(tmp_path):
    with held(tmp_path):
        (tmp_path / NAME).write_bytes(b"\xff\n" * 9)
        with pytest.raises(ValueError, match="is in use by \ufffd"), held(tmp_path):
            pass
        (tmp_path / NAME).unlink()
        with pytest.raises(ValueError, match="is in use by another process"), held(tmp_path):
            pass
    with held(tmp_path):
        pass


def test_a_file_that_is_no_lock_is_not_overwritten(tmp_path):
    lines = '{"stage": "rl", "step": 0}\n' * 100
    (tmp_path / NAME).write_text(lines)
    with pytest.raises(ValueError, match=r"has 2700 bytes and is not the file"), held(tmp_path):
        pass
    assert (tmp_path / NAME).read_text() == lines


def test_a_new_folder_is_whole_and_written_by_one_process(tmp_path):
    out = tmp_path / "in" / "out"
    partial = tmp_path / "in" / "out.partial"
    partial.mkdir(parents=True)
    (partial / "rows").write_text("of a killed command")
    with new_folder(out) as folder:
        assert folder == partial and not (folder / "rows").exists() and not out.exists()
        (folder / "rows").write_text("whole")
        in_use = r"partial is in use by .* or choose another --out"
        with pytest.raises(ValueError, match=in_use), new_folder(out):
            pass
        assert (folder / "rows").read_text() == "whole"
    assert [path.name for path in out.iterdir()] == ["rows"] and not partial.exists()
    with pytest.raises(KeyError), new_folder(tmp_path / "other"):
        raise KeyError
    assert not (tmp_path / "other").exists()
