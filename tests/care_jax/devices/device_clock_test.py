"""What the clock adds up, by programs whose end the test decides."""

import threading
import time

import pytest

from care_jax.devices import device_clock
from care_jax.devices.device_clock import DeviceClock


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, which a test sets; waiting for an event takes until it is set."""
    clock = {"now": 0.0}
    monkeypatch.setattr(device_clock.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(device_clock.jax, "block_until_ready", lambda event: event.wait(10))
    return clock


def settle():
    """Lets the waiting thread see an event."""
    time.sleep(0.05)


def test_idle_seconds_between_programs_do_not_count(now):
    clock, first, second = DeviceClock(), threading.Event(), threading.Event()
    now["now"] = 1.0
    clock.watch(first)
    now["now"] = 3.0
    first.set()
    settle()
    now["now"] = 10.0
    clock.watch(second)
    now["now"] = 14.0
    second.set()
    assert clock.busy_seconds() == 2.0 + 4.0


def test_programs_that_wait_for_each_other_count_once(now):
    """The second was called while the first ran."""
    clock, first, second = DeviceClock(), threading.Event(), threading.Event()
    now["now"] = 1.0
    clock.watch(first)
    clock.watch(second)
    now["now"] = 3.0
    first.set()
    settle()
    now["now"] = 5.0
    second.set()
    assert clock.busy_seconds() == 4.0


def test_a_reading_is_of_the_programs_called_before_it(now):
    clock, first, second = DeviceClock(), threading.Event(), threading.Event()
    now["now"] = 1.0
    clock.watch(first)
    reading = clock.reading()
    clock.watch(second)
    assert not reading.done()
    now["now"] = 3.0
    first.set()
    settle()
    now["now"] = 5.0
    second.set()
    assert reading.result() == (3.0, 2.0)
