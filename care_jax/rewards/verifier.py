"""Computes acc and fmt of responses, given gold answers, in batches and with time limits.

acc is 1 if the content of the one well-formed answer span is equivalent to the gold answer. Only
that span is read, so a right number in the rationale earns nothing. Text rules in this process
decide most answers. The rest go to worker processes, which start at the first such answer and are
killed when they take too long.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from care_jax.batch import Example
from care_jax.method import spans
from care_jax.rewards import answers, notation
from care_jax.rewards.symbolic import Question, SymbolicPool

# (prompt, response, example) -> (acc, fmt), each in [0, 1]; the prompt is the example's question.
RewardFunction = Callable[[str, str, Example], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verifier's result for one response.

    Attributes:
        acc: 1.0 if the answer is right, else 0.0; in [0, 1] from a reward function.
        fmt: 1.0 for one think span, then one non-empty answer span, then the end; else 0.0; in
            [0, 1] from a reward function.
        reason: what decided, in a few words: "same number", "another option", "other words", "by
            computer algebra", "no answer span", "timeout", "crash", "refused: ...", "reward
            function" and the like.
    """

    acc: float
    fmt: float
    reason: str


class Verifier:
    """Scores responses; a context manager that owns the symbolic worker processes.

    Args:
        num_workers: processes for symbolic comparison, started at the first answer that needs it.
        timeout: seconds until a worker is killed and its answer gets acc 0.
        think_tag: name of the rationale's tag, "reasoning" for Qwen3-VL.
        tolerance: relative error allowed between numbers, unless the example sets one.
        num_decimals: see `answers.is_equivalent`.
        reward: "module:function", a reward function that replaces this verifier; empty for none. It
            runs in this process without these limits, so it must handle hostile responses itself.

    Raises:
        ValueError: num_workers or timeout is not positive, or the function does not exist.
    """

    def __init__(
        self,
        num_workers: int = 2,
        timeout: float = 5.0,
        *,
        think_tag: str = "think",
        tolerance: float = 0.0,
        num_decimals: int | None = None,
        reward: str = "",
    ):
        self._reward = load_reward(reward) if reward else None
        self._reward_name = reward
        self.think_tag = think_tag
        self._limits: dict[str, Any] = {"tolerance": tolerance, "num_decimals": num_decimals}
        self._pool = SymbolicPool(num_workers, timeout)
        self._num_fast = 0

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    @property
    def counts(self) -> dict[str, int]:
        """Counts since the start: fast_calls, symbolic_calls, cached, timeouts, crashes."""
        return {"fast_calls": self._num_fast, **self._pool.counts}

    def verify(
        self,
        responses: Sequence[str],
        golds: Sequence[str | Example],
        is_complete: Sequence[bool] | None = None,
    ) -> list[Verdict]:
        """Scores each response against its gold answer.

        Args:
            responses: whole response texts, tags included; may be truncated.
            golds: for each response the gold answer, or the example with the answer and choices.
            is_complete: whether each response ended with EOS, which its text cannot show; an
                incomplete one has fmt 0. None means all are complete.

        Raises:
            ValueError: the arguments differ in length.
        """
        is_complete = [True] * len(responses) if is_complete is None else is_complete
        if not len(responses) == len(golds) == len(is_complete):
            raise ValueError(
                "expected as many golds and is_complete as responses, got "
                f"{len(golds)}, {len(is_complete)} and {len(responses)}; pass one for each"
            )
        parsed = [
            parse_text(text, is_complete=bool(ended), think_tag=self.think_tag)
            for text, ended in zip(responses, is_complete, strict=True)
        ]
        return self.verify_parsed(responses, parsed, golds)

    def verify_parsed(
        self,
        responses: Sequence[str],
        parsed: Sequence[spans.Spans],
        golds: Sequence[str | Example],
    ) -> list[Verdict]:
        """As `verify`, for responses whose spans are known.

        A reward function gets the texts and ignores the spans.
        """
        if self._reward is not None:
            return [
                self._judge_by_function(self._reward, *pair)
                for pair in zip(responses, golds, strict=True)
            ]
        outcomes: list[str | Question] = [
            self._compare(span.answer, gold) if span.has_answer else "no answer span"
            for span, gold in zip(parsed, golds, strict=True)
        ]
        questions = [outcome for outcome in outcomes if isinstance(outcome, Question)]
        self._num_fast += len(outcomes) - len(questions)
        replies = iter(self._pool.ask(questions))
        answered = [next(replies) if isinstance(out, Question) else out for out in outcomes]
        return [
            Verdict(
                acc=float(answers.is_equal(outcome)),
                fmt=span.fmt,
                reason=outcome.removeprefix("equal: ").removeprefix("different: "),
            )
            for span, outcome in zip(parsed, answered, strict=True)
        ]

    def _judge_by_function(
        self, reward: RewardFunction, response: str, gold: str | Example
    ) -> Verdict:
        if isinstance(gold, str):
            gold = Example(id="", source="", images=(), question="", answer=gold)
        result = reward(gold.question, response, gold)
        try:
            acc, fmt = map(float, result)
        except (TypeError, ValueError):
            acc = fmt = math.nan
        if not (0 <= acc <= 1 and 0 <= fmt <= 1):
            raise ValueError(
                f"verifier.reward {self._reward_name} must return (acc, fmt) in [0, 1], got "
                f"{result!r} for example {gold.id!r}; correct the function"
            )
        self._num_fast += 1
        return Verdict(acc=acc, fmt=fmt, reason="reward function")

    def _compare(self, answer: str, gold: str | Example) -> str | Question:
        if isinstance(gold, str):
            return answers.compare(answer, gold, **self._limits)
        limits = dict(self._limits)
        if gold.tolerance:
            limits["tolerance"] = gold.tolerance
        return answers.compare(answer, gold.answer, choices=gold.choices, **limits)


def load_reward(name: str) -> RewardFunction:
    """Imports the function named by "module:function".

    Raises:
        ValueError: there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"expected verifier.reward as module:function on the Python path, got {name!r} "
            f"({error}); correct it or set PYTHONPATH"
        ) from error
    if not callable(found):
        raise ValueError(
            f"verifier.reward {name!r} is no function but a {type(found).__name__}; name a function"
        )
    return found  # pyright: ignore[reportReturnType]  # its results are checked at each call


def parse_text(text: str, *, is_complete: bool = True, think_tag: str = "think") -> spans.Spans:
    """Spans of a response given as text; its masks treat the whole text as one token."""
    # `spans.parse` takes tokens: the text is one token, and EOS another.
    pieces = [text.encode("utf-8", errors="replace"), b""]
    tokens = [0, 1] if is_complete else [0]
    return spans.parse(tokens, pieces, eos_token_ids=(1,), think_tag=think_tag)


def extract_answer(response: str, *, think_tag: str = "think") -> str:
    """The answer of a response that may ignore the format; for evaluation, never for reward.

    It is the last `<answer>` span, else the final answer of the text after the rationale: its last
    boxes, "the answer is ...", its last formula or number, or all of it. Empty if the rationale is
    not closed.
    """
    _, opening, last = response.rpartition("<answer>")
    if opening and "</answer>" in last:
        return last.partition("</answer>")[0].strip()
    _, closing, after = response.rpartition(f"</{think_tag}>")
    if not closing and f"<{think_tag}>" in response:
        return ""
    return notation.final_answer(after if closing else response)
