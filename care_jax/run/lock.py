"""One run at a time in a workdir: a lock file that names its process and host.

The first process of a run holds an `flock` on the file, which the kernel releases however the
process ends. Some file systems have no flock, or one that other hosts do not see (gcsfuse), so the
holder also rewrites the file every few seconds. Who finds the name of another host in it watches
whether the file changes: if it does, that run is alive; if not, it was killed and the lock is taken
over. A run that ends empties the file.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from care_jax.devices import distributed

NAME = "run.lock"
_BEAT = 15.0  # seconds between two writes
# Seconds without one after which a holder is dead; gcsfuse may show a file as it was 60 s ago.
_PATIENCE = 90.0
_POLL = 2.0  # seconds between two looks at the file
_WAIT = "wait"


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a workdir; every process of the run calls this.

    Raises:
        ValueError: another run holds it; names its process and host.
    """
    lock = _Lock(workdir / NAME) if jax.process_index() == 0 else None
    try:
        while told := distributed.gather_json(lock.attempt() if lock else "")[0]:
            if told != _WAIT:
                raise ValueError(told)
            time.sleep(_POLL)
        yield
    finally:
        if lock:
            lock.release()


class _Lock:
    """The lock file of one process."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._own = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        self._seen: tuple[dict[str, Any], float] | None = None  # a holder elsewhere, since when
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def attempt(self) -> str:
        """Takes the lock if it is free.

        Returns:
            "" if this process now holds it, "wait" if the holder may be dead, else why it is not
            to be had.
        """
        has_flock = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._refusal(self._read_soon())
        except OSError:  # this file system has none
            has_flock = False
        holder = self._read()
        if holder and not self._is_dead(holder, has_flock):
            if self._seen is None:
                self._seen = holder, time.monotonic()
                print(
                    f"{self._path} names {_named(holder)}; looking for up to {_PATIENCE:.0f} s "
                    "whether it is alive",
                    file=sys.stderr,
                    flush=True,
                )
            before, since = self._seen
            if holder != before:
                return self._refusal(holder)
            if time.monotonic() - since < _PATIENCE:
                return _WAIT
        self._write(0)
        self._thread = threading.Thread(target=self._beat, name="workdir lock", daemon=True)
        self._thread.start()
        return ""

    def release(self) -> None:
        """Empties the file, if this process holds the lock, and closes it."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        os.close(self._file)

    def _is_dead(self, holder: dict[str, Any], has_flock: bool) -> bool:
        """Whether a holder that this host ran is no longer there; False for other hosts."""
        if any(holder.get(key) != self._own[key] for key in ("host", "boot")):
            return False
        if has_flock:
            return True  # it would have it
        try:
            os.kill(int(holder["pid"]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(_BEAT):
            count += 1
            with contextlib.suppress(OSError):  # the next one may succeed
                holder = self._read()
                if holder and any(holder[key] != self._own[key] for key in ("pid", "host", "boot")):
                    self._stop(holder)
                    return
                self._write(count)

    def _stop(self, holder: dict[str, Any]) -> None:
        """Two hosts started at the same time, and the other wrote last."""
        print(f"error: {self._refusal(holder)}", file=sys.stderr, flush=True)
        os._exit(1)

    def _refusal(self, holder: dict[str, Any]) -> str:
        return (
            f"{self._path.parent} is in use by {_named(holder)}; wait until it ends, end it, or "
            "choose another --workdir"
        )

    def _write(self, count: int) -> None:
        text = json.dumps(self._own | {"beat": count}).encode() + b"\n"
        # A mounted bucket shows other hosts what was written only once the file is closed.
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # In one write and never shorter than before, so that no reader sees a part of it.
            os.pwrite(file, text.rjust(512), 0)
            os.fsync(file)
        finally:
            os.close(file)

    def _read(self) -> dict[str, Any]:
        """What the file says; {} if it is empty or unreadable."""
        try:
            holder = json.loads(self._path.read_bytes())
            return holder if {"pid", "host"} <= holder.keys() else {}
        except (OSError, ValueError, AttributeError):
            return {}

    def _read_soon(self) -> dict[str, Any]:
        """`_read`, of a holder that may just be about to write."""
        deadline = time.monotonic() + 1
        while not (holder := self._read()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return holder


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder['pid']} on host {holder['host']} (since {holder.get('since')})"


def _boot_id() -> str:
    """Tells hosts of one name apart, and a host from what it was before it was restarted."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
