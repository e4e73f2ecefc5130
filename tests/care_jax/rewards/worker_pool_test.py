"""Reward functions in their processes: what they get, and what a lost process costs.

The responses say what the functions do. The functions are sent to the workers, which import nothing
of this file.
"""

import asyncio
import concurrent.futures
import os
import pathlib
import re
import sys
import threading
import time
import zipfile

import pytest
from PIL import Image

from care_jax.batch import Example
from care_jax.rewards import worker, worker_pool
from care_jax.rewards.reward_function import RewardPool

EXAMPLE = Example("0", "made", (), "?", [0, 0, 4, 4], extra={"unit": "cm"})


def do(question, responses, example):
    for text in responses:
        exec(text)
    return [{"acc": 1.0, "pid": os.getpid()}] * len(responses)


async def do_async(question, responses, example):
    await asyncio.sleep(0.1)
    return do(question, responses, example)


@pytest.fixture
def make_pool():
    pools = []

    def make_pool(function=do, num_workers=1, timeout=20.0, concurrency=8):
        pools.append(
            RewardPool(function, num_workers=num_workers, timeout=timeout, concurrency=concurrency)
        )
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.close()


def ask(pool, *groups):
    """The replies to groups of one response, which are all submitted first."""
    futures = [pool.submit("?", [group], EXAMPLE) for group in groups]
    return [future.result(60) for future in futures]


@pytest.mark.parametrize("function", [do, do_async])
def test_a_traceback_begins_with_the_function(make_pool, function):
    (reply,) = ask(make_pool(function), "1 / 0")
    first, place, *_, last = reply["error"].splitlines()
    assert (first, last) == (
        "Traceback (most recent call last):",
        "ZeroDivisionError: division by zero",
    )
    assert place.startswith(f'  File "{__file__}", ') and place.endswith(
        f", in {function.__name__}"
    )


def kind_of(reply):
    """The process that judged, or what came in its place."""
    if "rows" in reply:
        return int(reply["rows"][0]["pid"])
    return reply.get("name") or next(iter(reply))


def test_a_call_has_the_whole_group_and_its_example(make_pool, tmp_path):
    def told(question, responses, example):
        assert question == example.question and example.answer == [0, 0, 4, 4]
        assert example.images[0] == b"file" and example.images[1].size == (2, 3)
        return [{"acc": len(text), "unit": example.extra["unit"] == "cm"} for text in responses]

    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("a.png", b"file")
    images = (zipfile.Path(tmp_path / "images.zip") / "a.png", Image.new("RGB", (2, 3)))
    example = Example("0", "made", images, "Where?", [0, 0, 4, 4], extra={"unit": "cm"})
    reply = make_pool(told).submit("Where?", ["a", "bc"], example).result(60)
    assert reply["rows"] == [{"acc": 1.0, "unit": 1.0}, {"acc": 2.0, "unit": 1.0}]


def test_a_function_is_imported_by_its_name_from_the_path_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "named_rewards.py").write_text(
        "import os\nstarted = os.getpid()\n"
        "def reward(question, responses, example):\n"
        "    print('noise')\n"
        "    is_cpu = os.environ['JAX_PLATFORMS'] == 'cpu'\n"
        "    return [{'acc': started == os.getpid(), 'here': is_cpu}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool = RewardPool("named_rewards:reward", num_workers=1, timeout=20.0, concurrency=1)
    assert pool.submit("?", ["a"], EXAMPLE).result(60)["rows"] == [{"acc": 1.0, "here": 1.0}]
    pool.close()
    assert pool.submit("?", ["a"], EXAMPLE).result(60)["rows"] == [{"acc": 1.0, "here": 1.0}]
    pool.close()


def test_a_module_that_fails_in_the_worker_stops_the_run(tmp_path, monkeypatch):
    (tmp_path / "main_only.py").write_text(
        "import sys\nif 'pytest' not in sys.modules: raise OSError('only in the run')\n"
        "def reward(question, responses, example): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool = RewardPool("main_only:reward", num_workers=1, timeout=20.0, concurrency=1)
    with pytest.raises(ValueError, match=r"cannot be imported in a worker (?s:.*)only in the run"):
        pool.submit("?", ["a"], EXAMPLE).result(60)
    pool.close()


STARTS = """
import os, pathlib, time

starts = pathlib.Path({!r})
starts.write_text(starts.read_text() + "x")
if len(starts.read_text()) > 1:
    {}

def reward(question, responses, example):
    exec(responses[0])
    return [{{"acc": 1.0, "pid": os.getpid()}}]
"""


@pytest.fixture
def make_pool_that_starts_once(make_pool, tmp_path, monkeypatch):
    """A pool whose first process judges a group, and whose next ones fail to start."""

    def make(ending):
        starts = tmp_path / "starts"
        (tmp_path / "starting.py").write_text(STARTS.format(str(starts), ending))
        starts.write_text("")
        pool = make_pool("starting:reward")
        starts.write_text("")  # without the import of this process
        assert isinstance(kind_of(*ask(pool, "pass")), int)
        return pool

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    sys.modules.pop("starting", None)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("raise OSError('no memory')", "cannot be imported in a worker (?s:.*)no memory"),
        ("os._exit(1)", "ended while importing the reward function"),
    ],
)
def test_a_process_that_cannot_start_again_costs_the_group_alone(
    make_pool_that_starts_once, tmp_path, ending, message
):
    pool = make_pool_that_starts_once(ending)
    crash, lost = ask(pool, "os._exit(1)", "pass")
    assert list(map(kind_of, (crash, lost))) == ["crash", "no worker"]
    assert re.search(message, lost["error"])
    (tmp_path / "starts").write_text("")
    assert isinstance(kind_of(*ask(pool, "pass")), int)


def test_the_groups_of_a_step_wait_for_one_late_start(make_pool_that_starts_once, monkeypatch):
    starts, start = [], worker_pool._Worker._start

    async def counted(self):
        starts.append(self)
        await start(self)

    pool = make_pool_that_starts_once("time.sleep(60)")
    pool._pool.start_limit = 1.0
    monkeypatch.setattr(worker_pool._Worker, "_start", counted)
    replies = ask(pool, *["os._exit(1)"] * 4)
    assert list(map(kind_of, replies)) == ["crash", *["no worker"] * 3] and len(starts) == 1
    late = r"took over 1 s while importing .* verifier.timeout above 0.1 s"
    assert re.search(late, replies[-1]["error"])
    ask(pool, "pass")
    assert len(starts) == 2


@pytest.mark.parametrize(("timeout", "limit"), [(5.0, 120.0), (60.0, 600.0)])
def test_a_process_may_import_for_ten_timeouts(make_pool, timeout, limit):
    assert make_pool(timeout=timeout)._pool.start_limit == limit


@pytest.mark.parametrize(
    ("function", "program", "outcome"),
    [
        (do, "raise KeyError('x')", "KeyError"),
        (do, "raise SystemExit", "SystemExit"),
        (do, "os.kill(os.getpid(), 11)", "crash"),
        (do, "time.sleep(60)", "timeout"),
        (do_async, "raise KeyError('x')", "KeyError"),
        (do_async, "os._exit(1)", "crash"),
        (do_async, "time.sleep(60)", "timeout"),
    ],
)
def test_a_lost_group_costs_no_other_its_reward(make_pool, monkeypatch, function, program, outcome):
    """Nor those that were awaited in the process that it ended."""
    monkeypatch.setattr(worker_pool, "_GRACE_SECONDS", 0.2)
    pool = make_pool(function, timeout=1.0)
    (first,) = map(kind_of, ask(pool, "pass"))
    began = time.monotonic()
    lost, *others = map(kind_of, ask(pool, f"import time\n{program}", *["pass"] * 3))
    assert lost == outcome
    assert time.monotonic() - began < 30
    assert all(isinstance(pid, int) for pid in others)
    is_alive = outcome not in ("crash", "timeout")
    assert (others[-1] == first) == is_alive


# Each ends its process, or is killed at its time limit, and leaves nothing behind that the pool
# would wait for.
ENDS = {
    "a child that keeps the pipes": (
        "if not os.fork():\n  time.sleep(60)\n  os._exit(0)\ntime.sleep(60)",
        "timeout",
    ),
    "a child in a session of its own": (
        "if not os.fork():\n  os.setsid()\n  time.sleep(60)\n  os._exit(0)\nos._exit(1)",
        "crash",
    ),
    "a program": ("import subprocess\nsubprocess.run(['sleep', '60'])", "timeout"),
    "its process group": ("os.killpg(0, 9)", "crash"),
    "all files are closed": ("os.closerange(0, 99)", "crash"),
    "what is no reply": (
        "for file in range(3, 20):\n  try: os.write(file, b'\\xff' * 1000)\n  except OSError: pass",
        "crash",
    ),
}


@pytest.mark.parametrize(("program", "outcome"), ENDS.values(), ids=ENDS)
def test_a_call_that_breaks_its_process_is_lost_alone(make_pool, program, outcome):
    pool = make_pool(timeout=1.0)
    (first,) = map(kind_of, ask(pool, "pass"))
    lost, last = map(kind_of, ask(pool, f"import time\n{program}", "pass"))
    assert lost == outcome
    assert isinstance(last, int) and last != first


def test_the_processes_that_a_function_started_end_with_its_own(make_pool, tmp_path):
    program = f"""
import subprocess
child = subprocess.Popen(['sleep', '60'])
open({str(tmp_path / "pid")!r}, 'w').write(str(child.pid))
while True: pass
"""
    assert list(map(kind_of, ask(make_pool(timeout=1.0), program))) == ["timeout"]
    pid = int((tmp_path / "pid").read_text())
    state = pathlib.Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z":  # nobody waits for it
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} goes on")


def test_a_child_that_returns_does_not_answer(make_pool):
    pool = make_pool()
    (first,) = map(kind_of, ask(pool, "pass"))
    assert list(map(kind_of, ask(pool, "os.fork()", "pass", "pass"))) == [first] * 3


def test_memory_is_limited(make_pool, monkeypatch):
    monkeypatch.setattr(worker_pool, "memory", lambda: 4 << 30)
    pool = make_pool()
    kinds = list(map(kind_of, ask(pool, "bytearray(3 << 30)", "pass")))
    assert kinds[0] == "MemoryError" and isinstance(kinds[1], int)
    assert worker_pool.memory() > 0


class Hostile:
    """Whatever is asked of it fails."""

    def __repr__(self):
        raise RuntimeError

    __float__ = __repr__


class HostileError(Exception):
    __str__ = Hostile.__repr__

    @property
    def __notes__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    "value",
    [10**400, Hostile(), 1j, None, [1], "x" * 10**6],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_no_number_is_shown_in_short(value):
    (row,) = worker._plain([{"acc": value, "b": True}])["rows"]
    assert isinstance(row["acc"], str) and len(row["acc"]) <= 200 and row["b"] == 1.0


@pytest.mark.parametrize(
    "error",
    [HostileError(), ValueError("x" * 10**6), KeyError("\ud800"), SystemExit(3)],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_told_in_short_and_can_be_printed(error):
    told = worker._failure(error)
    assert told["name"] == type(error).__name__
    assert len(told["error"]) < 11_000 and told["error"].encode()


def test_a_reply_is_limited(make_pool):
    def too_much(question, responses, example):
        return [{"acc": 1.0, "x" * (20 << 20): 1.0}] if responses[0] else [{"acc": 1.0}]

    pool = make_pool(too_much)
    failed, judged = ask(pool, "a", "")
    assert failed["name"] == "ValueError" and "above 16777216" in failed["error"]
    assert judged["rows"] == [{"acc": 1.0}]


def test_an_async_function_is_awaited_for_many_groups_at_once_up_to_its_bound(make_pool):
    async def count(question, responses, example):
        global num_inside
        num_inside = globals().get("num_inside", 0) + 1
        seen = num_inside
        await asyncio.sleep(0.2)
        num_inside -= 1
        return [{"seen": seen}]

    pool = make_pool(count, concurrency=4)
    seen = [reply["rows"][0]["seen"] for reply in ask(pool, *["pass"] * 12)]
    assert max(seen) == 4


def test_a_slow_await_is_given_up_alone(make_pool):
    async def slow(question, responses, example):
        await asyncio.sleep(float(responses[0]))
        return [{"acc": 1.0, "pid": os.getpid()}]

    pool = make_pool(slow, timeout=1.0)
    kinds = list(map(kind_of, ask(pool, "0", "9", "0.2", "0")))
    assert kinds[1] == "timeout" and kinds[0] == kinds[2] == kinds[3]


def test_groups_are_shared_by_no_more_workers_than_asked_for(make_pool):
    pool = make_pool(num_workers=2)
    pids = set(map(kind_of, ask(pool, *["import time; time.sleep(0.3)"] * 6)))
    assert len(pids) == 2
    pids = set(map(kind_of, ask(pool, "pass"))) | set(map(kind_of, ask(pool, "pass")))
    assert len(pids) == 1  # the last that became free


def test_the_time_of_a_group_does_not_run_while_it_waits_for_a_worker(make_pool):
    pool = make_pool(timeout=1.2)
    pids = set(map(kind_of, ask(pool, *["import time; time.sleep(0.5)"] * 5)))
    assert len(pids) == 1 and "timeout" not in pids


def test_the_end_of_the_run_ends_a_worker_that_hangs(make_pool):
    pool = make_pool()
    (pid,) = map(kind_of, ask(pool, "pass"))
    future = pool.submit("?", ["import time; time.sleep(600)"], EXAMPLE)
    pool.close()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(10)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_function_that_cannot_be_sent_is_refused():
    lock = threading.Lock()

    def locked(question, responses, example):
        with lock:
            return []

    with pytest.raises(ValueError, match=r"can be sent to a worker process, got TypeError: .*lock"):
        RewardPool(locked, num_workers=1, timeout=1.0, concurrency=1)
