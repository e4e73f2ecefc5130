"""Limits of a process with which libraries hang or abort, checked before they are started."""

from __future__ import annotations

import mmap
import os
import threading

_ADDRESSES = 2 << 30  # bytes that the smallest run maps after all imports
_NUM_THREADS = 64 + 2 * (os.cpu_count() or 1)  # of the smallest run, and of a pool per device


def check_limits() -> None:
    """Raises ValueError if the process may not map memory or start threads as a run does."""
    try:
        mmap.mmap(-1, _ADDRESSES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ).close()
    except OSError as error:
        raise ValueError(
            f"expected {_ADDRESSES >> 30} GiB of address space beside the libraries, got less "
            f"({error.strerror}); raise the limit (ulimit -v unlimited)"
        ) from error
    release, threads = threading.Event(), []
    try:
        for _ in range(_NUM_THREADS):
            threads.append(threading.Thread(target=release.wait, daemon=True))
            threads[-1].start()
    except RuntimeError as error:  # can't start new thread
        raise ValueError(
            f"expected to start {_NUM_THREADS} threads, could start {len(threads) - 1}; raise the "
            "limit (ulimit -u, ulimit -v, or pids of the container)"
        ) from error
    finally:
        release.set()
    for thread in threads:
        thread.join()
