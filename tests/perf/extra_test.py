"""Measurements against other programs, where those are not installed."""

import importlib.machinery
import runpy
import sys

import pytest

NO_TORCH = "error: this compares with PyTorch; run: pip install -e '.[perf]'"
NO_TRL = "error: TRL is not installed; run: pip install -e '.[perf]', or add --ours"


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [("decode", "torch", NO_TORCH), ("step", "torch", NO_TORCH), ("step", "trl", NO_TRL)],
)
def test_a_missing_extra_is_a_line(name, missing, message, monkeypatch):
    for module in [each for each in sys.modules if each.startswith("perf.")]:
        monkeypatch.delitem(sys.modules, module)
    find = importlib.machinery.PathFinder.find_spec

    def without(fullname, *given):
        return None if fullname == missing else find(fullname, *given)

    monkeypatch.delitem(sys.modules, missing, raising=False)
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", without)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"perf.{name}", run_name="__main__")
    assert stopped.value.code == message
