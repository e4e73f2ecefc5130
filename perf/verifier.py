"""Verdicts per second on one rollout batch, and the share reached without computer algebra.

    python -m perf.verifier
    python -m perf.verifier --cases=../shared/cases

512 questions x 8 rollouts. Without --cases, answers are drawn: numbers with units, commas and
percents, letters and options, fractions, tuples, words. One in twelve is an expression that needs
computer algebra, the share measured on recorded answers. With --cases, answers come from the
recorded responses of `mathvision_internlm_cot.jsonl`, each repeated eight times. "At sight" means
without computer algebra.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import time

from care_jax.batch import Example
from care_jax.benchmarks import mathvision
from care_jax.rewards import answers
from care_jax.rewards.symbolic import Question
from care_jax.rewards.verifier import Verifier

NUM_QUESTIONS, NUM_ROLLOUTS = 512, 8
TARGET = 50e-6  # seconds in which an answer should be settled without computer algebra


def drawn(rng: random.Random) -> tuple[list[str], list[Example]]:
    """Drawn answers, and the example that each answers."""
    texts, examples = [], []
    for place in range(NUM_QUESTIONS):
        value = rng.randint(2, 5000)
        kind = place % 12
        gold, forms, choices = str(value), ("{}", "{:,}", "{} cm", "x = {}", "${}$", "{}.0"), ()
        if kind in (1, 2, 3):
            choices = tuple(str(value + step) for step in (0, 7, 11, 20))
            gold, forms = "A", ("A", "(B)", "{}", "C. {}", "\\boxed{A}", "D")
        elif kind in (4, 5):
            gold, forms = (
                f"{value}/7",
                (f"\\frac{{{value}}}{{7}}", "\\frac{{}}{7}", "{}/7", "{}/8", "{}\\%"),
            )
        elif kind == 6:
            gold, forms = f"({value}, 3)", ("({}, 3)", "(3, {})", "({},3.0)", "{}")
        elif kind == 7:
            gold, forms = "red", ("red", "Blue", "\\text{red}", "the red one", "Yes")
        elif kind == 8:
            square = value**2
            gold = f"{value}\\sqrt{{3}}"
            forms = (f"\\sqrt{{{3 * square}}}", "{}\\sqrt{3}", "\\sqrt{3}\\cdot {}", "{}")
        for _ in range(NUM_ROLLOUTS):
            answer = value if rng.random() < 0.6 else value + 1
            texts.append(
                rng.choice(forms).replace("{}", str(answer)).replace("{:,}", f"{answer:,}")
            )
            examples.append(Example(str(place), "drawn", (), "", gold, choices))
    return texts, examples


def recorded(folder: pathlib.Path) -> tuple[list[str], list[Example]]:
    """Recorded answers, and the example that each answers."""
    path = folder / "mathvision_internlm_cot.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()][:NUM_QUESTIONS]
    texts, examples = [], []
    for row in rows:
        for _ in range(NUM_ROLLOUTS):
            texts.append(mathvision.parse(row["response"], row) or "none")
            examples.append(Example(row["id"], "r", (), "", row["gold"], tuple(row["options"])))
    return texts, examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=pathlib.Path, help="folder of recorded answers")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    texts, examples = drawn(random.Random(0)) if not arguments.cases else recorded(arguments.cases)

    seconds, num_symbolic = [], 0
    for text, example in zip(texts, examples, strict=True):
        start = time.perf_counter()
        outcome = answers.compare(text, example.answer, choices=example.choices)
        seconds.append(time.perf_counter() - start)
        num_symbolic += isinstance(outcome, Question)
        if isinstance(outcome, Question):
            seconds[-1] = float("inf")
    at_sight = [s for s in seconds if s < float("inf")]
    fast = sum(s < TARGET for s in seconds) / len(seconds)
    responses = [f"<think>so it is</think><answer>{text}</answer>" for text in texts]
    with Verifier(num_workers=arguments.workers) as verifier:
        verifier.verify(["<think>a</think><answer>1+x</answer>"], ["x+1"])  # starts a worker
        start = time.perf_counter()
        verdicts = verifier.verify(responses, examples)
        first = time.perf_counter() - start
        start = time.perf_counter()
        verifier.verify(responses, examples)
        again = time.perf_counter() - start
        counts = verifier.counts
    print(f"{len(texts)} answers, {sum(v.acc for v in verdicts) / len(texts):.0%} right")
    print(f"at sight {1 - num_symbolic / len(texts):.1%}; settled under 50 µs {fast:.1%}")
    print(
        f"at sight: median {statistics.median(at_sight) * 1e6:.1f} µs, "
        f"99th percentile {sorted(at_sight)[int(0.99 * len(at_sight))] * 1e6:.1f} µs"
    )
    print(f"symbolic: {counts['symbolic_calls']} computed, {counts['cached']} remembered")
    print(f"first time {first:.2f} s, {len(texts) / first:.0f} verdicts/s")
    print(f"again {again:.2f} s, {len(texts) / again:.0f} verdicts/s")


if __name__ == "__main__":
    main()
