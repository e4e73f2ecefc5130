"""The kernels that take the time of a call, from a trace of the first device."""

from __future__ import annotations

import collections
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

NUM_KERNELS = 20  # rows
# Lines of a device's trace that hold its kernels or operations, by the beginning of their names.
_LINES = {"gpu": "Stream", "tpu": "XLA Ops", "cpu": "tf_XLA"}


def trace(function: Callable[[], Any]) -> list[dict[str, Any]]:
    """`by_kernel` of a call of a function that has compiled and that blocks on its results."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            function()
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return by_kernel(planes, jax.local_devices()[0].platform)


def by_kernel(planes: Iterable[Any], platform: str) -> list[dict[str, Any]]:
    """Calls and seconds of kernels of the same name on the first device, most time first.

    `planes` are those of `jax.profiler.ProfileData`. The last row has all other kernels.
    """
    seconds, calls = collections.Counter(), collections.Counter()
    for plane in planes:
        if not plane.name.startswith("/host:CPU" if platform == "cpu" else "/device:"):
            continue
        for line in plane.lines:
            if not line.name.startswith(_LINES[platform]):
                continue
            for event in line.events:
                if event.duration_ns and not event.name.startswith(("end: ", "Threadpool")):
                    seconds[event.name] += event.duration_ns / 1e9
                    calls[event.name] += 1
        if seconds:
            break
    if not seconds:
        raise ValueError(f"the trace has no events of {platform} kernels")
    total, shown = sum(seconds.values()), seconds.most_common(NUM_KERNELS)
    rest = total - sum(each for _, each in shown), sum(calls.values())
    num_rest = rest[1] - sum(calls[name] for name, _ in shown)
    rows = [(name, each, calls[name]) for name, each in shown]
    if num_rest:
        rows.append((f"{len(seconds) - len(shown)} others", rest[0], num_rest))
    return [
        {"kernel": name, "seconds": each, "calls": number, "share": each / total}
        for name, each, number in rows
    ]
