"""Evaluation around a scripted sampler: who is asked, how, and what the figures mean."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from care_jax import evaluate
from care_jax.batch import Example, Rollouts
from care_jax.metrics import wilson_interval

T = 16
# By length of the question: source, answer of the policy, whether it keeps to the format.
ROWS = (
    ("a", "0", True),
    ("b", "9", True),
    ("a", "2", False),
    ("a", "3", False),
    ("b", "9", False),
)


@pytest.fixture
def examples():
    return [
        Example(f"e{i}", source, (), "1?" + " 1" * i, str(i))
        for i, (source, _, _) in enumerate(ROWS)
    ]


@pytest.fixture
def asked(policy, examples, monkeypatch):
    """What the sampler was called with; it answers a prompt by its length."""
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
    calls = []

    def decode(params, prefix, rng, closing_tag, config, **settings):
        calls.append(settings | {"num_prompts": len(prefix.tokens)})
        row = prefix.is_valid.sum(1)
        tokens = jnp.asarray(table)[row][:, None]
        is_valid = (jnp.arange(T) < jnp.asarray(lengths)[row][:, None])[:, None]
        return Rollouts(
            tokens=tokens,
            is_valid=is_valid,
            is_forced=jnp.zeros_like(is_valid),
            logp=jnp.zeros(tokens.shape),
            embedding=jnp.zeros((*tokens.shape[:2], 2)),
            is_complete=is_valid.any(-1),
        )

    def prefill(params, prompts, config, *, dtype, attention):
        return prompts

    monkeypatch.setattr(evaluate, "sampler", SimpleNamespace(prefill=prefill, decode=decode))
    monkeypatch.setattr(evaluate.backbone, "to_decode_layout", lambda params, *_: params)
    monkeypatch.setattr(evaluate, "decode_shardings", lambda *_: None)
    return texts, calls


SETTINGS = {"evaluate.batch_size": 3, "evaluate.max_response_tokens": T, "rl.temperature": 0.7}


def test_figures_are_over_the_examples_that_fit_and_no_padding(make_run, examples, asked):
    """Five fit; the second batch of three is filled up, and a prompt too long is left out."""
    too_long = Example("long", "a", (), "1?" + " 1" * 300, "0")
    run = make_run(SETTINGS)
    metrics = evaluate.evaluate(run, {}, [*examples[:2], too_long, *examples[2:]], name="rl")
    assert (metrics["num_examples"], metrics["num_dropped"]) == (5, 1)
    assert metrics["acc"] == pytest.approx(3 / 5)
    np.testing.assert_allclose(
        (metrics["acc_low"], metrics["acc_high"]), wilson_interval(3, 5), rtol=1e-6
    )
    assert metrics["fmt"] == pytest.approx(2 / 5)
    assert (metrics["acc/a"], metrics["acc/b"]) == (1, 0)


def test_one_greedy_answer_is_asked_for_each(make_run, examples, asked):
    evaluate.evaluate(make_run(SETTINGS), {}, examples, name="rl")
    assert asked[1] == [
        {
            "num_prompts": 3,
            "num_rows": 1,
            "max_tokens": T,
            "temperature": 0.0,
            "top_p": 1.0,
            "dtype": jnp.float32,
        }
    ]


def test_samples_hold_each_example_with_its_own_response(make_run, examples, asked):
    run = make_run(SETTINGS)
    evaluate.evaluate(run, {}, examples, name="sft")
    lines = (run.workdir / "samples_sft.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["id"] for sample in samples] == [example.id for example in examples]
    assert [sample["response"] for sample in samples] == asked[0]
    assert [sample["acc"] for sample in samples] == [1, 0, 1, 1, 0]
    assert [sample["answer"] for sample in samples] == ["0", "1", "2", "3", "4"]


def test_prompts_that_all_exceed_the_buckets_are_refused(make_run, asked):
    too_long = Example("long", "a", (), "1?" + " 1" * 300, "0")
    with pytest.raises(ValueError, match=r"none of the 1 held-out prompts fits data\.buckets"):
        evaluate.evaluate(make_run(SETTINGS), {}, [too_long], name="rl")
