"""Compares answers symbolically, in resource-limited worker processes.

Computer algebra on text from a policy can hang, exhaust memory or crash, so it never runs in the
caller's process. The worker limits its CPU seconds and memory. The pool kills a worker after a
wall-clock limit and starts a new one for the next comparison.
"""

from __future__ import annotations

import collections
import functools
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from care_jax.rewards.equivalence import rounding
from care_jax.rewards.worker_pool import WorkerPool

_MEMORY_BYTES = 2 << 30  # address space of one worker
_SMALL = 1e-3  # math_verify rounds numbers to six decimals
_CACHE_SIZE = 65536  # comparisons whose outcome is cached


class Comparison(NamedTuple):
    """Is `prediction` the same mathematical object as `gold`?

    Attributes:
        gold, prediction: LaTeX or plain mathematics, without `$` or `\\boxed` around it.
        num_decimals: decimals to which numbers are rounded before comparison.
        tolerance: relative error allowed between numbers.
        rounded: a decimal that the prediction gives as its rounded value; "" for none.
    """

    gold: str
    prediction: str
    num_decimals: int
    tolerance: float = 0.0
    rounded: str = ""


def is_equal(outcome: str) -> bool:
    """Whether an outcome of `answers.compare` or of a `SymbolicPool` means equal."""
    return outcome.startswith("equal")


def outcome_of(is_same: bool, what: str) -> str:
    """The outcome of a comparison that a rule for `what` decided."""
    return f"equal: same {what}" if is_same else f"different: another {what}"


class SymbolicPool:
    """Worker processes that make `Comparison`s; started on the first one, ended by `close`.

    Args:
        num_workers: maximum number of processes.
        timeout: wall-clock seconds until a worker is killed; its CPU time limit is 40% of this.

    Attributes:
        counts: numbers since the start: comparisons sent to workers (`symbolic_calls`), answered
            from the cache (`cached`), timed out (`timeouts`), and lost to a crash (`crashes`).
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0):
        if num_workers < 1 or timeout <= 0:
            raise ValueError(
                "verifier.num_workers must be at least 1 and verifier.timeout above 0, got "
                f"{num_workers} and {timeout}"
            )
        self.counts = {"symbolic_calls": 0, "cached": 0, "timeouts": 0, "crashes": 0}
        names = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME")
        given = {name: os.environ[name] for name in names if name in os.environ}
        self._pool = WorkerPool(
            pickle.dumps({"maker": f"{__name__}:start"}),
            num_workers=num_workers,
            timeout=timeout,
            environment=given | {"SYMPY_GROUND_TYPES": "python", "PYTHONIOENCODING": "utf-8"},
            what="math_verify",
            advice="install it",
        )
        self._outcomes: collections.OrderedDict[Comparison, str] = collections.OrderedDict()
        self._late: set[Comparison] = set()
        self._lock = threading.Lock()

    def ask(self, comparisons: Sequence[Comparison], cpu_seconds: float | None = None) -> list[str]:
        """The outcomes: "equal: ...", "different: ...", "refused: ...", "timeout" or "crash".

        Args:
            comparisons: any number of them; equal ones are answered once.
            cpu_seconds: a lower time limit for each, of which the outcome "timeout" is not cached.

        Raises:
            ValueError: a worker could not start, first or again (math_verify missing, no memory).
        """
        with self._lock:
            pending = [each for each in dict.fromkeys(comparisons) if each not in self._outcomes]
            self.counts["cached"] += len(comparisons) - len(pending)
            self.counts["symbolic_calls"] += len(pending)
            replies = [self._pool.submit(*comparison, cpu_seconds) for comparison in pending]
            fresh = {}
            for comparison, reply in zip(pending, replies, strict=True):
                found = reply.result()
                if "error" in found:
                    raise ValueError(found["error"])
                fresh[comparison] = found["text"] if "text" in found else next(iter(found))
                self.counts["timeouts"] += fresh[comparison] == "timeout"
                self.counts["crashes"] += fresh[comparison] == "crash"
                # A busy machine may be behind a crash, or behind a timeout that the worker, which
                # has a limit of CPU time, did not report. A second such timeout is believed.
                is_late = "timeout" in found
                is_known = "text" in found and not (cpu_seconds and found["text"] == "timeout")
                if is_known or (is_late and comparison in self._late):
                    self._outcomes[comparison] = fresh[comparison]
                elif is_late:
                    self._late.add(comparison)
            known = [fresh.get(each) or self._outcomes[each] for each in comparisons]
            while len(self._outcomes) > _CACHE_SIZE:
                self._outcomes.popitem(last=False)
            return known

    def close(self) -> None:
        """Ends the workers. A later `ask` starts new ones."""
        self._pool.close()


class _CpuTimeout(BaseException):
    """Raised by the CPU timer; a BaseException, so no `except Exception` in sympy catches it."""


def _compare(comparison: Comparison) -> str:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math_verify's removal of units mistakes the last factor of `a b^2 c` for one.
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
        for text in comparison[:2]
    )
    if not gold or not prediction:
        return "different: not readable as mathematics"
    is_equal = verify(
        gold, prediction, float_rounding=comparison.num_decimals, timeout_seconds=None
    ) or _is_close(gold[0], prediction[0], comparison.num_decimals, comparison.tolerance)
    if comparison.rounded and not _is_rounded(prediction[0], comparison.rounded):
        return "different: rounded otherwise"
    return f"{'equal' if is_equal else 'different'}: by computer algebra"


def _is_close(gold: Any, prediction: Any, num_decimals: int, tolerance: float) -> bool:
    """Whether two constants agree within a tolerance, or as complex numbers; tuples part by part.

    math_verify has no tolerance and treats i as a variable.
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


def _is_rounded(value: Any, rounded: str) -> bool:
    """Whether a constant is rounded as given."""
    import sympy

    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return False
    return rounding.is_rounded(complex(sympy.N(value, 20)), rounded)


def _make_exact() -> None:
    """Makes math_verify distinguish M from m, \\gamma from 0.577, and tiny numbers."""
    import math_verify
    from latex2sympy2_extended import latex2sympy, symbols
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    changed: Any = math_verify
    cased = ConversionConfig(lowercase_symbols=False)
    changed.parser.latex2sympy = functools.partial(latex2sympy, conversion_config=cased)
    changed.grader.sympy_compare_symbols = _same_symbol
    for name in ("gamma", "Gamma"):
        del symbols.sympy_singleton_map[name]
    rounded_equal = changed.grader.sympy_numeric_eq

    def equal(gold: Any, prediction: Any, num_decimals: int, *precision: int) -> bool:
        is_equal = rounded_equal(gold, prediction, num_decimals, *precision)
        return is_equal and (num_decimals < 6 or not _differ_in_size(gold, prediction))

    changed.grader.sympy_numeric_eq = equal


def _same_symbol(gold: Any, prediction: Any) -> bool:
    """Whether two symbols have one name; `str` of the number e is E."""
    return gold.is_Symbol == prediction.is_Symbol and str(gold) == str(prediction)


def _differ_in_size(gold: Any, prediction: Any) -> bool:
    """Whether all coefficients are below 10⁻³ and some differ by 0.1% of the largest or more."""

    def largest(value: Any) -> float:
        return max(abs(complex(c)) for c in value.evalf(20).as_coefficients_dict().values())

    try:
        size = max(largest(gold), largest(prediction))
        return size < _SMALL and largest(gold - prediction) > 1e-3 * size
    except (AttributeError, TypeError, ValueError):  # a matrix, or no expression
        return False


def start(timeout: float) -> Callable[..., str]:
    """Sets the limits of this worker process and returns the function that answers comparisons."""
    for stream in (1, 2):  # parsers print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    _make_exact()

    def out_of_time(signum, frame):
        raise _CpuTimeout

    def answer(
        gold: str,
        prediction: str,
        num_decimals: int,
        tolerance: float,
        rounded: str,
        cpu_seconds: float | None = None,
    ) -> str:
        signal.alarm(int(timeout) + 10)  # ends a stuck worker even if the pool has died
        signal.setitimer(signal.ITIMER_PROF, min(cpu_seconds or timeout, 0.4 * timeout))
        try:
            return _compare(Comparison(gold, prediction, num_decimals, tolerance, rounded))
        except _CpuTimeout:
            return "timeout"
        except MemoryError:
            return "refused: memory"
        except RecursionError:
            return "refused: nesting"
        except Exception as error:
            return f"refused: {type(error).__name__}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)

    sys.dont_write_bytecode = True
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, out_of_time)
    return answer
