"""How long the devices have something to do, from when work is given to them to when it is done."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax


class DeviceClock:
    """Adds up the seconds in which programs run.

    A thread of its own waits for the results, so that the host may do something else meanwhile and
    the time is right all the same. Programs run one after the other, in the order of the calls.
    """

    def __init__(self) -> None:
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="device-clock")
        self._ready = time.perf_counter()
        self._busy = 0.0

    def watch(self, result: Any) -> None:
        """Takes note of a program that was just called.

        Args:
            result: some of what it gives, that is donated to no other program.
        """
        self._waiter.submit(self._wait, result, time.perf_counter())

    def busy_seconds(self) -> float:
        """Of all programs watched so far, once they are done."""
        return self._waiter.submit(lambda: self._busy).result()

    def _wait(self, result: Any, called: float) -> None:
        jax.block_until_ready(result)
        began, self._ready = max(called, self._ready), time.perf_counter()
        self._busy += self._ready - began
