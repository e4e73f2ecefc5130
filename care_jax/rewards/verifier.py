"""Responses and gold answers to acc and fmt, safely and in batches.

acc is 1 where the content of the one well-formed answer span says the same as the gold answer; it
is read from that span alone, so a right number in the rationale earns nothing. Most answers are
settled at sight in this process; the rest go to worker processes that start at the first such
answer and are killed when they take too long.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence

from care_jax.batch import Example
from care_jax.method import spans
from care_jax.rewards import answers, notation
from care_jax.rewards.symbolic import Question, SymbolicPool

# (prompt, response, example) -> (acc, fmt), each in [0, 1]; the prompt is the example's question.
RewardFunction = Callable[[str, str, Example], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the verifier says of one response.

    Attributes:
        acc: 1.0 where the answer is right, else 0.0.
        fmt: 1.0 for one think span, then one non-empty answer span, then the end; else 0.0.
        reason: what decided, in a few words: "same number", "another option", "other words", "by
            computer algebra", "no answer span", "timeout", "crash", "refused: ...", "reward
            function" and the like.
    """

    acc: float
    fmt: float
    reason: str


class Verifier:
    """Judges responses; a context manager that owns the symbolic worker processes.

    Args:
        num_workers: processes for answers that need symbolic comparison; none is started before
            there is such an answer.
        timeout: seconds until a worker is killed and its answer scores 0.
        think_tag: name of the rationale's tag, "reasoning" for Qwen3-VL.
        tolerance: relative error allowed between numbers, where the example names none.
        num_decimals: decimals to which numbers are rounded before they are compared; None is exact.
        reward: "module:function" that judges in place of all this; empty for none. It runs in this
            process, so what it makes of a hostile response is its own affair.

    Attributes:
        is_replaced: a reward function judges.

    Raises:
        ValueError: num_workers or timeout is not positive, or there is no such function.
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
        self.is_replaced = bool(reward)
        self._reward = load_reward(reward) if reward else None
        self._reward_name = reward
        self.think_tag = think_tag
        self._limits = {"tolerance": tolerance, "num_decimals": num_decimals}
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
        """Since the start: fast_calls, symbolic_calls, cached, timeouts, crashes."""
        return {"fast_calls": self._num_fast, **self._pool.counts}

    def verify(
        self,
        responses: Sequence[str],
        golds: Sequence[str | Example],
        is_complete: Sequence[bool] | None = None,
    ) -> list[Verdict]:
        """Judges each response against its gold answer.

        Args:
            responses: whole response texts, tags included; possibly cut off.
            golds: for each response the gold answer, or the example that has it with its choices.
            is_complete: whether each response ended by itself, which its text cannot show; an
                incomplete one has fmt 0. None takes all as complete.

        Raises:
            ValueError: the arguments differ in length.
        """
        is_complete = [True] * len(responses) if is_complete is None else is_complete
        if not len(responses) == len(golds) == len(is_complete):
            raise ValueError(
                "expected as many golds and is_complete as responses, got "
                f"{len(golds)}, {len(is_complete)} and {len(responses)}; pass one for each"
            )
        if self._reward is not None:
            return [self._judge_by_function(*pair) for pair in zip(responses, golds, strict=True)]
        parsed = [
            parse_text(text, is_complete=bool(ended), think_tag=self.think_tag)
            for text, ended in zip(responses, is_complete, strict=True)
        ]
        outcomes: list[str | Question] = [
            self._compare(span.answer, gold) if span.has_answer else "no answer span"
            for span, gold in zip(parsed, golds, strict=True)
        ]
        questions = [outcome for outcome in outcomes if isinstance(outcome, Question)]
        self._num_fast += len(outcomes) - len(questions)
        replies = iter(self._pool.ask(questions))
        outcomes = [next(replies) if isinstance(out, Question) else out for out in outcomes]
        return [
            Verdict(
                acc=float(answers.is_equal(outcome)),
                fmt=span.fmt,
                reason=outcome.removeprefix("equal: ").removeprefix("different: "),
            )
            for span, outcome in zip(parsed, outcomes, strict=True)
        ]

    def _judge_by_function(self, response: str, gold: str | Example) -> Verdict:
        if isinstance(gold, str):
            gold = Example(id="", source="", images=(), question="", answer=gold)
        result = self._reward(gold.question, response, gold)
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
        limits = self._limits | ({"tolerance": gold.tolerance} if gold.tolerance else {})
        return answers.compare(answer, gold.answer, choices=gold.choices, **limits)


def load_reward(name: str) -> RewardFunction:
    """The function that "module:function" names.

    Raises:
        ValueError: there is none.
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
        raise ValueError(f"verifier.reward {name!r} is no function; name one")
    return found


def parse_text(text: str, *, is_complete: bool = True, think_tag: str = "think") -> spans.Spans:
    """Spans of a response that is given as text; the masks are over that one piece."""
    # `spans.parse` reads bytes of tokens: the text is one token, the end is another.
    pieces = [text.encode("utf-8", errors="replace"), b""]
    tokens = [0, 1] if is_complete else [0]
    return spans.parse(tokens, pieces, eos_token_ids=(1,), think_tag=think_tag)


def extract_answer(response: str, *, think_tag: str = "think") -> str:
    """The answer of a response that may not keep to the format; for evaluation, never for reward.

    The last `<answer>` span, else what the text after the rationale settles on: its last boxes, the
    end of "the answer is", its last formula or number, or all of it. Empty where the rationale is
    not closed.
    """
    _, opening, last = response.rpartition("<answer>")
    if opening and "</answer>" in last:
        return last.partition("</answer>")[0].strip()
    _, closing, after = response.rpartition(f"</{think_tag}>")
    if not closing and f"<{think_tag}>" in response:
        return ""
    return notation.final_answer(after if closing else response)
