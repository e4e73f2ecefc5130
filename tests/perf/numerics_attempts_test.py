"""What the attempts at the ends of the numbers call a broken promise."""

import pytest

from perf.faults import numerics

METRICS = '{"stage": "rl", "step": 0, "loss": 0.5}\n'
BROKEN = "ended with rl step 0: bad"


@pytest.mark.parametrize(
    ("promise", "error", "lines", "problem"),
    [
        (numerics.ENDS, None, METRICS, ""),
        (numerics.ENDS, "rl step 0: bad", METRICS, BROKEN),
        (numerics.STOPS, "rl step 0: bad", METRICS, ""),
        (numerics.STOPS, None, METRICS, "ended with no error"),
        (numerics.STOPS, "bad\nTraceback", METRICS, "more than one line"),
        (numerics.REFUSED, "bad", "", ""),
        (numerics.REFUSED, "bad", METRICS, "refused after 1 lines of metrics"),
        (numerics.ENDS, None, '{"loss": NaN}\n', "metrics.jsonl has a number that is not finite"),
        (numerics.ENDS, None, '{"loss": -Infinity}\n', "metrics.jsonl has a number that is not"),
    ],
)
def test_an_end_that_was_not_promised_is_told(tmp_path, promise, error, lines, problem):
    if lines:
        (tmp_path / "metrics.jsonl").write_text(lines)
    told = numerics._problem(tmp_path, promise, error)
    assert told.startswith(problem) and bool(told) == bool(problem)
