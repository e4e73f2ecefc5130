"""How the command ends: what the system refuses, memory that runs out, Ctrl-C, a lost terminal."""

import errno
import os
import pathlib
import pty
import subprocess
import sys
import time

import jax
import pytest
from scripted import make_step

from care_jax import main

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def ended(run_command, monkeypatch, tmp_path):
    """Status and output of the command, where the run itself raises something."""

    def ended(raised, *flags, workdir=tmp_path):
        def stages(*_, **__):
            raise raised

        monkeypatch.setattr(main, "run_stages", stages)
        monkeypatch.setattr(os, "_exit", sys.exit)
        return run_command("--config=configs/tiny.py", f"--workdir={workdir}", *flags)

    return ended


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/a/config.json.partial"),
            "Permission denied: /a/config.json.partial; make it writable, or choose another "
            "--workdir",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/a/b"),
            "No space left on device: /a/b; free space there, then run the same command to resume",
        ),
        (
            OSError(errno.EFBIG, "File too large"),
            "File too large, while accessing files in WORKDIR; raise the limit (ulimit -f), then "
            "run the same command to resume",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "/a/b"),
            "Too many open files: /a/b; raise the limit (ulimit -n), then run the same command to "
            "resume",
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "/a/b"),
            "File name too long: /a/b; choose a shorter --workdir",
        ),
    ],
)
def test_what_the_system_refuses_is_one_line(ended, tmp_path, error, line):
    assert ended(error) == (1, f"error: {line}\n".replace("WORKDIR", str(tmp_path)))


def test_host_memory_that_runs_out_is_one_line(ended):
    assert ended(MemoryError("Unable to allocate 1 TiB")) == (
        1,
        "error: out of host memory: Unable to allocate 1 TiB; use a host with more, or raise its "
        "limit (ulimit -v), then run the same command to resume\n",
    )


def test_device_memory_that_runs_out_is_one_line(ended):
    error = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 37.54GiB."
    status, line = ended(jax.errors.JaxRuntimeError(f"{error}\nAllocations:\n..."))
    assert status == 1 and line.count("\n") == 1
    assert line.startswith(
        "error: a device has no memory left: Out of memory while trying to allocate 37.54GiB; "
        "`python -m care_jax.aot` says what"
    )
    _, trace = ended(jax.errors.JaxRuntimeError("INTERNAL: not of memory"))
    assert "Traceback" in trace and trace.endswith("INTERNAL: not of memory\n\n")


def test_ctrl_c_says_what_is_lost(ended, tmp_path):
    end = "run the same command to start over\n"
    assert ended(KeyboardInterrupt()) == (130, f"stopped by Ctrl-C; nothing was saved yet; {end}")
    (tmp_path / "checkpoints" / "rl" / "14").mkdir(parents=True)  # unfinished, on a bucket
    for stage, step in (("sft", 400), ("rl", 8), ("rl", 10), ("rl", "12.orbax-checkpoint-tmp")):
        make_step(tmp_path, stage, step)
    lost = (
        "stopped by Ctrl-C; steps after checkpoint rl 10 are lost; run the same command to resume"
    )
    assert ended(KeyboardInterrupt()) == (130, f"{lost}\n")
    _, line = ended(KeyboardInterrupt(), "--dry_run")
    assert line == "stopped by Ctrl-C; nothing was changed\n"
    _, line = ended(KeyboardInterrupt(), "--config.stages=('evaluate',)")
    assert "finished answers are kept" in line


def test_ctrl_c_finds_the_checkpoints_of_a_workdir_in_the_home(ended, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_step(tmp_path / "run", "rl", 10)
    status, line = ended(KeyboardInterrupt(), workdir="~/run")
    assert status == 130 and "steps after checkpoint rl 10 are lost" in line


def test_a_workdir_must_be_named(ended, monkeypatch):
    monkeypatch.setattr(main, "run_stages", None)
    assert ended(None, workdir="") == (
        1,
        "error: --workdir must name a folder, got ''; write --workdir=runs/<name>\n",
    )


def test_the_second_ctrl_c_ends_the_process_at_once():
    """While the main thread waits, as for a save, and while it is deaf to the first."""
    script = """
import os, signal, time
from care_jax.run import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
interrupts.watch()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, lambda *_: None)  # deaf
    os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, passed on by a wrapper
    time.sleep(1)
    print("alive", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 130 and time.monotonic() - began < 30
    assert result.stdout == "alive\n"
    told = "stopping; press Ctrl-C again to exit at once, without waiting for saves\n"
    assert result.stderr == told


def test_a_ctrl_c_that_python_drops_is_raised_again():
    """Within a callback, however late; it is no second one."""
    script = """
import os, signal, sys, time, weakref
from care_jax import main
from care_jax.run import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
sys.unraisablehook, interrupts._SAME = main._unraisable, 0
interrupts.watch()
class Watched:
    pass
watched = Watched()
reference = weakref.ref(watched, lambda _: os.kill(os.getpid(), signal.SIGINT))
try:
    del watched
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("stopped")
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "stopped\n")
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("stopping")


def test_a_lost_terminal_stops_a_run_as_sigterm_does(tmp_path):
    """Printing to it then fails, which must not end the run before it has saved."""
    script = """
import fcntl, pathlib, signal, sys, termios, time
from care_jax.run import interrupts
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its own terminal, whose loss is told by SIGHUP
came = []
signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
interrupts.watch()
print("begun", flush=True)
while not came:
    time.sleep(0.01)
for _ in range(3):
    print("saving", flush=True)
    print("saving", file=sys.stderr, flush=True)
pathlib.Path(sys.argv[1]).write_text("saved")
"""
    master, slave = pty.openpty()

    process = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "saved"],
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    begun = b""
    while not begun.endswith(b"\n"):  # before that it is still writing
        begun += os.read(master, 100)
    os.close(master)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "saved").read_text() == "saved"
