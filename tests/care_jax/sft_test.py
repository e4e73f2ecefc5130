"""The cold start: what a batch holds, the loss by hand, and resuming."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax import sft
from care_jax.batch import Example
from care_jax.prompt import prompt_sizes

B, T = 4, 16
RESPONSES = (
    "<think>a b</think><answer>12</answer>",  # T tokens with EOS
    "<think>" + "much too long" * 9 + "</think><answer>3</answer>",
    "no tags",
    "<think>c</think><answer>4</answer>",
)
SETTINGS = {
    "log_every": 1,
    "model.remat": "layer",
    "model.freeze_vision": True,
    "rl.logprob_chunk": 77,
    "checkpoint_every": 2,
    "sft.num_steps": 3,
    "sft.batch_size": B,
    "sft.microbatch_size": 2,
    "sft.warmup_steps": 2,
    "sft.learning_rate": 0.5,
    "sft.answer_weight": 3.0,
    "sft.max_response_tokens": T,
}


@pytest.fixture
def examples():
    return [
        Example(f"e{i}", "made", (), "?" * (i + 1), "", response=RESPONSES[i]) for i in range(B)
    ]


@pytest.fixture
def batch_of(policy):
    def batch_of(run, examples):
        records = [policy.prompts.tokenize(example) for example in examples]
        return sft.sft_batch(run, examples, records, prompt_sizes(records))

    return batch_of


def test_answer_tokens_weigh_more_and_responses_too_long_are_left_out(
    make_run, policy, examples, batch_of
):
    batch = batch_of(make_run(SETTINGS), examples)
    for i in (0, 2, 3):
        tokens = batch.tokens[i, 0, batch.is_valid[i, 0]]
        assert tokens[-1] == policy.config.eos_token_id
        assert policy.tokenizer.decode(tokens[:-1]) == RESPONSES[i]
        assert batch.is_valid[i, 0, : len(tokens)].all()
    assert batch.is_valid[0].all()
    assert not batch.is_valid[1].any() and not batch.weight[1].any()
    np.testing.assert_array_equal(batch.tokens[~batch.is_valid], policy.config.pad_token_id)

    tokens = batch.tokens[0, 0, batch.is_valid[0, 0]]
    ends = np.cumsum([len(policy.token_bytes[token]) for token in tokens])
    weights = np.where(ends > RESPONSES[0].index("<answer>"), 3, 1)
    assert 5 < (weights == 3).sum() < len(weights) - 5
    np.testing.assert_array_equal(batch.weight[0, 0], weights)
    np.testing.assert_array_equal(batch.weight[2], batch.is_valid[2])
    prompts = policy.prompts.batch([policy.prompts.tokenize(example) for example in examples])
    jax.tree.map(np.testing.assert_array_equal, batch.prompts, prompts)


@pytest.fixture
def scripted(monkeypatch):
    """A model that gives token n the log-probability -n/100; an update adds 1 to all parameters.

    Gives the table of log-probabilities and the list of the batches that will be seen.
    """
    logp = -np.arange(2000) / 100
    seen = []

    def score_responses(params, prompts, tokens, is_valid, config, **settings):
        assert settings.pop("attention").name == "xla"
        assert settings == {"dtype": jnp.float32, "chunk": 77, "remat": "layer"}
        return jnp.asarray(logp)[tokens], None

    def update(state, batch, loss_fn, optimizer, *, microbatch_size, partition):
        assert partition(state.params)[0].keys() == {"text"}
        assert microbatch_size == SETTINGS["sft.microbatch_size"]
        parts = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
        shares, metrics = zip(*(loss_fn(state.params, part) for part in parts), strict=True)
        numerators, denominators = zip(*(metric["nll"] for metric in metrics), strict=True)
        params = jax.tree.map(lambda x: x + 1, state.params)
        metrics = {"loss": sum(shares), "nll": sum(numerators) / sum(denominators)}
        return state.replace(params=params, step=state.step + 1), metrics

    make_batch = sft.sft_batch

    def noted(run, examples, records, sizes):
        seen.append([example.id for example in examples])
        return make_batch(run, examples, records, sizes)

    monkeypatch.setattr(sft, "score_responses", score_responses)
    monkeypatch.setattr(sft, "update", update)
    monkeypatch.setattr(sft, "sft_batch", noted)
    return logp, seen


def params():
    return {"vision": {"w": jnp.zeros(2)}, "text": {"w": jnp.zeros(3)}}


def metrics_of(run):
    return [json.loads(line) for line in run.metrics.path.read_text().splitlines()]


def test_loss_is_the_weighted_mean_over_the_whole_batch(make_run, examples, batch_of, scripted):
    """However it is cut: the parts differ in weight."""
    logp, _ = scripted
    run = make_run(SETTINGS | {"sft.num_steps": 1, "sft.warmup_steps": 0})
    state = sft.train(run, params(), examples)
    batch = batch_of(run, examples)
    nll = -logp[batch.tokens] * batch.is_valid
    (metrics,) = metrics_of(run)
    assert metrics["loss"] == pytest.approx((nll * batch.weight).sum() / batch.weight.sum(), 1e-5)
    assert metrics["nll"] == pytest.approx(nll.sum() / batch.is_valid.sum(), 1e-5)
    np.testing.assert_array_equal(state["text"]["w"], 1)


def test_resumed_stage_does_what_the_unbroken_one_did(make_run, examples, scripted, monkeypatch):
    """Killed in its last step, after the checkpoint of the one before."""
    _, seen = scripted
    many = examples * 3
    whole = make_run(SETTINGS, "whole")
    expected = sft.train(whole, params(), many)
    batches = seen.copy()
    assert len(batches) == 3
    seen.clear()
    noted = sft.sft_batch

    def killed(*args):
        if len(seen) == 2:
            raise KeyboardInterrupt
        return noted(*args)

    monkeypatch.setattr(sft, "sft_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        sft.train(make_run(SETTINGS, "broken"), params(), many)
    seen.clear()
    monkeypatch.setattr(sft, "sft_batch", noted)
    resumed = make_run(SETTINGS, "broken")
    state = sft.train(resumed, params(), many)
    assert seen == batches[2:]
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert metrics_of(resumed) == metrics_of(whole)
    rates = [record["learning_rate"] for record in metrics_of(whole)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.5])


def test_checkpoint_of_another_backbone_is_refused(
    make_run, policy, examples, scripted, monkeypatch
):
    sft.train(make_run(SETTINGS), params(), examples)
    other = policy.fingerprint() | {"text.hidden_size": 97}
    monkeypatch.setattr(type(policy), "fingerprint", lambda self: other)
    with pytest.raises(ValueError, match=r"of another model: .*text\.hidden_size"):
        sft.train(make_run(SETTINGS), params(), examples)
