"""Ctrl-C: the first stops a run cleanly, the second at once. SIGHUP stops it as SIGTERM does."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time
from typing import NoReturn

from care_jax.run.progress import saved_steps

STATUS = 130  # as shells report it
_SAME = 0.5  # seconds; a second signal within them is the first, forwarded by a wrapper
_is_repeated = threading.Event()  # the next SIGINT is a repetition by `raise_again`


def watch() -> None:
    """Acts on SIGINT and SIGHUP whatever the main thread does.

    The first SIGINT raises KeyboardInterrupt in the main thread, as usual: after the running
    compilation or device step. Saves that have begun are finished. The second ends the process.

    SIGHUP is passed on as SIGTERM, unless it is ignored (nohup). What is printed after it to the
    terminal, where writing now fails, is dropped.
    """
    seen, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    terminals = [file for file in (1, 2) if os.isatty(file)]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: None)  # only signals with a handler are told

    def act() -> None:
        first = 0.0
        while number := os.read(seen, 1):
            if number[0] == signal.SIGHUP:
                for file in terminals:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), file)
                os.kill(os.getpid(), signal.SIGTERM)
            if number[0] != signal.SIGINT:
                continue
            if _is_repeated.is_set():
                _is_repeated.clear()
                continue
            if not first:
                first = time.monotonic()
                line = "stopping; press Ctrl-C again to exit at once, without waiting for saves"
                print(line, file=sys.stderr, flush=True)
            elif time.monotonic() - first > _SAME:
                os._exit(STATUS)

    threading.Thread(target=act, name="signals", daemon=True).start()


def raise_again() -> None:
    """Raises KeyboardInterrupt in the main thread soon, as Python has dropped the last one.

    It does so with an exception in a callback of the garbage collector or of a weak reference.
    """
    main = threading.main_thread().ident
    assert main is not None  # it runs

    def interrupt() -> None:
        _is_repeated.set()
        signal.pthread_kill(main, signal.SIGINT)

    threading.Timer(0.05, interrupt).start()


def exit_run(message: str) -> NoReturn:
    """Ends the process with a line on stderr, without waiting for other processes of the run.

    Nor for the interpreter's teardown, in which threads of libraries may crash.
    """
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(STATUS)


def message(workdir: pathlib.Path, *, trains: bool, is_dry: bool = False) -> str:
    """Says which steps a stopped run has lost."""
    if is_dry:
        return "stopped by Ctrl-C; nothing was changed"
    if not trains:
        return "stopped by Ctrl-C; finished answers are kept; run the same command to go on"
    for stage in ("rl", "sft"):
        if steps := saved_steps(workdir, stage):
            return (
                f"stopped by Ctrl-C; steps after checkpoint {stage} {steps[-1]} are lost; run "
                "the same command to resume"
            )
    return "stopped by Ctrl-C; nothing was saved yet; run the same command to start over"
