"""One run at a time in a workdir: an `flock` on a file that names its process and host.

The folder is locked too, where the file system can, as the file may be removed during a run.

The kernel releases the lock however the process ends. Hosts that share the workdir see each
other's locks on NFS and cluster file systems, but not in a mounted bucket.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

import jax

from care_jax.devices import distributed

NAME = "run.lock"
_MOST_BYTES = 1024


@contextlib.contextmanager
def held(workdir: pathlib.Path, *, flag: str = "--workdir") -> Iterator[None]:
    """Holds the lock of a workdir; every process of the run calls this.

    `flag` is the command's that names the folder.

    Raises:
        ValueError: another run holds it; names its process and host.
    """
    with contextlib.ExitStack() as stack:
        refusal = ""
        if distributed.is_alone() or jax.process_index() == 0:
            file = stack.enter_context((workdir / NAME).open("a+", encoding="utf-8"))
            folder = os.open(workdir, os.O_RDONLY)
            stack.callback(os.close, folder)
            refusal = _take(file.fileno(), folder, workdir, flag)
        if refusal := distributed.gather_json(refusal)[0]:
            raise ValueError(refusal)
        yield


@contextlib.contextmanager
def new_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder beside `out` that becomes `out` at the end, so that `out` is whole.

    What a killed command left there is deleted.

    Raises:
        ValueError: another process writes it.
    """
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with held(partial, flag="--out"):
        for path in partial.iterdir():
            if path.name != NAME:
                path.unlink()
        yield partial
        (partial / NAME).unlink()
        partial.rename(out)


def _take(file: int, folder: int, workdir: pathlib.Path, flag: str) -> str:
    """Locks both and writes the holder's name to the file; returns the error if they cannot be had.

    They cannot if another run holds them, or if the file is not that of a lock.
    """
    path = workdir / NAME
    if (size := os.fstat(file).st_size) > _MOST_BYTES:
        return f"{path} has {size} bytes and is not the file of a lock; move it elsewhere"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _lock_folder(folder)
    except BlockingIOError:
        text = path.read_text(encoding="utf-8", errors="replace")
        holder = " ".join(text.split()) or "another process"
        advice = f"wait until it ends, end it, or choose another {flag}"
        return f"{workdir} is in use by {holder}; {advice}"
    except OSError as error:
        line = f"{workdir} cannot be locked ({error.strerror}); do not start a second run in it"
        print(line, file=sys.stderr, flush=True)
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    holder = f"process {os.getpid()} on host {socket.gethostname()} (since {since})\n"
    os.ftruncate(file, 0)
    os.write(file, holder.encode())
    return ""


def _lock_folder(folder: int) -> None:
    """Raises a BlockingIOError if another run has the lock; NFS cannot lock a folder."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return
