"""The worker process of `worker_pool`, run as a script: calls a function and replies.

Calls come on standard input and replies go to standard output, in frames with a length prefix. An
`async def` function is awaited for several calls at once. No module of this project is imported
before the first frame has set `sys.path`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

HEADER = struct.Struct("<QQ")  # number of the call, bytes that follow
_MAX_CHARS = 200  # of a wrong result, in a message
_Reply = Callable[[int, dict[str, Any]], None]


def main() -> None:
    """Answers calls until standard input is closed.

    The first frame has settings. The second is a pickled dict with "function", or with "maker",
    which returns the function given the time limit. Either may be "module:function".
    """
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the function prints goes to standard error, and it has no input.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    # Signals that end the run also reach its child processes. A worker exits when the run closes
    # its standard input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lock = threading.Lock()

    def reply(number: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        with lock:
            replies.write(HEADER.pack(number, len(text)) + text)
            replies.flush()

    try:
        settings = json.loads(_read(calls)[1])
        sys.path[:] = settings["path"]
        # Unpickling imports the modules that calls need, outside their time limit.
        loaded = pickle.loads(_read(calls)[1])
        function = loaded.get("function") or loaded["maker"]
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        if "maker" in loaded:
            function = function(settings["timeout"])
    except BaseException:
        reply(0, {"error": traceback.format_exc()})
        return
    reply(0, {})
    if is_async(function):
        asyncio.run(_serve_async(function, settings["timeout"], calls, reply))
    else:
        _serve(function, calls, reply)


def is_async(function: Callable) -> bool:
    """Whether a function, or the `__call__` of an object, is an `async def`."""
    call = getattr(function, "__call__", None)  # noqa: B004  # the method, not whether there is one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _serve(function: Callable, calls: BinaryIO, reply: _Reply) -> None:
    """Runs one call at a time, in the main thread, where functions may set signal handlers."""
    waiting: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    _read_ahead(calls, lambda *call: waiting.put(call))
    while True:
        number, call = waiting.get()
        try:
            content = _plain(function(*pickle.loads(call)))
        except BaseException as error:
            content = _failure(error)
        reply(number, content)


async def _serve_async(function: Callable, timeout: float, calls: BinaryIO, reply: _Reply) -> None:
    """Runs calls concurrently, each with its own time limit."""
    loop, tasks = asyncio.get_running_loop(), set()

    async def answer(number: int, call: bytes) -> None:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                content = _plain(await function(*pickle.loads(call)))
        except BaseException as error:
            content = {"timeout": True} if limit.expired() else _failure(error)
        reply(number, content)

    def start(number: int, call: bytes) -> None:
        task = loop.create_task(answer(number, call))
        tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(tasks.discard)

    _read_ahead(calls, lambda *call: loop.call_soon_threadsafe(start, *call))
    await loop.create_future()


def _read_ahead(calls: BinaryIO, deliver: Callable[[int, bytes], object]) -> None:
    """Delivers calls from a thread, which ends the process when standard input is closed.

    A worker whose function hangs therefore also ends with the run.
    """

    def read() -> None:
        try:
            while True:
                deliver(*_read(calls))
        except BaseException:
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()


def _read(calls: BinaryIO) -> tuple[int, bytes]:
    header = calls.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    number, size = HEADER.unpack(header)
    return number, calls.read(size)


def _plain(result: Any) -> dict[str, Any]:
    """The result in JSON types: `text`, or `rows` of components; and its `repr` for messages."""
    content: dict[str, Any] = {"result": repr(result)[:_MAX_CHARS]}
    if isinstance(result, str):
        content["text"] = result
    elif isinstance(result, list | tuple):
        content["rows"] = [
            {str(name): _number(value) for name, value in row.items()}
            if isinstance(row, Mapping)
            else repr(row)[:_MAX_CHARS]
            for row in result
        ]
    return content


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)[:_MAX_CHARS]


def _failure(error: BaseException) -> dict[str, str]:
    """The traceback, without the frame of this module that called the function."""
    frames = error.__traceback__
    frames = frames and (frames.tb_next or frames)
    text = "".join(traceback.format_exception(type(error), error, frames))
    return {"error": text, "name": type(error).__name__}


if __name__ == "__main__":
    main()
