"""User-defined reward functions: their signature, worker processes, and checks of their results.

A reward function judges all responses of a group at once,

    def reward(question: str, responses: list[str], example: Example) -> list[dict[str, float]]

and returns a mapping of named components in [0, 1] for each response. `acc` is required and decides
success; `fmt` replaces the built-in format check. The function may be an `async def`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import inspect
import os
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from care_jax.batch import Example
from care_jax.rewards import worker
from care_jax.rewards.worker_pool import Reply, WorkerPool

Components = dict[str, float]
RewardFunction = Callable[
    [str, list[str], Example],
    Sequence[Mapping[str, float]] | Awaitable[Sequence[Mapping[str, float]]],
]
_FORM = "def reward(question, responses, example), which returns a mapping for each response"


def load_reward(name: str) -> RewardFunction:
    """Imports the function named by "module:function".

    Raises:
        ValueError: there is no such function, or it takes other arguments.
    """
    module, _, function = name.partition(":")
    try:
        if module.startswith("."):  # importlib raises TypeError
            raise ImportError("a relative name has no package here")
        if not function:
            raise ImportError("no function is named")
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        reason = (
            error if isinstance(error, ImportError | AttributeError | ValueError) else repr(error)
        )
        raise ValueError(
            f"expected verifier.reward as module:function on the Python path, got {name!r} "
            f"({reason}); correct it, run in the folder of the module, or set PYTHONPATH"
        ) from error
    check_reward(found, f"verifier.reward {name!r}")
    return found


def check_reward(function: Any, name: str) -> None:
    """Raises ValueError unless it is a function of (question, responses, example)."""
    if not callable(function):
        raise ValueError(f"{name} must be a function, got a {type(function).__name__}; name one")
    try:
        bound = inspect.signature(function).bind("", [], None)
    except TypeError as error:
        raise ValueError(f"{name} must have the form {_FORM}, but: {error}; change it") from error
    except ValueError:  # built-in functions have no signature
        return
    if list(bound.arguments)[1:2] == ["response"]:
        raise ValueError(
            f"{name} takes a single `response`; it must have the form {_FORM}: it gets all "
            "responses of a group at once"
        )


def name_of(function: RewardFunction) -> str:
    """The name of a function for messages; of an object, that of its class."""
    return getattr(function, "__qualname__", type(function).__name__)


class RewardPool:
    """Worker processes that call a reward function, see `WorkerPool`.

    Args:
        reward: "module:function", which workers import; or the function, which is sent to them.
        num_workers: maximum number of processes.
        timeout: seconds per group until its call is given up.
        concurrency: groups that each worker awaits at once, for an `async def` function.

    Raises:
        ValueError: there is no such function, or it cannot be sent to another process.
    """

    def __init__(
        self, reward: str | RewardFunction, num_workers: int, timeout: float, concurrency: int
    ):
        function = load_reward(reward) if isinstance(reward, str) else reward
        check_reward(function, "reward")
        self._pool = WorkerPool(
            pickled(reward),
            num_workers=num_workers,
            timeout=timeout,
            concurrency=concurrency if worker.is_async(function) else 0,
            environment=os.environ | {"JAX_PLATFORMS": "cpu"},  # the run uses the accelerators
            what="the reward function",
            advice="correct its module",
        )
        self.close = self._pool.close

    def submit(
        self, question: str, responses: Sequence[str], example: Example
    ) -> concurrent.futures.Future[Reply]:
        """Calls the function on a group; does not wait for the reply."""
        images = tuple(
            each.read_bytes() if isinstance(each, zipfile.Path) else each for each in example.images
        )
        example = dataclasses.replace(example, images=images)  # archive members as bytes
        return self._pool.submit(question, list(responses), example)


def pickled(reward: str | RewardFunction) -> bytes:
    """The pickled function for `worker.main`; ValueError if it cannot be pickled."""
    try:
        return cloudpickle.dumps({"function": reward, "example": Example})
    except Exception as error:
        raise ValueError(
            "expected a reward function that can be sent to a worker process, got "
            f"{type(error).__name__}: {error}; open what it holds (a lock, a client, a file) "
            "inside the function, or put it into a module and set verifier.reward to "
            "module:function"
        ) from error


def read_reply(
    reply: Mapping[str, Any], num_responses: int, names: Sequence[str], timeout: float
) -> tuple[list[Components | str], str]:
    """(components or kind of failure of each response of a group, message).

    Each response must have the components `names`. The message describes the first problem, "" if
    there is none. `timeout` is in seconds, for the message.
    """
    rows = reply.get("rows")
    if "timeout" in reply:
        kind = "timeout"
        problem = (
            f"took longer than verifier.timeout, {timeout:g} s for a group of {num_responses} "
            "responses; set it higher, or make the function faster"
        )
    elif "crash" in reply:
        kind, problem = "crash", "ended its worker process (os._exit, a signal, memory)"
    elif "error" in reply:
        kind, problem = f"failed: {reply['name']}", f"failed:\n{reply['error'].rstrip()}"
    elif rows is None or len(rows) != num_responses:
        kind = "failed: result"
        problem = (
            f"must return a list of {num_responses} mappings, one for each response of the group, "
            f"got {reply['result']}; correct the function"
        )
    else:
        problems = [_problem(row, names) for row in rows]
        first = next(filter(None, problems), "")
        return [
            "failed: result" if problem else row
            for problem, row in zip(problems, rows, strict=True)
        ], first and f"{first}; correct the function"
    return [kind] * num_responses, problem


def _problem(row: Any, names: Sequence[str]) -> str:
    if not isinstance(row, dict):
        return f"must return a mapping such as {{'acc': 0.5}} for each response, got {row}"
    if missing := [name for name in names if name not in row]:
        return (
            f"must return the components {', '.join(names)} (acc decides success, verifier.weights "
            f"names the others) for each response, got {', '.join(row) or 'none'} without "
            f"{', '.join(missing)}"
        )
    for name, value in row.items():
        if not name.isidentifier():
            return f"must name its components with letters, digits and _, got {name!r}"
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            return f"must return components in [0, 1], got {name} = {value}"
    return ""
