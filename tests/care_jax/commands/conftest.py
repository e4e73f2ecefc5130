"""Small files in the formats of the releases; commands that run in this process, compiled once."""

import sys

import pytest
from absl.testing import flagsaver
from release_files import chartqa_parquet, geometry3k_parquet, write_json, write_parquet

__all__ = ["chartqa_parquet", "geometry3k_parquet", "write_json", "write_parquet"]


@pytest.fixture
def compile_once(monkeypatch):
    """Makes functions of a module return what their first call did: the programs of one run."""

    def first_of(function):
        made = []

        def first(*args, **kwargs):
            made[:] = made or [function(*args, **kwargs)]
            return made[0]

        return first

    def compile_once(module, *names):
        for name in names:
            monkeypatch.setattr(module, name, first_of(getattr(module, name)))

    return compile_once


@pytest.fixture
def error_of(monkeypatch):
    """Runs a command with flags, and returns the line that it ends with."""

    def error_of(command, *given):
        monkeypatch.setattr(sys, "argv", [command.__name__, *given])
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:  # forgets its flags
            command.run_main()
        assert ended.value.code.startswith("error: ") and "\n" not in ended.value.code
        return ended.value.code

    return error_of
