"""A language model judges free answers that the rules call wrong, over the OpenAI API.

Any endpoint that answers `POST <url>/chat/completions` works; redirects are not followed. A request
that fails or times out is retried with exponential backoff. If every retry fails, the case has no
verdict; after many such cases in a row the endpoint is not asked any more. Requests, failures,
tokens and their price are counted. A judge may think before its verdict. One that refuses
`max_tokens` or the temperature, as GPT-5 does, is asked without them.

Worker processes send the requests and are killed at the time limit, because a socket's own limit is
for each read, and an endpoint may send one byte at a time.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import pickle
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import NamedTuple

from care_jax.rewards.worker_pool import WorkerPool

_SYSTEM = (
    "You compare a model's answer with the reference answer of a question. Reply with 1 if it says "
    "the same, in whatever form, and with 0 if it does not, says more than one thing, or says "
    "nothing. Reply with that digit alone."
)
_KEY = "JUDGE_API_KEY"  # environment variable; a key never goes into a config
_MAX_CHARS = 4000  # of an answer shown to the judge; the end is kept
_MAX_BYTES = 1 << 20  # of a reply
_MAX_SHOWN = 300  # characters of a reply in a message
_MAX_REPLY = 2048  # tokens, with what a judge thinks before its digit
_SETTINGS = {"temperature": 0, "max_tokens": _MAX_REPLY}
_NEWER_SETTINGS = {"max_completion_tokens": _MAX_REPLY}
_MAX_TOKENS = 1 << 30  # counted for one reply
_MAX_LOST = 16  # cases in a row without a verdict
_FIRST_PAUSE = 1.0  # seconds
# With these statuses the same request would fail again.
_FINAL = frozenset(map(str, (*range(300, 400), 400, 401, 403, 404, 405, 422)))


class Case(NamedTuple):
    """One answer to judge."""

    question: str
    gold: str
    answer: str


class Judge:
    """Sends cases to an endpoint, several at a time.

    Args:
        url: without `/chat/completions`, such as http://localhost:8000/v1.
        model: its name at the endpoint.
        timeout: seconds for one request.
        num_retries: retries after a failed request.
        num_workers: concurrent requests.
        prices: of a million prompt tokens and of a million completion tokens.

    Attributes:
        name: the model and the url; verdicts of another name are those of another judge.
        counts: requests, retries, timeouts, failures (cases left without a verdict),
            prompt_tokens, completion_tokens.
        problem: of the last request that failed; empty if none did.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        timeout: float = 60.0,
        num_retries: int = 3,
        num_workers: int = 8,
        prices: tuple[float, float] = (0.0, 0.0),
    ):
        self.name, self.problem = f"{model} at {url}", ""
        self._url, self._model = f"{url.rstrip('/')}/chat/completions", model
        self._timeout, self._num_retries = timeout, num_retries
        self._num_workers, self._prices = num_workers, prices
        self._settings: dict[str, int] = _SETTINGS
        self._num_lost = 0  # cases since the last verdict
        self._lock = threading.Lock()
        self._pool = WorkerPool(
            pickle.dumps({"function": f"{__name__}:post"}),
            num_workers=num_workers,
            timeout=timeout,
            environment=os.environ,
            what="the client of the judge",
            advice="install this package again",
        )
        names = "requests retries timeouts failures prompt_tokens completion_tokens"
        self.counts: dict[str, int] = dict.fromkeys(names.split(), 0)

    @property
    def cost(self) -> float:
        """Cost of the tokens so far, in the currency of the prices."""
        tokens = self.counts["prompt_tokens"], self.counts["completion_tokens"]
        return sum(n * price for n, price in zip(tokens, self._prices, strict=True)) / 1e6

    def verdicts(self, cases: Sequence[Case]) -> list[bool | None]:
        """Whether each answer is correct; None if the judge gave no verdict."""
        try:
            with concurrent.futures.ThreadPoolExecutor(self._num_workers) as threads:
                return list(threads.map(self._verdict, cases))
        finally:
            self._pool.close()

    def _verdict(self, case: Case) -> bool | None:
        for trial in range(self._num_retries + 1):
            if self._num_lost >= _MAX_LOST:
                break
            if trial:
                self._count("retries")
                time.sleep(_FIRST_PAUSE * 2 ** (trial - 1))
            status, text = self._ask(case)
            if status == "200":
                word, num_tokens = _read(text)
                for name, number in num_tokens.items():
                    self._count(name, number)
                if word in ("0", "1"):
                    self._num_lost = 0
                    return word == "1"
                text = f"neither 0 nor 1 but {word or text!r}"
            self._count("timeouts", status == "timeout")
            self.problem = f"{status} {text}".strip()[:_MAX_SHOWN]
            if status in _FINAL:
                break
        self._num_lost += 1
        self._count("failures")
        return None

    def _ask(self, case: Case) -> tuple[str, str]:
        """The status of a request, and the reply or what came in its place."""
        for settings in (self._settings, _NEWER_SETTINGS):
            self._count("requests")
            request = self._pool.submit(self._url, self._body(case, settings), self._timeout)
            reply = request.result()
            status, _, text = reply.get("text", next(iter(reply))).partition(" ")
            is_refused = status == "400" and any(name in text for name in _SETTINGS)
            if settings is _NEWER_SETTINGS or not is_refused:
                break
            self._settings = _NEWER_SETTINGS
        return status, text

    def _body(self, case: Case, settings: dict[str, int]) -> bytes:
        text = (
            f"Question:\n{case.question}\n\nReference answer:\n{case.gold}\n\n"
            f"Model's answer:\n{case.answer[-_MAX_CHARS:]}"
        )
        body = {
            "model": self._model,
            "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}],
            **settings,
        }
        return json.dumps(body).encode()

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host; it is an HTTPError instead."""

    def redirect_request(self, *_) -> None:
        return None


def post(url: str, body: bytes, timeout: float) -> str:
    """Sends a request, in a worker process: "200" and the reply, or what came in its place."""
    headers = {"Content-Type": "application/json"}
    if os.environ.get(_KEY):
        headers["Authorization"] = f"Bearer {os.environ[_KEY]}"
    request = urllib.request.Request(url, body, headers)
    try:
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(request, timeout=timeout) as response:
            return f"200 {response.read(_MAX_BYTES).decode(errors='replace')}"
    except urllib.error.HTTPError as error:
        return " ".join(f"{error.code} {error.reason} {_message(error)}".split())
    except OSError as error:
        is_late = isinstance(getattr(error, "reason", error), TimeoutError)
        return "timeout" if is_late else f"{type(error).__name__} {error}"


def _message(error: urllib.error.HTTPError) -> str:
    """What the body of an error says, without the key; empty if that is a page or unreadable."""
    try:
        text = error.read(_MAX_BYTES).decode(errors="replace").strip()
        if text.startswith(("{", "[")):
            reply = json.loads(text)
            reply = reply.get("error", reply)
            text = str(reply.get("message", reply) if isinstance(reply, dict) else reply)
    except (OSError, http.client.HTTPException, ValueError, AttributeError, RecursionError):
        return ""
    text = text.replace(os.environ.get(_KEY) or "\0", "<key>")
    return "" if text.startswith("<!") or "<html" in text[:_MAX_SHOWN] else text[:_MAX_SHOWN]


def _read(text: str) -> tuple[str, dict[str, int]]:
    """What the judge said, empty if that is no completion, and the tokens that it counts."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        return "", {}
    usage = reply.get("usage") if isinstance(reply, dict) else None
    counted = usage if isinstance(usage, dict) else {}
    num_tokens = {
        name: min(number, _MAX_TOKENS)
        for name in ("prompt_tokens", "completion_tokens")
        if isinstance(number := counted.get(name), int) and number > 0
    }
    try:
        word = str(reply["choices"][0]["message"]["content"])
    except (LookupError, TypeError):
        word = ""
    return word.rpartition("</think>")[2].strip().strip("."), num_tokens
