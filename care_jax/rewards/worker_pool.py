"""Functions called in worker processes, with a time limit for each call.

A call that hangs or crashes loses only its own result: its process is killed and the next call
starts another one. If that cannot start, the next call is lost too, but the pool's first start must
succeed. An `async def` function is awaited for several calls at once in each worker; if one of them
ends the process, its unfinished calls are repeated one at a time.

Workers run `worker.py` as a script: no fork under JAX, and no import of the caller's main module. A
thread with an event loop communicates with them, so `submit` does not block. This module imports
only the standard library, since the workers of `symbolic` import it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from care_jax.rewards import worker

# The result as in `worker`, or "error" and "name" (also if the process could not start again),
# "timeout" or "crash".
Reply = dict[str, Any]

_START_SECONDS = 120.0  # to import the function's module on a busy machine, at least
_START_TIMEOUTS = 10  # times the limit of a call, at least, since the import may load a model
# The worker cancels an awaited call at the limit; the pool kills the worker only this much later.
_GRACE_SECONDS = 2.0


class WorkerPool:
    """Worker processes that call a function; started when needed, ended by `close`.

    Args:
        function: the pickled function or its "module:function", see `worker.main`.
        num_workers: maximum number of processes.
        timeout: seconds until a call is given up.
        concurrency: calls that each worker awaits at once, for an `async def` function; else 0.
        what, advice: what the workers import, and what to do if that fails, for messages.
    """

    def __init__(
        self,
        function: bytes,
        *,
        num_workers: int,
        timeout: float,
        concurrency: int = 0,
        environment: Mapping[str, str],
        what: str,
        advice: str,
    ):
        path = [os.path.abspath(entry) for entry in sys.path]  # "" is the current folder
        settings = {"path": path, "timeout": timeout, "memory": memory() // 2}  # half for the run
        self.boot = json.dumps(settings).encode(), function
        self.limit = timeout + (_GRACE_SECONDS if concurrency else 0.0)  # of a reply
        self.start_limit = max(_START_SECONDS, _START_TIMEOUTS * timeout)
        self.has_started = False  # a process, ever
        self.late_start: tuple[float, Reply] = (0.0, {})  # when a process was last too late
        self.environment, self.what, self.advice = environment, what, advice
        self._num_workers, self._concurrency = num_workers, max(concurrency, 1)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._is_started = threading.Event()
        self._lock = threading.Lock()

    def submit(self, *arguments: Any) -> concurrent.futures.Future[Reply]:
        """Calls the function, from any thread; does not wait for the reply."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=lambda: asyncio.run(self._main()), name="workers", daemon=True
                )
                self._thread.start()
                self._is_started.wait()
        return asyncio.run_coroutine_threadsafe(self._call(pickle.dumps(arguments)), self._loop)

    def close(self) -> None:
        """Ends the workers. A later `submit` starts new ones."""
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._is_ended.set)
        self._thread.join()
        self._thread = None
        self._is_started.clear()

    async def _main(self) -> None:
        self._loop, self._is_ended = asyncio.get_running_loop(), asyncio.Event()
        self.workers = [_Worker(self) for _ in range(self._num_workers)]
        # Repeats, one at a time, calls whose worker ended while it had several.
        self._single, self._single_lock = _Worker(self), asyncio.Lock()
        # Last in, first out: few calls start few processes.
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for each in self.workers * self._concurrency:
            self._free.put_nowait(each)
        self._is_started.set()
        await self._is_ended.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in (*self.workers, self._single):
            await each.stop()

    async def _call(self, call: bytes) -> Reply:
        submitted = time.monotonic()
        free = await self._free.get()
        try:
            return await free.ask(call, submitted)
        except _Ended as ended:
            reply = ended.reply
        finally:
            self._free.put_nowait(free)
        if self._concurrency == 1:
            return reply
        async with self._single_lock:
            try:
                return await self._single.ask(call, submitted)
            except _Ended as ended:
                return ended.reply


class _Ended(Exception):
    """A worker process ended, or was killed, during a call."""

    def __init__(self, reply: Reply):
        self.reply = reply


class _Worker:
    """The pool's handle of one worker process, in the pool's event loop."""

    def __init__(self, pool: WorkerPool):
        self._pool = pool
        self.process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task | None = None
        self._is_alive = False
        self._replies: dict[int, asyncio.Future[Reply | None]] = {}  # of the current process
        self._numbers = itertools.count(1)
        self._start_lock = asyncio.Lock()

    async def ask(self, call: bytes, submitted: float) -> Reply:
        """The reply; _Ended if there is none in time, ValueError if no process ever started."""
        async with self._start_lock:
            if not self._is_alive and (lost := await self._restart(submitted)):
                return lost
        number, replies = next(self._numbers), self._replies
        reply = replies[number] = asyncio.get_running_loop().create_future()
        self._send(number, call)
        try:
            if not await _is_done(reply, self._pool.limit):
                if replies is self._replies:
                    await self.stop()
                raise _Ended({"timeout": True})
            if reply.result() is None:
                raise _Ended({"crash": True})
            return reply.result()
        finally:
            replies.pop(number, None)

    async def stop(self) -> None:
        """Kills the process, if there is one, and those that it started."""
        process, self.process, self._is_alive = self.process, None, False
        if process is not None:
            if process.returncode is None:
                _kill_session(process.pid)
            await process.wait()

    async def _restart(self, submitted: float) -> Reply | None:
        """Starts the process; the reply to the call if it cannot start, but one of the pool did."""
        pool = self._pool
        since, lost = pool.late_start
        if submitted < since:  # a call waits for one late start, not for one after another
            return lost
        began = time.monotonic()
        try:
            await self._start()
        except ValueError as error:
            if not pool.has_started:
                raise
            lost = {"error": str(error), "name": "no worker"}
            if (now := time.monotonic()) - began >= pool.start_limit:
                pool.late_start = now, lost
            return lost
        pool.has_started = True
        return None

    async def _start(self) -> None:
        await self.stop()
        pool = self._pool
        try:
            # -P keeps this folder off the worker's path, which the first frame sets.
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(pathlib.Path(worker.__file__))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=pool.environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(
                f"a worker process for {pool.what} could not start: {error}; free memory, or allow "
                "more processes and files"
            ) from error
        for frame in pool.boot:
            self._send(0, frame)
        assert self.process.stdout is not None
        ready = asyncio.ensure_future(_read(self.process.stdout))
        if not await _is_done(ready, pool.start_limit):
            ready.cancel()
            await self.stop()
            raise ValueError(
                f"a worker process took over {pool.start_limit:g} s while importing {pool.what}; "
                "load less there, serve a model and call it from an async function, or set "
                f"verifier.timeout above {pool.start_limit / _START_TIMEOUTS:g} s, a tenth of it"
            )
        if ready.exception() is not None:
            await self.stop()
            raise ValueError(
                f"a worker process ended while importing {pool.what}; make its module importable "
                "in a separate process"
            )
        if "error" in (answer := ready.result()[1]):
            await self.stop()
            raise ValueError(
                f"{pool.what} cannot be imported in a worker process; {pool.advice}:\n"
                f"{answer['error']}"
            )
        self._replies, self._is_alive = {}, True
        self._reader = asyncio.create_task(self._resolve_replies(self.process, self._replies))

    async def _resolve_replies(
        self,
        process: asyncio.subprocess.Process,
        replies: dict[int, asyncio.Future[Reply | None]],
    ) -> None:
        """Sets the futures of replies, and at the process's end the remaining ones to None."""
        stream = process.stdout
        assert stream is not None
        # A function that writes to all open files may write what is no reply.
        with contextlib.suppress(asyncio.IncompleteReadError, ValueError, RecursionError):
            while True:
                number, reply = await _read(stream)
                if number in replies and not replies[number].done():
                    replies[number].set_result(reply)
        if replies is self._replies:
            self._is_alive = False
            if self.process is process:
                _kill_session(process.pid)
        for future in replies.values():
            if not future.done():
                future.set_result(None)
        while await stream.read(1 << 16):  # the process ends only once its pipe is read
            pass

    def _send(self, number: int, content: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        # Writing to a dead process has no effect; `_resolve_replies` sees its end.
        self.process.stdin.write(worker.HEADER.pack(number, len(content)) + content)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def memory() -> int:
    """Bytes of memory that this process may use, by the machine and the container that it is in."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups of version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((pathlib.Path("/sys/fs/cgroup") / name).read_text("utf-8")))
    return min(limits)


async def _is_done(future: asyncio.Future, seconds: float) -> bool:
    """Whether a future is done within `seconds`."""
    await asyncio.wait({future}, timeout=seconds)
    # When a suspended run resumes, deadlines have passed but replies may be unread.
    await asyncio.wait({future}, timeout=0.05)
    return future.done()


async def _read(stream: asyncio.StreamReader) -> tuple[int, Reply]:
    number, size = worker.HEADER.unpack(await stream.readexactly(worker.HEADER.size))
    if size > worker.MAX_BYTES:
        raise ValueError(f"expected a reply of at most {worker.MAX_BYTES} bytes, got {size}")
    return number, json.loads(await stream.readexactly(size))
