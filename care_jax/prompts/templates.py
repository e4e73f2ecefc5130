"""Renders chat templates in a process with a limit of time and memory.

The chat template of a release is a program, and untrusted. transformers renders it in Jinja's
sandbox, which keeps it from files and from Python's objects, but not from looping or allocating for
ever. The built-in template is rendered in this process.

The process runs this file as a script. It gets one JSON object per line, the arguments of
transformers' `render_jinja_template`, and answers with one.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

MAX_SECONDS = 5.0  # of CPU time, for one prompt
MAX_BYTES = 2**30  # of memory, besides the libraries
MAX_CHARS = 2**20  # of a prompt
# For templates that write today's date: prompts must not depend on the day of a resume. The day is
# the one that Llama's templates fall back to.
_TODAY = datetime.datetime(2024, 7, 26)


class TemplateError(Exception):
    """The template raised an exception; the message is one line."""


def render(
    template: str, turns: Sequence[dict[str, Any]], *, is_trusted: bool, **names: str
) -> str:
    """The prompt of a conversation, up to the assistant's turn.

    Args:
        template: in Jinja's language.
        turns: `role` and `content` of each.
        is_trusted: renders in this process.
        names: further variables of the template.

    Raises:
        TemplateError: the template raised an exception.
        ValueError: it went beyond a limit.
    """
    request = {"conversations": [turns], "chat_template": template, "add_generation_prompt": True}
    return _render({**request, **names}) if is_trusted else _renderer().ask({**request, **names})


def _render(request: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(date_string=f"{_TODAY:%d %b %Y}", **request)
    return text


class _Renderer:
    """The process, started when it is first asked and after each of its ends."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> str:
        with self._lock:
            process, self._process = self._process or _start(), None
            answer = _answer(process, request)
            if not answer:
                status = process.wait()
                what = f"ended its process with status {status}"
                if status == -signal.SIGPROF:
                    what = f"did not end within {MAX_SECONDS:g} s"
                raise ValueError(
                    f"the chat template must write a prompt, and {what}; use the template of the "
                    "release's authors"
                )
            self._process = process
        reply = json.loads(answer)
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply["text"]


@functools.cache
def _renderer() -> _Renderer:
    return _Renderer()


def _start() -> subprocess.Popen[bytes]:
    # -P keeps this folder off the path, which the first line sets.
    command = [sys.executable, "-P", __file__]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null)
    path = [os.path.abspath(entry) for entry in sys.path]  # "" is the current folder
    if not _answer(process, {"path": path, "seconds": MAX_SECONDS}):
        raise ValueError(
            "expected a process that renders chat templates, and it ended with status "
            f"{process.wait()} while importing transformers; install transformers and jinja2 again"
        )
    return process


def _answer(process: subprocess.Popen[bytes], line: Any) -> bytes:
    """The process's answer to a line; empty if it has ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
    return process.stdout.readline()


def main() -> None:
    """Answers until standard input is closed."""
    # Signals that end the run also reach its child processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    from transformers.utils import chat_template_utils

    # What a template's `strftime_now` reads; a function of our own would reach it as text.
    chat_template_utils.datetime = types.SimpleNamespace(now=lambda: _TODAY)  # type: ignore
    _render({"conversations": [[]], "chat_template": ""})  # imports
    num_pages = int(pathlib.Path("/proc/self/statm").read_text("utf-8").split()[0])
    limit = num_pages * resource.getpagesize() + MAX_BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])  # its signal ends the process
        reply = _reply(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=answers, flush=True)


def _reply(request: dict[str, Any]) -> dict[str, str]:
    try:
        text = _render(request)
    except Exception as error:  # a template can raise anything
        line = " ".join(f"{type(error).__name__} ({error})"[:300].split())
        return {"error": line}
    if len(text) > MAX_CHARS:
        return {"error": f"a prompt of {len(text)} characters, expected {MAX_CHARS} at most"}
    return {"text": text}


if __name__ == "__main__":
    main()
