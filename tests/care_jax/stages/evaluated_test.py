"""A result of the stage `evaluate` is used again where all that it depends on is the same."""

import json
import types

import jax
import pytest

from care_jax.stages import evaluate
from care_jax.stages.evaluated import evaluate_once


class Evaluator:
    """Counts its evaluations; `of` stands for weights and settings."""

    def __init__(self, of):
        self.of, self.count = of, 0

    def stamp(self, params):
        return self.of

    def __call__(self, params, *, name):
        self.count += 1
        return {"acc": self.count / 4, "num_examples": 4}


@pytest.fixture
def evaluated(make_run):
    """Evaluates in a workdir; gives metrics, how often anything was evaluated, and all lines."""

    def evaluated(of, run=None):
        run, evaluator = run or make_run({}), Evaluator(of)
        metrics = evaluate_once(run, evaluator, None, name="rl")
        lines = [json.loads(line) for line in run.metrics.path.read_text().splitlines()]
        return metrics, evaluator.count, [line["stage"] for line in lines]

    return evaluated


def test_a_result_of_the_same_weights_keeps_its_line_and_its_place(evaluated, make_run, capsys):
    first, count, _ = evaluated({"weights": "1"})
    assert count == 1
    run = make_run({})
    run.metrics.write("rl", 0, {"acc": 1})
    capsys.readouterr()
    assert evaluated({"weights": "1"}, run) == (first, 0, ["evaluate_rl", "rl"])
    path = run.workdir / "evaluated_rl.json"
    assert f"done already, with these weights and settings; remove {path} to" in (
        capsys.readouterr().out
    )
    assert evaluated({"weights": "2"}) == (first, 1, ["rl", "evaluate_rl"])


@pytest.mark.parametrize("lost", ["evaluated_rl.json", "metrics.jsonl", "damaged", None])
def test_without_its_line_or_file_it_is_done_again(evaluated, make_run, lost):
    """And where a reward function judges, of which nothing is known."""
    of = {"weights": "1"} if lost else None
    evaluated(of)
    folder = make_run({}).workdir
    if lost == "damaged":
        (folder / "evaluated_rl.json").write_text('{"of": {"wei')
    elif lost:
        (folder / lost).unlink()
    assert evaluated(of)[1] == 1


def test_what_a_result_depends_on(make_run, params, examples, monkeypatch):
    """Weights, settings, and rows that were read; a reward function may be anything."""
    monkeypatch.setattr(evaluate, "versions", lambda: {"jax": "1"})

    def stamp(changes=(), params=params, rows=examples[3:], **given):
        run = make_run(dict(changes))
        run = types.SimpleNamespace(**{**vars(run), "reward": None, **given})
        evaluator = evaluate.Evaluator(run, rows, [])
        checksum = lambda params: jax.numpy.float32(sum(x.sum() for x in jax.tree.leaves(params)))  # noqa: E731
        evaluator.__dict__["_programs"] = types.SimpleNamespace(checksum=checksum)
        return evaluator.stamp(params)

    first = stamp()
    assert stamp() == first and json.loads(json.dumps(first)) == first
    for other in (
        stamp({"evaluate.max_response_tokens": 9}),
        stamp({"data.test.seed": 9}),
        stamp({"data.system_prompt": "?"}),
        stamp({"verifier.timeout": 9.0}),
        stamp(params=jax.tree.map(lambda x: x + 1, params)),
        stamp(rows=examples[2:3]),
    ):
        assert other != first
    assert stamp({"rl.learning_rate": 0.1, "log_every": 9}) == first
    assert stamp(reward=len) is None
    assert stamp({"verifier.reward": "a:b"}) is None
