"""The worker processes: what they answer, within which limits, and what a lost one costs."""

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.rewards import symbolic, worker_pool
from care_jax.rewards.symbolic import Comparison, SymbolicPool

EQUAL, DIFFERENT = "equal: by computer algebra", "different: by computer algebra"

# Stands in for math_verify: runs the prediction as a program; right is what the gold answer says.
STAND_IN = """
import os, signal, time

class parser:
    pass

class grader:
    sympy_numeric_eq = None

class ExprExtractionConfig:
    pass

class LatexExtractionConfig:
    def __init__(self, **settings):
        pass

def parse(text, *configs, **settings):
    content = text.removeprefix("\\\\boxed{").removesuffix("}")
    return [content] if content else []

def verify(gold, prediction, **settings):
    exec(prediction[0])
    return gold == ["yes"]
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a module in the place of math_verify, for workers that start later."""

    def install(source):
        (tmp_path / "math_verify.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.fixture
def make_pool(install):
    """Makes pools whose workers run their questions as programs."""
    install(STAND_IN)
    pools = []

    def make_pool(num_workers=1, timeout=20.0):
        pools.append(SymbolicPool(num_workers, timeout))
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(make_pool):
    """One worker, which has started."""
    pool = make_pool()
    assert pool.ask([program("pass")]) == [EQUAL]
    return pool


def program(text, gold="yes"):
    return Comparison(gold, text, 6)


def process_of(pool):
    (worker,) = pool._pool.workers
    return worker.process


def is_alive(process):
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_worker(pool, seconds):
    """Sets how long the pool waits for its worker, which has its own limit from its start."""
    pool._pool.limit = seconds


@pytest.fixture(scope="module")
def algebra():
    """A pool of math_verify itself."""
    pool = SymbolicPool(num_workers=1, timeout=20.0)
    yield pool
    pool.close()


@settings(deadline=None, derandomize=True, max_examples=8)
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9))
def test_a_product_equals_its_expansion_and_nothing_beside_it(algebra, a, b, error):
    gold = f"(x + {a})(x + {b})"
    expanded = f"x^2 + {a + b}x + {a * b}"
    questions = [Comparison(gold, expanded, 6), Comparison(gold, f"{expanded} + {error}", 6)]
    assert algebra.ask(questions) == [EQUAL, DIFFERENT]


def test_values_are_compared_at_the_decimals_of_the_question(algebra):
    questions = [Comparison("5\\sqrt{3}", "8.66", decimals) for decimals in (2, 6)]
    assert algebra.ask(questions) == [EQUAL, DIFFERENT]


def test_a_rounded_value_must_be_that_of_the_prediction(algebra):
    texts = ("3.46", "3.5", "3", "3.4", "9", "-3.46")
    questions = [Comparison("2\\sqrt{3}", "\\sqrt{12}", 6, rounded=text) for text in texts]
    other = "different: rounded otherwise"
    assert algebra.ask(questions) == [EQUAL, EQUAL, EQUAL, other, other, other]
    assert algebra.ask([Comparison("x", "x", 6, rounded="3")]) == [other]


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("pass", EQUAL),
        ("", "different: not readable as mathematics"),
        ("print('noise', flush=True)", EQUAL),
        ("raise RecursionError", "refused: nesting"),
        ("raise KeyError", "refused: KeyError"),
        ("bytearray(3 << 30)", "refused: memory"),
        ("os.write(os.open('{file}', os.O_CREAT | os.O_WRONLY), b'x')", "refused: OSError"),
        ("os._exit(1)", "crash"),
        # A library that catches what it can does not catch the end of its time.
        ("try:\n  signal.raise_signal(signal.SIGPROF)\nexcept Exception:\n  pass", "timeout"),
    ],
)
def test_whatever_a_question_does_it_has_an_outcome_and_the_next_one_too(
    make_pool, tmp_path, text, outcome
):
    pool, text = make_pool(), text.replace("{file}", str(tmp_path / "written"))
    assert pool.ask([program(text), program("pass", gold="no")]) == [outcome, DIFFERENT]
    assert not (tmp_path / "written").exists() or not (tmp_path / "written").stat().st_size


def test_a_long_computation_is_stopped_inside_the_worker():
    pool = SymbolicPool(num_workers=1, timeout=2.5)
    pool.ask([Comparison("4", "2 + 2", 6)])
    wait_for_worker(pool, 60.0)
    assert pool.ask([Comparison("7", "(10^9)!", 6)]) == ["timeout"]
    process = process_of(pool)
    assert is_alive(process)  # the worker lives on
    pool.close()
    assert not is_alive(process)


def test_a_lower_limit_of_cpu_time_holds_for_one_call(algebra):
    costly = Comparison("(x + y)^2", "(x + z + y)^{40}", 6)
    assert algebra.ask([Comparison("4", "2 + 2", 6)]) == [EQUAL]
    assert algebra.ask([costly], cpu_seconds=0.01) == ["timeout"]
    assert algebra.ask([costly]) == [DIFFERENT]  # a longer limit may do


def test_replies_keep_the_order_of_the_questions_whoever_is_done_first(make_pool):
    pool = make_pool(num_workers=2)
    slow, wrong, dead = program("time.sleep(0.5)"), program("pass", "no"), program("os._exit(1)")
    asked = [slow, wrong, dead, wrong, slow]
    assert pool.ask(asked) == [EQUAL, DIFFERENT, "crash", DIFFERENT, EQUAL]
    assert pool.counts == {"symbolic_calls": 3, "cached": 2, "timeouts": 0, "crashes": 1}


def test_outcomes_are_remembered_except_crashes(pool):
    right, dead = program("pass"), program("os._exit(1)")
    assert pool.ask([right, dead]) == pool.ask([right, dead]) == [EQUAL, "crash"]
    assert pool.counts == {"symbolic_calls": 3, "cached": 2, "timeouts": 0, "crashes": 2}


def test_a_worker_that_cannot_start_again_gives_no_outcome(pool, monkeypatch):
    """Right answers would be trained on as wrong ones."""

    async def start(self):
        raise ValueError("no memory")

    assert pool.ask([program("os._exit(1)")]) == ["crash"]
    monkeypatch.setattr(worker_pool._Worker, "_start", start)
    with pytest.raises(ValueError, match="no memory"):
        pool.ask([program("pass", gold="no")])


def test_the_oldest_outcomes_are_forgotten(make_pool, monkeypatch):
    monkeypatch.setattr(symbolic, "_CACHE_SIZE", 2)
    pool = make_pool()
    first, *others = [program(f"pass # {number}") for number in range(3)]
    pool.ask([first, *others])
    pool.ask(others)
    assert pool.counts["symbolic_calls"] == 3
    assert pool.ask([first]) == [EQUAL]
    assert pool.counts["symbolic_calls"] == 4


def test_a_stuck_worker_is_killed_at_the_deadline_and_replaced(pool):
    stuck = process_of(pool)
    os.kill(stuck.pid, signal.SIGSTOP)
    wait_for_worker(pool, 0.5)
    question = program("pass # stuck")
    assert pool.ask([question]) == ["timeout"]
    assert not is_alive(stuck)
    wait_for_worker(pool, 20.0)
    assert pool.ask([program("pass # next")]) == [EQUAL]
    assert pool.ask([question]) == [EQUAL]  # tried again
    assert pool.counts["timeouts"] == 1


def test_a_second_timeout_is_believed(pool):
    stuck = program("time.sleep(60)")
    for _ in range(2):
        wait_for_worker(pool, 0.3)
        assert pool.ask([stuck]) == ["timeout"]
        wait_for_worker(pool, 20.0)
        assert pool.ask([program("pass")]) == [EQUAL]
    calls = pool.counts["symbolic_calls"]
    assert pool.ask([stuck]) == ["timeout"] and pool.counts["symbolic_calls"] == calls


def test_a_reply_that_comes_too_late_answers_no_later_question(pool):
    wait_for_worker(pool, 0.3)
    assert pool.ask([program("time.sleep(0.5)")]) == ["timeout"]
    time.sleep(0.4)
    wait_for_worker(pool, 20.0)
    assert pool.ask([program("pass", gold="no")]) == [DIFFERENT]


def test_a_reply_to_an_interrupted_question_answers_no_later_one(pool, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(concurrent.futures.Future, "result", interrupted)
        pool.ask([program("pass # interrupted")])
    assert pool.ask([program("pass", gold="no")]) == [DIFFERENT]


def test_a_dead_worker_costs_one_answer_at_most(pool):
    os.kill(process_of(pool).pid, signal.SIGKILL)
    question = program("pass # again")
    assert pool.ask([question])[0] in ("crash", EQUAL)
    assert pool.ask([question]) == [EQUAL]


def test_a_worker_that_died_between_two_questions_costs_no_answer(pool):
    process = process_of(pool)
    os.kill(process.pid, signal.SIGKILL)
    asyncio.run_coroutine_threadsafe(process.wait(), pool._pool._loop).result()
    assert pool.ask([program("pass # again")]) == [EQUAL]


def test_a_worker_outlives_the_signals_that_end_the_run(pool):
    process = process_of(pool)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(process.pid, number)
        assert pool.ask([program(f"pass # {number}")]) == [EQUAL]
    assert process_of(pool) is process and is_alive(process)


def test_a_run_that_was_suspended_misses_no_reply(pool):
    """The pool's thread goes on only after the deadline, when the reply has come meanwhile."""
    wait_for_worker(pool, 1.0)
    later = threading.Timer(0.3, pool._pool._loop.call_soon_threadsafe, (time.sleep, 1.5))
    later.start()
    assert pool.ask([program("time.sleep(0.6)")]) == [EQUAL]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('no sympy')", "cannot be imported .*; install it(?s:.*)no sympy"),
        ("import os; os._exit(1)", "a worker process ended while importing math_verify; make"),
    ],
)
def test_a_worker_that_cannot_start_says_why(install, source, message):
    install(source)
    pool = SymbolicPool(num_workers=1)
    with pytest.raises(ValueError, match=message):
        pool.ask([program("pass", gold="no")])
    pool.close()


@pytest.mark.parametrize(
    ("settings", "given"), [({"num_workers": 0}, "0 and 5.0"), ({"timeout": 0.0}, "2 and 0.0")]
)
def test_a_pool_without_workers_or_time_is_refused(settings, given):
    with pytest.raises(ValueError, match=f"verifier.timeout above 0, got {given}"):
        SymbolicPool(**settings)


def test_the_main_script_is_not_run_again(tmp_path):
    script = tmp_path / "train.py"  # without a main guard
    script.write_text(
        "print('started')\n"
        "from care_jax.rewards.answers import is_equivalent\n"
        "print(is_equivalent('(r+5)(r+5)', '(r+5)^2'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["started", "True"], done.stderr
