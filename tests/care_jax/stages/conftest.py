"""A sampler that answers from a table, questions for it, and runs that ask it."""

import json

import numpy as np
import pytest
from scripted_answers import PARAMS, ROWS, SETTINGS, T

from care_jax.batch import Example, Rollouts
from care_jax.benchmarks import mathvision
from care_jax.benchmarks.rows import Question
from care_jax.stages import answering, evaluate


@pytest.fixture
def examples():
    return [
        Example(f"e{i}", source, (), "1?" + " 1" * i, str(i))
        for i, (source, _, _) in enumerate(ROWS)
    ]


@pytest.fixture
def asked(policy, examples, monkeypatch):
    """What the sampler was called with; it answers a prompt by its length.

    Every second sample of a prompt is wrong.
    """
    texts = [
        f"<think>a</think><answer>{answer}</answer>"
        if is_formatted
        else f"<answer>{answer}</answer>"
        for _, answer, is_formatted in ROWS
    ]
    table = np.full((200, T), policy.config.pad_token_id, np.int32)
    lengths = np.zeros(200, int)
    for example, text in zip(examples, texts, strict=True):
        tokens = policy.prompts.response_tokens(text)
        row = len(policy.prompts.tokenize(example).tokens)
        table[row, : len(tokens)], lengths[row] = tokens, len(tokens)
    wrong = policy.prompts.response_tokens("<answer>9</answer>")
    table[0, : len(wrong)], lengths[0] = wrong, len(wrong)
    calls = []

    def compile_decoder(run, **choice):
        calls.append(choice)

    class Queue:
        def __init__(self, programs, prompts, sizes, clock):
            calls[-1] |= {"sizes": sizes, "asked": []}
            self.asked, self.num_samples = calls[-1]["asked"], sizes.num_rollouts

        def decode(self, params, rng, requests):
            """The last first, one at a time."""
            self.asked += [request.index for request in requests]
            for index, request in reversed(list(enumerate(requests))):
                length = len(request.prompt.tokens)
                rows = [0 if sample % 2 else length for sample in range(self.num_samples)]
                tokens = table[rows][None]
                is_valid = (np.arange(T) < lengths[rows][:, None])[None]
                yield (
                    [index],
                    Rollouts(
                        tokens=tokens,
                        is_valid=is_valid,
                        is_forced=np.zeros_like(is_valid),
                        logp=np.zeros(tokens.shape, np.float32),
                        embedding=np.zeros((1, self.num_samples, 2), np.float32),
                        is_complete=is_valid.any(-1),
                    ),
                )

    monkeypatch.setattr(answering, "compile_decoder", compile_decoder)
    monkeypatch.setattr(answering, "DecodeQueue", Queue)
    monkeypatch.setattr(answering, "compile_to_decode_layout", lambda _: lambda params: params)
    return texts, calls


@pytest.fixture
def release(tmp_path, examples, policy):
    """The questions as a benchmark of their own, with prompts as long as the examples'."""
    rows = [
        {"id": i, "question": example.question, "answer": example.answer, "subject": example.source}
        for i, example in enumerate(examples)
    ]
    (tmp_path / "testmini.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "testmini.jsonl"


@pytest.fixture
def benchmark_run(make_run, release, monkeypatch):
    """Makes runs that evaluate the release, asked without a picture or a preamble."""

    def question(row):
        return Question(row["question"], ())

    monkeypatch.setattr(mathvision, "question", question)

    def make(**changes):
        benchmarks = (("mathvision_testmini", str(release)),)
        return make_run(SETTINGS | {"evaluate.benchmarks": benchmarks} | changes)

    return make


@pytest.fixture
def staged(make_run, examples, asked):
    """Runs the stage in a workdir: metrics, indices decoded, and the stages of all lines."""

    def staged(changes=None, params=PARAMS, run=None):
        asked[1].clear()
        run = run or make_run(SETTINGS | (changes or {}))
        evaluator = evaluate.Evaluator(run, examples, [])
        metrics = evaluate.evaluate_stage(run, evaluator, params, name="rl")
        lines = [json.loads(line) for line in run.metrics.path.read_text().splitlines()]
        decoded = [place for call in asked[1] for place in call["asked"]]
        return metrics, decoded, [line["stage"] for line in lines]

    return staged
