"""Reward functions in worker processes, one call per group, with a time limit for each call.

A function that hangs or crashes costs the group its reward, not the run: its process is killed and
the next call starts another one. An `async def` function is awaited for several groups at once in
each worker; if one of them ends the process, the others are judged again, each alone.

Workers run `reward_worker.py` as a script: no fork under JAX, and no import of the caller's main
module. A thread with an event loop of its own talks to them, so callers submit and go on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import pickle
import struct
import sys
import threading
import zipfile
from collections.abc import Sequence
from typing import Any

import cloudpickle

from care_jax.batch import Example
from care_jax.rewards import reward_worker
from care_jax.rewards.reward_function import RewardFunction

Reply = dict[str, Any]  # "rows" and "result", "error" and "name", "timeout" or "crash"

_START_SECONDS = 120.0  # importing the function's module on a busy machine
# An async function is stopped by its worker at the limit, and the worker killed only after these.
_GRACE_SECONDS = 2.0
_HEADER = struct.Struct("<QQ")  # as in reward_worker
_WORKER = str(pathlib.Path(reward_worker.__file__))


class RewardPool:
    """Worker processes that call a reward function; started when needed, ended by `close`.

    Args:
        function: the reward function.
        name: "module:function", which workers import; empty: the function itself is sent to them.
        num_workers: maximum number of processes.
        timeout: seconds per group until its call is given up.
        concurrency: groups that each worker awaits at once, for an `async def` function.

    Raises:
        ValueError: the function cannot be sent to another process.
    """

    def __init__(
        self,
        function: RewardFunction,
        name: str = "",
        *,
        num_workers: int,
        timeout: float,
        concurrency: int,
    ):
        is_async = reward_worker.is_async(function)
        path = [os.path.abspath(entry) for entry in sys.path]  # "" is the current folder
        settings = json.dumps({"path": path, "timeout": timeout}).encode()
        self._boot = settings, packed(function, name)
        self._limit = timeout + (_GRACE_SECONDS if is_async else 0.0)
        self._num_workers, self._concurrency = num_workers, concurrency if is_async else 1
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._is_started = threading.Event()

    def submit(
        self, question: str, responses: Sequence[str], example: Example
    ) -> concurrent.futures.Future[Reply]:
        """Calls the function on a group; does not wait for the reply."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._main()), name="rewards", daemon=True
            )
            self._thread.start()
            self._is_started.wait()
        call = pickle.dumps((question, list(responses), _portable(example)))
        return asyncio.run_coroutine_threadsafe(self._judge(call), self._loop)

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
        workers = [_Worker(self._boot, self._limit) for _ in range(self._num_workers)]
        # Takes one group at a time: those whose worker ended while it had several.
        self._single, self._single_lock = _Worker(self._boot, self._limit), asyncio.Lock()
        # Last in, first out: few groups start few processes.
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in workers * self._concurrency:
            self._free.put_nowait(worker)
        self._is_started.set()
        await self._is_ended.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in (*workers, self._single):
            await worker.stop()

    async def _judge(self, call: bytes) -> Reply:
        worker = await self._free.get()
        try:
            return await worker.ask(call)
        except _Ended as ended:
            reply = ended.reply
        finally:
            self._free.put_nowait(worker)
        if self._concurrency == 1:
            return reply
        async with self._single_lock:
            try:
                return await self._single.ask(call)
            except _Ended as ended:
                return ended.reply


class _Ended(Exception):
    """A worker process ended, or was killed, during a call."""

    def __init__(self, reply: Reply):
        self.reply = reply


class _Worker:
    """The pool's handle of one worker process, in the pool's event loop."""

    def __init__(self, boot: tuple[bytes, bytes], limit: float):
        self._boot, self._limit = boot, limit
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task | None = None
        self._is_alive = False
        self._replies: dict[int, asyncio.Future[Reply | None]] = {}  # of the living process
        self._numbers = itertools.count(1)
        self._start_lock = asyncio.Lock()

    async def ask(self, call: bytes) -> Reply:
        """The reply to a call.

        Raises:
            _Ended: the process ended, or was killed as there was no reply in time.
            ValueError: the process could not start.
        """
        async with self._start_lock:
            if not self._is_alive:
                await self._start()
        number, replies = next(self._numbers), self._replies
        reply = replies[number] = asyncio.get_running_loop().create_future()
        self._send(number, call)
        try:
            await asyncio.wait({reply}, timeout=self._limit)
            # A run that was suspended resumes past every deadline with unread replies.
            await asyncio.wait({reply}, timeout=0.05)
            if not reply.done():
                if replies is self._replies:
                    await self.stop()
                raise _Ended({"timeout": True})
            if reply.result() is None:
                raise _Ended({"crash": True})
            return reply.result()
        finally:
            replies.pop(number, None)

    async def stop(self) -> None:
        """Kills the process, if there is one."""
        process, self._process, self._is_alive = self._process, None, False
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> None:
        await self.stop()
        # -P keeps this folder off the worker's path until it is told the caller's.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", _WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},  # the accelerators are the run's
        )
        for frame in self._boot:
            self._send(0, frame)
        assert self._process.stdout is not None
        try:
            _, ready = await asyncio.wait_for(_read(self._process.stdout), _START_SECONDS)
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            await self.stop()
            why = "ended" if isinstance(error, EOFError) else f"took {_START_SECONDS:g} s"
            raise ValueError(
                f"a worker process {why} while it imported the reward function; what its module "
                "does when it is imported must work in a process of its own"
            ) from error
        if "error" in ready:
            await self.stop()
            raise ValueError(
                "the reward function cannot be imported in a worker process; correct its module:\n"
                f"{ready['error']}"
            )
        self._replies, self._is_alive = {}, True
        self._reader = asyncio.create_task(self._hand_out(self._process.stdout, self._replies))

    async def _hand_out(
        self, stream: asyncio.StreamReader, replies: dict[int, asyncio.Future[Reply | None]]
    ) -> None:
        """Hands replies to those who wait until the process ends, then None to the rest."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                number, reply = await _read(stream)
                if number in replies and not replies[number].done():
                    replies[number].set_result(reply)
        if replies is self._replies:
            self._is_alive = False
        for future in replies.values():
            if not future.done():
                future.set_result(None)

    def _send(self, number: int, content: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        # To a process that has died this writes nothing; `_hand_out` sees its end.
        self._process.stdin.write(_HEADER.pack(number, len(content)) + content)


async def _read(stream: asyncio.StreamReader) -> tuple[int, Reply]:
    number, size = _HEADER.unpack(await stream.readexactly(_HEADER.size))
    return number, json.loads(await stream.readexactly(size))


def packed(function: RewardFunction, name: str) -> bytes:
    """What a worker unpickles to get the function, and the class of its examples.

    Raises:
        ValueError: a function without a name cannot be pickled.
    """
    try:
        return cloudpickle.dumps({"function": name or function, "example": Example})
    except Exception as error:
        raise ValueError(
            "expected a reward function that can be sent to a worker process, got "
            f"{type(error).__name__}: {error}; open what it holds (a lock, a client, a file) "
            "inside the function, or put it into a module and set verifier.reward to "
            "module:function"
        ) from error


def _portable(example: Example) -> Example:
    """The example with images that can be pickled: a member of an archive becomes its bytes."""
    images = tuple(
        image.read_bytes() if isinstance(image, zipfile.Path) else image for image in example.images
    )
    return dataclasses.replace(example, images=images)
