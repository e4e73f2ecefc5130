"""Busy time of the devices: from the call of each program until its result is ready."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


class DeviceClock:
    """Sums the seconds in which programs run.

    A separate thread waits for the results, so that the host does not block. Programs run one
    after the other, in the order of the calls.
    """

    def __init__(self) -> None:
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="device-clock")
        self._ready = time.perf_counter()
        self._busy = 0.0

    def watch(self, result: Any) -> None:
        """Registers a program just called, by any output that is not donated to another program."""
        self._waiter.submit(self._wait, result, time.perf_counter())

    def reading(self) -> Future[tuple[float, float]]:
        """When all programs watched so far were done, as of `time.perf_counter`, and their busy
        seconds; does not wait for them."""
        return self._waiter.submit(lambda: (self._ready, self._busy))

    def busy_seconds(self) -> float:
        """Busy seconds of all programs watched so far; waits until they are done."""
        return self.reading().result()[1]

    def _wait(self, result: Any, called: float) -> None:
        jax.block_until_ready(result)
        began, self._ready = max(called, self._ready), time.perf_counter()
        self._busy += self._ready - began
