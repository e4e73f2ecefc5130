"""A program goes on when nobody reads what it prints."""

import os
import pathlib
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Prints more than a pipe holds, as Python and as a library, while a file is open.
PROGRAM = """
import os, sys
from care_jax.devices.standard_streams import outlive_readers
outlive_readers()
with open("metrics.jsonl", "w") as file:
    for step in range(9999):
        print("→ a line", step)
    print("→ a warning", file=sys.stderr)
    for number in (0, 1, 2):
        os.fstat(number)
    os.write(2, b"a library's")
    file.write("whole")
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("redirected", "printed"),
    [
        ("| head -n 1", "→ a line 0\n"),
        ("2>&1 | head -n 1", "→ a line 0\n"),
        ("<&- >&- 2>&-", ""),
        ("2>&- | tail -n 1", "→ a line 9998\n"),
        pytest.param(
            *(">/dev/full", ""),
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full"),
        ),
    ],
)
def test_a_program_outlives_the_reader_of_its_output(tmp_path, redirected, printed):
    ended = run(tmp_path, redirected)
    assert (ended.returncode, ended.stdout) == (75, printed), ended.stderr
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    assert (tmp_path / "metrics.jsonl").read_text() == "whole"


def test_what_the_locale_cannot_encode_is_escaped(tmp_path):
    ended = run(tmp_path, "| head -n 1", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout) == (75, "\\u2192 a line 0\n"), ended.stderr


LOGGING = """
import logging as python_logging
from absl import logging
from care_jax.devices.standard_streams import outlive_readers
python_logging.basicConfig()  # as orbax does when it is imported
outlive_readers()
logging.use_absl_handler()
logging.warning("a warning")
"""


def test_a_warning_is_printed_once(tmp_path):
    ended = run(tmp_path, "", LOGGING)
    assert (ended.returncode, ended.stderr.count("a warning")) == (0, 1), ended.stderr


def run(folder, redirected, program=PROGRAM, **environment):
    """Runs a program in a folder, by a shell that redirects its streams."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    command = f"{shlex.quote(sys.executable)} program.py {redirected}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
