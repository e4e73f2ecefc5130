"""The worker process of `worker_pool`, run as a script: calls a function and replies.

Calls come on standard input and replies go to standard output, in frames with a length prefix. An
`async def` function is awaited for several calls at once. No module of this project is imported
before the first frame has set `sys.path`.

The worker is the leader of a session, so that the processes that a function starts end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import pathlib
import pickle
import queue
import reprlib
import resource
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

HEADER = struct.Struct("<QQ")  # number of the call, bytes that follow
MAX_BYTES = 1 << 24  # of a reply
_MAX_CHARS = 200  # of a wrong result, in a message
_MAX_TRACEBACK = 10_000  # characters; its middle is left out
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
    lock, this_process = threading.Lock(), os.getpid()

    def leave_to_parent() -> None:
        """Closes the pipes in a process that the function forked, or their end would not show."""
        for file in (calls, replies):
            os.dup2(null, file.fileno())

    os.register_at_fork(after_in_child=leave_to_parent)

    def reply(number: int, content: dict[str, Any]) -> None:
        if os.getpid() != this_process:  # the function forked, and both processes returned
            os._exit(0)
        text = json.dumps(content).encode()
        if len(text) > MAX_BYTES:
            problem = f"ValueError: a result of {len(text)} bytes, above {MAX_BYTES}"
            text = json.dumps({"error": problem, "name": "ValueError"}).encode()
        with lock:
            replies.write(HEADER.pack(number, len(text)) + text)
            replies.flush()

    try:
        settings = json.loads(_read(calls)[1])
        sys.path[:] = settings["path"]
        _limit_memory(settings["memory"])
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


def _limit_memory(num_bytes: int) -> None:
    """Makes allocations fail beyond that, and has the system end this process before the run."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if most == resource.RLIM_INFINITY else min(num_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):  # not on Linux
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


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
    """Delivers calls from a thread, which ends the session when standard input is closed.

    A worker whose function hangs therefore also ends with the run.
    """

    def read() -> None:
        try:
            while True:
                deliver(*_read(calls))
        except BaseException:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()


def _read(calls: BinaryIO) -> tuple[int, bytes]:
    header = calls.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    number, size = HEADER.unpack(header)
    return number, calls.read(size)


def _plain(result: Any) -> dict[str, Any]:
    """The result in JSON types: `text`, or `rows` of components; and its `repr` for messages."""
    content: dict[str, Any] = {"result": _shown(result)}
    if isinstance(result, str):
        content["text"] = result
    elif isinstance(result, list | tuple):
        content["rows"] = [
            {str(name): _number(value) for name, value in row.items()}
            if isinstance(row, Mapping)
            else _shown(row)
            for row in result
        ]
    return content


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except Exception:  # of an object's own method, too
        return _shown(value)


def _shown(value: Any) -> str:
    """The `repr` of a value, shortened, also of one whose `repr` fails."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = _MAX_CHARS
    return shortened.repr(value)[:_MAX_CHARS]


def _failure(error: BaseException) -> dict[str, str]:
    """The traceback, without the frame of this module that called the function."""
    name, frames = type(error).__name__[:_MAX_CHARS], error.__traceback__
    frames = frames and (frames.tb_next or frames)
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # of an error that cannot be shown
        text = "".join([*traceback.format_tb(frames), name])
    if len(text) > _MAX_TRACEBACK:
        text = f"{text[: _MAX_TRACEBACK // 2]}\n...\n{text[-_MAX_TRACEBACK // 2 :]}"
    # Lone surrogates cannot be printed.
    return {"error": text.encode("utf-8", "backslashreplace").decode(), "name": name}


if __name__ == "__main__":
    main()
