"""A part of a step: its rows with what it compiled and the memory it took, or why it failed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from care_jax.aot.roofline import Work


class Compilations:
    """Counts compiled programs, and the seconds of tracing and compiling; prints the long ones.

    It listens to JAX inside of `with`, and a part of a step is measured there.
    """

    def __init__(self) -> None:
        self.number, self.seconds = 0, 0.0

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._add)

    def _add(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += seconds
            self.number += event.endswith("backend_compile_duration")
            if seconds > 1:
                print(f"{fun_name}: {seconds:.1f} s of {event.rpartition('/')[2]}", flush=True)


class Timed:
    """A jitted function that blocks on its result; `calls` has seconds, None if it compiled."""

    def __init__(self, function: Callable, compilations: Compilations):
        self._function, self._compilations = function, compilations
        self.calls: list[float | None] = []

    def __call__(self, *args):
        number, began = self._compilations.number, time.perf_counter()
        result = jax.block_until_ready(self._function(*args))
        seconds = time.perf_counter() - began
        self.calls.append(seconds if number == self._compilations.number else None)
        return result

    def row(self, part: str, works: Sequence[Work], num_tokens: Sequence[int]) -> dict[str, Any]:
        """Seconds, work and tokens, summed over the calls that did not compile."""
        row = {"part": part, "calls": 0, "seconds": 0, "tokens": 0, "flops": 0, "hbm_bytes": 0}
        for seconds, work, tokens in zip(self.calls, works, num_tokens, strict=True):
            if seconds is not None:
                call = 1, seconds, tokens, work.flops, work.hbm_bytes
                row |= {name: row[name] + x for name, x in zip([*row][1:], call, strict=True)}
        return row


def attempt(
    labels: dict[str, Any],
    measure: Callable[[], Iterable[dict[str, Any]]],
    until: float,
    compilations: Compilations | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of a part with its labels, or one that says why it failed.

    The part is not started after the time `until`. With `compilations`, rows also have the number
    of compiled programs, the seconds that took, and the peak bytes of a device so far.
    """
    if time.time() > until:
        yield {**labels, "failed": "not started: out of time"}
        return
    number, spent = (compilations.number, compilations.seconds) if compilations else (0, 0.0)
    try:
        rows = list(measure())
    except Exception as error:
        traceback.print_exc()
        yield {**labels, "failed": one_line(error)}
        return
    counted: dict[str, Any] = {}
    if compilations:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        counted = {
            "compiled": compilations.number - number,
            "compiled_s": compilations.seconds - spent,
            "peak_bytes": max(each.get("peak_bytes_in_use", 0) for each in stats) or None,
        }
    yield from ({**labels, **row, **counted} for row in rows)


def one_line(error: Exception) -> str:
    """An exception's name and the first line of its message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:250]}"
