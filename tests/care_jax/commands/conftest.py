"""Small files in the formats of the releases, and commands that run in this process."""

import sys

import pytest
from absl.testing import flagsaver
from release_files import chartqa_parquet, geometry3k_parquet, write_json, write_parquet

__all__ = ["chartqa_parquet", "geometry3k_parquet", "write_json", "write_parquet"]


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
