"""A process that may do too little is told so before a library hangs."""

import subprocess
import sys

import pytest

from care_jax.devices import limits

PROGRAM = """
import resource, sys
from care_jax.devices.limits import check_limits
check_limits()
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), -1))
try:
    check_limits()
except ValueError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("gib", "said"),
    [
        (1, "expected 2 GiB of address space beside the libraries, got less (Cannot allocate memo"),
        (64, ""),
    ],
)
def test_an_address_space_that_is_too_small_is_told(gib, said):
    command = [sys.executable, "-c", PROGRAM, str(gib << 30)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stderr.startswith(said) and len(ended.stderr.splitlines()) == bool(said)
    assert ended.returncode == bool(said)


def test_threads_that_cannot_be_started_are_told(monkeypatch):
    """As with ulimit -u, which does not hold for root."""
    started = []

    def start(thread):
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(thread)

    monkeypatch.setattr(limits.threading.Thread, "start", start)
    with pytest.raises(ValueError, match=r"^expected to start \d+ threads, could start 5; rai"):
        limits.check_limits()
