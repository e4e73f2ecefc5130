"""A few examples of every kind of malformed input: one line or a skipped row, and nothing else.

`python -m perf.faults --fuzz=10000` reads as many as are asked for.
"""

import importlib
import pathlib
import time

import fuzz
import pytest
from hypothesis import strategies as st

from care_jax.batch import Unusable

pytestmark = pytest.mark.exhaustive

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_malformed_input_is_one_line_or_a_skipped_row(kind):
    outcomes = fuzz.run(kind, num_examples=50)
    assert outcomes.keys() <= set(fuzz.OUTCOMES) and outcomes.total() >= 40
    assert len(outcomes) > 1, f"the strategy draws nothing but {outcomes}"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\nlines"), "expected an error of one line"),
        (ValueError(""), "expected an error of one line"),
        (ValueError("max() arg is an empty sequence"), "expected an error that names"),
        (KeyError("stages"), "stages"),
    ],
)
def test_what_is_no_outcome_is_a_failure(error, message):
    def read():
        raise error

    with pytest.raises((AssertionError, KeyError), match=message):
        fuzz.outcome_of(read, names=("data.buckets",))


def test_an_outcome_is_told_by_the_error():
    def read(error):
        raise error

    assert fuzz.outcome_of(lambda: None) == fuzz.ACCEPTED
    assert fuzz.outcome_of(lambda: read(Unusable("no answer"))) == fuzz.SKIPPED
    refused = ValueError("data.buckets must hold pairs, got ()")
    assert fuzz.outcome_of(lambda: read(refused), names=("data.buckets",)) == fuzz.REFUSED


def test_a_hang_is_a_failure(monkeypatch):
    monkeypatch.setattr(fuzz, "MAX_SECONDS", 0.1)
    with pytest.raises(AssertionError, match=r"took more than 0\.1 seconds"), fuzz.time_limit():
        time.sleep(5)


def test_the_command_prints_a_row_of_each_kind(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    faults = importlib.import_module("perf.faults.__main__")
    monkeypatch.setattr("sys.argv", ["faults", "--fuzz=3", "--kinds=checkpoint,json"])
    faults.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [["| checkpoint", "3"], ["| json", "3"]]
    kinds = faults.fuzz
    monkeypatch.setitem(kinds.KINDS, "json", kinds.Kind(st.just(1), broken))
    with pytest.raises(SystemExit, match="failed: json"):
        faults.main()


def broken(drawn, folder):
    raise KeyError(drawn)
