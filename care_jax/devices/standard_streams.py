"""Standard output and error that outlive their reader: what cannot be printed is dropped.

A run piped into `head -1`, or started from a terminal that is closed, goes on: its metrics are in
files.
"""

from __future__ import annotations

import io
import logging as python_logging
import os
import sys
from typing import Any

from absl import logging


class _Dropping(io.FileIO):
    """A stream that becomes os.devnull once it cannot be written, for whatever reason."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() != 2:
                line = f"standard output cannot be written ({error.strerror}); going on without it"
                print(line, file=sys.stderr)
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Makes standard output and error streams that never fail; a program calls it first.

    A stream that the process was started without becomes os.devnull. Otherwise the next file that
    is opened would get its number, and what libraries print would be written into that file.
    Characters that the locale cannot encode are escaped. Loggers' handlers, which libraries make
    when they are imported, write to the new streams.
    """
    handlers = *python_logging.root.handlers, logging.get_absl_handler().python_handler
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        known = getattr(sys, name)
        if known is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free one
        if name != "stdin":
            stream = io.TextIOWrapper(
                io.BufferedWriter(_Dropping(number, "w", closefd=False)),
                encoding=getattr(known, "encoding", None),
                errors="backslashreplace",
                line_buffering=True,
            )
            setattr(sys, name, stream)
            for handler in handlers:
                if isinstance(handler, python_logging.StreamHandler) and handler.stream is known:
                    handler.setStream(stream)
