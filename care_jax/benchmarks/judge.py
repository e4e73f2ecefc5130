"""A language model judges free answers that the rules call wrong, over the OpenAI API.

Any endpoint that answers `POST <url>/chat/completions` works. A request that fails or times out
is retried with exponential backoff. If every retry fails, the verdict of the rules is kept.
Requests, failures, tokens and their price are counted.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import NamedTuple

_SYSTEM = (
    "You compare a model's answer with the reference answer of a question. Reply with 1 if it says "
    "the same, in whatever form, and with 0 if it does not, says more than one thing, or says "
    "nothing. Reply with that digit alone."
)
_KEY = "JUDGE_API_KEY"  # environment variable; a key never goes into a config
_MAX_CHARS = 4000  # of an answer shown to the judge; the end is kept
_MAX_BYTES = 1 << 20  # of a reply
_FIRST_PAUSE = 1.0  # seconds


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
        counts: requests, retries, timeouts, failures (cases left without a verdict),
            prompt_tokens, completion_tokens.

    Raises:
        ValueError: the url does not start with http:// or https://.
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
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"evaluate.judge_url must start with http:// or https://, got {url!r}; give the "
                "endpoint up to /chat/completions"
            )
        self._url, self._model = f"{url.rstrip('/')}/chat/completions", model
        self._timeout, self._num_retries = timeout, num_retries
        self._num_workers, self._prices = num_workers, prices
        self._lock = threading.Lock()
        names = "requests retries timeouts failures prompt_tokens completion_tokens"
        self.counts: dict[str, int] = dict.fromkeys(names.split(), 0)

    @property
    def cost(self) -> float:
        """Cost of the tokens so far, in the currency of the prices."""
        tokens = self.counts["prompt_tokens"], self.counts["completion_tokens"]
        return sum(n * price for n, price in zip(tokens, self._prices, strict=True)) / 1e6

    def verdicts(self, cases: Sequence[Case]) -> list[bool | None]:
        """Whether each answer is correct; None if the judge gave no verdict."""
        with concurrent.futures.ThreadPoolExecutor(self._num_workers) as pool:
            return list(pool.map(self._verdict, cases))

    def _verdict(self, case: Case) -> bool | None:
        for trial in range(self._num_retries + 1):
            if trial:
                self._count("retries")
                time.sleep(_FIRST_PAUSE * 2 ** (trial - 1))
            self._count("requests")
            try:
                reply = self._post(case)
            except urllib.error.HTTPError as error:
                if error.code in (400, 401, 403, 404):  # the same request would fail again
                    break
                continue
            except (OSError, http.client.HTTPException, ValueError) as error:
                causes = error, getattr(error, "reason", None)
                self._count("timeouts", any(isinstance(each, TimeoutError) for each in causes))
                continue
            if reply in ("0", "1"):
                return reply == "1"
        self._count("failures")
        return None

    def _post(self, case: Case) -> str:
        text = (
            f"Question:\n{case.question}\n\nReference answer:\n{case.gold}\n\n"
            f"Model's answer:\n{case.answer[-_MAX_CHARS:]}"
        )
        body = {
            "model": self._model,
            "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 8,
        }
        headers = {"Content-Type": "application/json"}
        if os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {os.environ[_KEY]}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            reply = json.loads(response.read(_MAX_BYTES))
        try:
            for name in ("prompt_tokens", "completion_tokens"):
                self._count(name, int((reply.get("usage") or {}).get(name) or 0))
            return str(reply["choices"][0]["message"]["content"]).strip().strip(".")
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"no completion in {reply!r}") from error

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number
