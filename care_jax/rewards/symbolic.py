"""Compares answers symbolically in resource-limited worker processes: the pool and the worker.

Computer algebra on text from a policy can hang, exhaust memory or crash, so it never runs in the
caller's process. `SymbolicPool` runs this file as a script (`python -P symbolic.py`): no fork under
JAX, no import of the caller's main module, no import but math_verify. Each question and each reply
is one line of JSON. Every question has three limits. The worker limits CPU seconds and memory. The
pool kills a worker after a wall-clock limit and starts a new one for the next question.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

_START_SECONDS = 120.0  # importing sympy on a busy machine
_MEMORY_BYTES = 2 << 30  # address space of one worker
_CACHE_SIZE = 65536  # (gold, prediction) pairs whose outcome is remembered


class Question(NamedTuple):
    """Is `prediction` the same mathematical object as `gold`?

    Attributes:
        gold, prediction: LaTeX or plain mathematics, without `$` or `\\boxed` around it.
        num_decimals: decimals to which numbers are rounded before comparison.
        tolerance: relative error allowed between numbers.
    """

    gold: str
    prediction: str
    num_decimals: int
    tolerance: float = 0.0


class SymbolicPool:
    """Worker processes that answer `Question`s; started on the first question, ended by `close`.

    Args:
        num_workers: maximum number of processes.
        timeout: wall-clock seconds until a worker is killed; its CPU time limit is 40% of this.

    Attributes:
        counts: numbers since the start: questions sent to workers (`symbolic_calls`), answered from
            the cache (`cached`), timed out (`timeouts`), and lost to a crash (`crashes`).
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0):
        if num_workers < 1 or timeout <= 0:
            raise ValueError(
                f"expected num_workers >= 1 and timeout > 0, got {num_workers} and {timeout}"
            )
        self.num_workers = num_workers
        self.timeout = timeout
        self.counts = {"symbolic_calls": 0, "cached": 0, "timeouts": 0, "crashes": 0}
        self._workers: list[_Worker] = []
        self._outcomes: collections.OrderedDict[Question, str] = collections.OrderedDict()
        self._lock = threading.Lock()

    def ask(self, questions: Sequence[Question]) -> list[str]:
        """Answers each question.

        Returns:
            For each question "equal: ...", "different: ..." or "refused: ..." with a short reason,
            or "timeout" or "crash".
        """
        with self._lock:
            pending = [q for q in dict.fromkeys(questions) if q not in self._outcomes]
            self.counts["cached"] += len(questions) - len(pending)
            self.counts["symbolic_calls"] += len(pending)
            fresh = self._run(pending) if pending else {}
            known = [fresh.get(q) or self._outcomes[q] for q in questions]
            # Crashes are not cached: memory pressure on the machine may have caused them.
            self._outcomes.update((q, out) for q, out in fresh.items() if out != "crash")
            while len(self._outcomes) > _CACHE_SIZE:
                self._outcomes.popitem(last=False)
            return known

    def close(self) -> None:
        """Ends the workers. A later `ask` starts new ones."""
        with self._lock:
            for worker in self._workers:
                worker.stop()
            self._workers.clear()

    def _run(self, questions: list[Question]) -> dict[Question, str]:
        while len(self._workers) < min(self.num_workers, len(questions)):
            self._workers.append(_Worker(self.timeout))
        waiting = collections.deque(questions)
        outcomes: dict[Question, str] = {}
        with selectors.DefaultSelector() as selector:
            busy: set[_Worker] = set()
            try:
                while len(outcomes) < len(questions):
                    for worker in self._workers:
                        if waiting and worker not in busy:
                            worker.send(waiting.popleft())
                            selector.register(worker.replies, selectors.EVENT_READ, worker)
                            busy.add(worker)
                    wait = min(worker.deadline for worker in busy) - time.monotonic()
                    # A process that was suspended resumes past every deadline with unread replies,
                    # so poll again: only workers without a reply then are late.
                    events = selector.select(max(wait, 0.0)) or selector.select(0.0)
                    ready = [key.data for key, _ in events]
                    late = [w for w in busy if w not in ready and w.deadline <= time.monotonic()]
                    for worker in ready + late:
                        outcome = worker.receive() if worker in ready else worker.give_up()
                        if outcome is None:
                            continue  # the worker has just started; its reply is to come
                        selector.unregister(worker.replies)
                        busy.remove(worker)
                        outcomes[worker.question] = outcome
                        self.counts["timeouts"] += outcome == "timeout"
                        self.counts["crashes"] += outcome == "crash"
                        if outcome == "crash" or worker in late:
                            worker.stop()
            finally:
                for worker in busy:  # on an interrupt: a late reply would be taken for a later one
                    worker.stop()
        return outcomes


class _Worker:
    """The pool's handle of one worker process."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.deadline = 0.0
        self.question: Question | None = None
        self._process: Any = None  # a subprocess.Popen with pipes
        self._is_ready = False

    @property
    def replies(self):
        return self._process.stdout

    def send(self, question: Question) -> None:
        """Sends a question, starting a process if none is alive."""
        self.question = question
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            self._process = self._start()
        self.deadline = time.monotonic() + (self.timeout if self._is_ready else _START_SECONDS)
        # On a broken pipe `receive` reads end-of-file and reports the crash.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")

    def receive(self) -> str | None:
        """Reads an available reply; None for a new process's "ready" message.

        Raises:
            RuntimeError: the process could not start (math_verify missing, say).
        """
        line = self.replies.readline()
        if not line and not self._is_ready:
            raise RuntimeError("expected a symbolic worker to start, it died; see its memory limit")
        if not line:
            return "crash"
        reply = json.loads(line)
        if self._is_ready:
            return reply
        if reply != "ready":
            raise RuntimeError(f"expected a symbolic worker to start, got {reply}; install it")
        self._is_ready = True
        self.deadline = time.monotonic() + self.timeout
        return None

    def give_up(self) -> str:
        """The outcome of a question whose deadline has passed."""
        if not self._is_ready:
            raise RuntimeError(f"expected a symbolic worker within {_START_SECONDS} s, got none")
        return "timeout"

    def stop(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
        self._process = None
        self._is_ready = False

    def _start(self) -> Any:
        environment = {"SYMPY_GROUND_TYPES": "python", "PYTHONIOENCODING": "utf-8"}
        for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME"):
            if name in os.environ:
                environment[name] = os.environ[name]
        self._is_ready = False
        # -P keeps this folder off the worker's path, so that no module in it can shadow the
        # standard library's.
        return subprocess.Popen(
            [sys.executable, "-P", __file__, str(self.timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )


class _OutOfTime(BaseException):
    """Raised by the CPU timer; a BaseException, so no `except Exception` in sympy catches it."""


def _compare(question: Question) -> str:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Its own removal of units takes the last factor of `a b^2 c` for one.
    plain = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    configs = (
        LatexExtractionConfig(boxed_match_priority=0, normalization_config=plain),
        ExprExtractionConfig(),
    )
    gold, prediction = (
        parse(
            f"\\boxed{{{text}}}",
            configs,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        for text in question[:2]
    )
    if not gold or not prediction:
        return "different: not readable as mathematics"
    is_equal = verify(
        gold,
        prediction,
        float_rounding=question.num_decimals,
        timeout_seconds=None,
    ) or _is_close(gold[0], prediction[0], question.num_decimals, question.tolerance)
    return f"{'equal' if is_equal else 'different'}: by computer algebra"


def _is_close(gold: Any, prediction: Any, num_decimals: int, tolerance: float) -> bool:
    """Whether two constants agree within a tolerance, or as complex numbers; tuples part by part.

    math_verify knows no tolerance and takes i for a variable.
    """
    import sympy

    if isinstance(gold, sympy.Tuple) and isinstance(prediction, sympy.Tuple):
        return len(gold) == len(prediction) and all(
            _is_close(*pair, num_decimals, tolerance) for pair in zip(gold, prediction, strict=True)
        )
    if not isinstance(gold, sympy.Expr) or not isinstance(prediction, sympy.Expr):
        return False
    symbols = gold.free_symbols | prediction.free_symbols
    if any(symbol.name != "i" for symbol in symbols) or not (symbols or tolerance):
        return False
    imaginary = dict.fromkeys(symbols, sympy.I)
    expected, value = (complex(sympy.N(side.subs(imaginary), 20)) for side in (gold, prediction))
    error = abs(value - expected)
    is_rounded = error <= 0.5 * 10.0**-num_decimals and error <= 1e-3 * abs(expected)
    return is_rounded or error <= tolerance * abs(expected)


def _reply(question: Question, cpu_seconds: float) -> str:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return _compare(question)
    except _OutOfTime:
        return "timeout"
    except MemoryError:
        return "refused: memory"
    except RecursionError:
        return "refused: nesting"
    except Exception as error:
        return f"refused: {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _serve(timeout: float) -> None:
    """The worker's main loop: answers questions from standard input until it closes."""

    def out_of_time(signum, frame):
        raise _OutOfTime

    # Parsers print to stdout; only replies may reach the pool.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    # Signals that end the run also reach its child processes. A worker ignores them and exits when
    # the run's end closes its standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        print(json.dumps(str(error)), file=replies)
        return
    sys.dont_write_bytecode = True
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, out_of_time)
    print(json.dumps("ready"), file=replies)
    for line in sys.stdin:
        # If the pool has died, this alarm still ends a stuck worker.
        signal.alarm(int(timeout) + 10)
        outcome = _reply(Question(*json.loads(line)), cpu_seconds=0.4 * timeout)
        signal.alarm(0)
        print(json.dumps(outcome), file=replies)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
