"""Computes acc and fmt of responses, given gold answers, in batches and with time limits.

acc is 1 if the content of the one well-formed answer span is equivalent to the gold answer. Only
that span is read, so a right number in the rationale earns nothing. Text rules in this process
decide most answers. The rest go to worker processes, which start at the first such answer and are
killed when they take too long.

A user-defined reward function replaces all this. Its components are graded; acc is 1 if the
component `acc` reaches the success threshold, else 0.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from absl import logging

from care_jax.batch import Example
from care_jax.method import spans
from care_jax.rewards import answers
from care_jax.rewards.equivalence import free_text
from care_jax.rewards.reward_function import RewardFunction, RewardPool, name_of, read_reply
from care_jax.rewards.symbolic import Comparison, SymbolicPool, is_equal
from care_jax.rewards.worker_pool import Reply

# The counts of responses that a reward function did not judge.
FAILURES = ("timeouts", "crashes", "failed")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verifier's result for one response.

    Attributes:
        acc: 1.0 for a success, else 0.0.
        fmt: 1.0 for one think span, then one non-empty answer span, then the end; else 0.0. A
            reward function may return its own, in [0, 1].
        reason: what decided, in a few words: "same number", "another option", "other words", "by
            computer algebra", "no answer span", "timeout", "crash", "refused: ...", "reward
            function", "failed: ..." and the like.
        components: what the reward function returned; empty if it failed, or if there is none.
        quality: weighted sum of the components; None without a reward function.
    """

    acc: float
    fmt: float
    reason: str
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    quality: float | None = None


class Verifier:
    """Scores responses; a context manager that owns the worker processes.

    Args:
        num_workers: maximum number of processes for symbolic comparison or the reward function.
        timeout: seconds until a worker is killed and its answer gets acc 0; per group with a reward
            function.
        think_tag: name of the rationale's tag, "reasoning" for Qwen3-VL.
        reward: a reward function that replaces this verifier, or its name, "module:function";
            empty for none.
        weights: weight of each component in the reward.
        success: a response whose component `acc` is at least this is a success.
        concurrency: groups that a worker awaits at once, for an `async def` function.

    Raises:
        ValueError: num_workers or timeout is not positive, or the function does not exist.
    """

    def __init__(
        self,
        num_workers: int = 2,
        timeout: float = 5.0,
        *,
        think_tag: str = "think",
        reward: str | RewardFunction = "",
        weights: Sequence[tuple[str, float]] = (("acc", 1.0),),
        success: float = 0.5,
        concurrency: int = 1,
    ):
        self.think_tag = think_tag
        self._weights, self._success, self._timeout = dict(weights), success, timeout
        self._pool = SymbolicPool(num_workers, timeout)
        self._judge = ThreadPoolExecutor(1, "verifier")  # one thread, so that the counts are exact
        self._num_fast, self._lost, self._warned = 0, Counter[str](), set[str]()
        self._name = reward if isinstance(reward, str) else name_of(reward)
        self.problem = ""  # the reward function's last failure: its name, then what happened
        self._rewards = RewardPool(reward, num_workers, timeout, concurrency) if reward else None

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()
        if self._rewards is not None:
            self._rewards.close()

    @property
    def has_reward(self) -> bool:
        """Whether a reward function replaces the built-in verifier."""
        return self._rewards is not None

    @property
    def counts(self) -> dict[str, int]:
        """Counts since the start: fast_calls, symbolic_calls, cached, timeouts, crashes.

        All count responses; a timeout or crash of a reward function counts its whole group. With a
        reward function also `failed`: its call raised an exception or returned wrong components.
        """
        lost = FAILURES if self.has_reward else ()
        counts = {"fast_calls": self._num_fast, **self._pool.counts}
        return counts | {name: self._lost[name] for name in lost}

    def verify(
        self,
        responses: Sequence[str],
        golds: Sequence[str | Example],
        is_complete: Sequence[bool] | None = None,
    ) -> list[Verdict]:
        """Scores each response against its gold answer; raises ValueError if lengths differ.

        Args:
            responses: whole response texts, tags included; may be truncated.
            golds: for each response the gold answer, or the example with the answer and choices.
            is_complete: whether each response ended with EOS, which its text cannot show; an
                incomplete one has fmt 0. None means all are complete.
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
        examples = [
            Example(id="", source="", images=(), question="", answer=gold)
            if isinstance(gold, str)
            else gold
            for gold in golds
        ]
        return self.begin(responses, parsed, examples, group_size=1)()

    def begin(
        self,
        responses: Sequence[str],
        parsed: Sequence[spans.Spans],
        examples: Sequence[Example],
        *,
        group_size: int,
    ) -> Callable[[], list[Verdict]]:
        """Starts judging groups of `group_size` responses; returns a function that waits.

        A reward function is called once per group, in the worker processes. Without one the
        responses, which are whole texts, are judged in a thread, which waits for the workers.
        """
        if self._rewards is None:
            return self._judge.submit(self.verify_parsed, responses, parsed, examples).result
        pending = []
        for start in range(0, len(responses), group_size):
            group, example = slice(start, start + group_size), examples[start]
            reply = self._rewards.submit(example.question, responses[group], example)
            pending.append((parsed[group], reply))
        return lambda: [
            verdict for group, reply in pending for verdict in self._read(group, reply.result())
        ]

    def verify_parsed(
        self, responses: Sequence[str], parsed: Sequence[spans.Spans], examples: Sequence[Example]
    ) -> list[Verdict]:
        """The built-in verdicts of parsed responses."""
        outcomes = [
            self._compare(span.answer, example) if span.has_answer else "no answer span"
            for span, example in zip(parsed, examples, strict=True)
        ]
        comparisons = [outcome for outcome in outcomes if isinstance(outcome, Comparison)]
        self._num_fast += len(outcomes) - len(comparisons)
        replies = iter(self._pool.ask(comparisons))
        answered = [next(replies) if isinstance(out, Comparison) else out for out in outcomes]
        return [
            Verdict(
                acc=float(is_equal(outcome)),
                fmt=span.fmt,
                reason=outcome.removeprefix("equal: ").removeprefix("different: "),
            )
            for span, outcome in zip(parsed, answered, strict=True)
        ]

    def _compare(self, answer: str, example: Example) -> str | Comparison:
        if not isinstance(gold := example.answer, str):
            raise ValueError(
                f"the answer of example {example.id!r} is a {type(gold).__name__}, and the "
                "built-in verifier compares text; set verifier.reward to a function of your own"
            )
        return answers.compare_example(answer, example)

    def _read(self, parsed: Sequence[spans.Spans], reply: Reply) -> list[Verdict]:
        """The verdicts of a group, from its worker's reply."""
        names = list(dict.fromkeys(["acc", *self._weights]))
        rows, problem = read_reply(reply, len(parsed), names, self._timeout)
        kind = next((row for row in rows if isinstance(row, str)), "")
        if kind:
            self.problem = f"{self._name} {problem}"
        if kind and kind not in self._warned:
            self._warned.add(kind)
            logging.warning(
                "some responses were not judged and count in the metrics verifier/*; further "
                "failures of this kind are not logged. The reward function %s",
                self.problem,
            )
        verdicts = []
        for span, row in zip(parsed, rows, strict=True):
            if isinstance(row, str):
                self._lost[{"timeout": "timeouts", "crash": "crashes"}.get(row, "failed")] += 1
                verdicts.append(Verdict(acc=0.0, fmt=0.0, reason=row, quality=0.0))
                continue
            self._num_fast += 1
            acc, fmt = float(row["acc"] >= self._success), row.get("fmt", span.fmt)
            quality = sum(weight * row[name] for name, weight in self._weights.items())
            verdicts.append(Verdict(acc, fmt, "reward function", row, quality))
        return verdicts


def parse_text(text: str, *, is_complete: bool = True, think_tag: str = "think") -> spans.Spans:
    """Spans of a response given as text; its masks treat the whole text as one token."""
    # `spans.parse` expects tokens: the text is one token, and EOS another.
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
    return free_text.final_answer(after if closing else response)
