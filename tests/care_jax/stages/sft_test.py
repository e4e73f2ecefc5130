"""The cold start: what a batch holds, the loss by hand, and resuming."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax.batch import Example
from care_jax.run import stage
from care_jax.stages import sft

B, ROW = 4, 80
RESPONSES = (
    "<think>a b</think><answer>12</answer>",
    "<think>" + "much too long" * 19 + "</think><answer>3</answer>",
    "no tags",
    "<think>c</think><answer>4</answer>",
)
SETTINGS = {
    "log_every": 1,
    "model.remat": "layer",
    "model.freeze_vision": True,
    "checkpoint_every": 2,
    "sft.num_steps": 3,
    "sft.batch_size": B,
    "sft.microbatch_size": 2,
    "sft.warmup_steps": 2,
    "sft.learning_rate": 0.5,
    "sft.answer_weight": 3.0,
    "sft.row_tokens": ROW,
}


@pytest.fixture
def examples():
    return [
        Example(f"e{i}", "made", (), "?" * (i + 1), "", response=RESPONSES[i]) for i in range(B)
    ]


@pytest.fixture
def batch_of(policy):
    def batch_of(run, examples):
        tokenized = [policy.prompts.tokenize(example) for example in examples]
        run.config.sft.batch_size = len(examples)
        batch, _ = sft.packed_batch(run, np.arange(len(examples)), examples, tokenized)
        return batch

    return batch_of


def responses_of(batch, policy):
    """(text, weights) of every response in the rows, in order."""
    found = []
    is_scored = batch.rows.predictor >= 0
    for tokens, mask, weight in zip(batch.rows.tokens, is_scored, batch.weight, strict=True):
        targets, weight = tokens[mask], weight[mask]
        ends = np.flatnonzero(targets == policy.config.eos_token_ids[0]) + 1
        parts = np.split(targets, ends)[:-1], np.split(weight, ends)[:-1]
        found += [(policy.tokenizer.decode(t[:-1]), w) for t, w in zip(*parts, strict=True)]
    return found


def test_answer_tokens_weigh_more_and_examples_too_long_are_left_out(
    make_run, policy, examples, batch_of
):
    run = make_run(SETTINGS)
    found = dict(responses_of(batch_of(run, examples), policy))
    assert run.metrics.left_out("sft") == {sft.ROW_TOO_SHORT: 1}
    assert set(found) == {RESPONSES[i] for i in (0, 2, 3)}
    tokens = policy.prompts.response_tokens(RESPONSES[0])
    ends = np.cumsum([len(policy.token_bytes[token]) for token in tokens])
    weights = np.where(ends > RESPONSES[0].index("<answer>"), 3, 1)
    assert 5 < (weights == 3).sum() < len(weights) - 5
    np.testing.assert_array_equal(found[RESPONSES[0]], weights)
    np.testing.assert_array_equal(found[RESPONSES[2]], 1)


def test_a_context_is_read_and_not_learnt(make_run, policy, batch_of):
    """Behind half a rationale the answer still weighs more, and positions go on."""
    context, response = "<think>a b. Wait.", " c</think><answer>4</answer>"
    example = Example("e", "made", (), "?", "4", response=response, context=context)
    whole = Example("e", "made", (), "?", "4", response=context + response)
    run = make_run(SETTINGS)
    batch, same = batch_of(run, [example]), batch_of(run, [whole])
    ((text, weight),) = responses_of(batch, policy)
    assert text == response and len(weight) == len(policy.prompts.response_tokens(response))
    (row,) = np.flatnonzero(batch.weight.any(1))
    first = np.flatnonzero(batch.rows.predictor[row] >= 0)[0]
    num_prompt = len(policy.prompts.tokenize(example).tokens)
    before = policy.tokenizer.decode(batch.rows.tokens[row][num_prompt:first])
    assert before == context
    is_read = batch.rows.predictor[row] >= 0
    for name in ("tokens", "positions", "predictor"):
        ours, theirs = (getattr(each.rows, name)[row] for each in (batch, same))
        np.testing.assert_array_equal(ours[is_read], theirs[is_read])
    np.testing.assert_array_equal(batch.weight[row][is_read], same.weight[row][is_read])
    assert set(weight.tolist()) == {1.0, 3.0}
    assert not batch.weight[row][~is_read].any()


def test_examples_share_rows_that_come_in_whole_microbatches(make_run, examples, batch_of):
    """Three examples of up to 40 tokens in two rows."""
    rows = batch_of(make_run(SETTINGS), examples).rows
    assert rows.images is None and len(rows.tokens) == 2 and rows.tokens.shape[1] <= ROW
    assert sorted(rows.branch.max(1).tolist()) == [0, 1]


def test_a_batch_of_which_nothing_fits_is_empty_rows(make_run, examples, batch_of):
    batch = batch_of(make_run(SETTINGS), examples[1:2])
    assert len(batch.rows.tokens) % 2 == 0
    assert not batch.weight.any() and (batch.rows.predictor == -1).all()


@pytest.fixture
def scripted(monkeypatch):
    """A model that gives token n the log-probability -n/100; an update adds 1 to all parameters.

    Gives the table of log-probabilities and the list of the batches that will be seen.
    """
    logp = -np.arange(2000) / 100
    seen = []

    def score_rows(params, rows, config, options, routes=None):
        assert options.attention.name == "xla"
        assert (options.dtype, options.remat) == (jnp.float32, "layer")
        return jnp.where(rows.predictor >= 0, jnp.asarray(logp)[rows.tokens], 0.0), None, None

    def update(state, batch, loss_fn, optimizer, *, microbatch_size, freeze_vision, skip_nonfinite):
        assert freeze_vision
        assert microbatch_size == SETTINGS["sft.microbatch_size"]
        parts = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
        shares, rest = zip(*(loss_fn(state.params, part) for part in parts), strict=True)
        numerators, denominators = zip(*(metrics["nll"] for metrics, _ in rest), strict=True)
        params = jax.tree.map(lambda x: x + 1, state.params)
        metrics = {"loss": sum(shares), "nll": sum(numerators) / sum(denominators)}
        return state.replace(params=params, step=state.step + 1), metrics, None

    make_batch = sft.packed_batch

    def noted(run, index, examples, tokenized):
        seen.append([example.id for example in examples])
        return make_batch(run, index, examples, tokenized)

    monkeypatch.setattr(sft, "score_rows", score_rows)
    monkeypatch.setattr(stage, "score_rows", score_rows)
    monkeypatch.setattr(sft, "update", update)
    monkeypatch.setattr(sft, "packed_batch", noted)
    return logp, seen


def params():
    return {"vision": {"w": jnp.zeros(2)}, "text": {"w": jnp.zeros(3)}}


def metrics_of(run):
    """Less what was left out, which a process counts from its own start."""
    records = map(json.loads, run.metrics.path.read_text().splitlines())
    own = ("left_out/", "host/")  # of the process
    return [{k: v for k, v in r.items() if not k.startswith(own)} for r in records]


def test_loss_is_the_weighted_mean_over_the_whole_batch(make_run, examples, batch_of, scripted):
    """However it is cut: the parts differ in weight."""
    logp, _ = scripted
    run = make_run(SETTINGS | {"sft.num_steps": 1, "sft.warmup_steps": 0})
    state = sft.train(run, params(), examples)
    batch = batch_of(run, examples)
    is_scored = batch.rows.predictor >= 0
    nll = -logp[batch.rows.tokens] * is_scored
    (metrics,) = metrics_of(run)
    assert metrics["loss"] == pytest.approx((nll * batch.weight).sum() / batch.weight.sum(), 1e-5)
    assert metrics["nll"] == pytest.approx(nll.sum() / is_scored.sum(), 1e-5)
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
    noted = sft.packed_batch

    def killed(*args):
        if len(seen) == 2:
            raise KeyboardInterrupt
        return noted(*args)

    monkeypatch.setattr(sft, "packed_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        sft.train(make_run(SETTINGS, "broken"), params(), many)
    seen.clear()
    monkeypatch.setattr(sft, "packed_batch", noted)
    resumed = make_run(SETTINGS, "broken")
    state = sft.train(resumed, params(), many)
    assert seen == batches[2:]
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert metrics_of(resumed) == metrics_of(whole)
    rates = [record["learning_rate"] for record in metrics_of(whole)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.5])


def test_a_step_without_a_response_updates_nothing(make_run, examples, scripted, monkeypatch):
    """No row is long enough for the examples of step 1. Adam's moments would move the weights."""
    _, seen = scripted
    misfits = sft.misfits

    def without_room(sizes, **row):
        return dict.fromkeys(range(B), "") if len(seen) == 2 else misfits(sizes, **row)

    monkeypatch.setattr(sft, "misfits", without_room)
    run = make_run(SETTINGS)
    state = sft.train(run, params(), examples * 3)
    np.testing.assert_array_equal(state["text"]["w"], 2)
    assert ["loss" in record for record in metrics_of(run)] == [True, False, True]


def test_a_state_that_diverged_between_two_logged_steps_is_not_saved(
    make_run, examples, scripted, monkeypatch
):
    """The second of three steps goes wrong; only the first and the last are logged."""
    whole = sft.update

    def update(state, *args, **kwargs):
        after, metrics, _ = whole(state, *args, **kwargs)
        metrics["loss"] += jnp.where(state.step == 1, jnp.nan, 0.0)
        return after, metrics, None

    monkeypatch.setattr(sft, "update", update)
    run = make_run(SETTINGS | {"log_every": 10})
    with pytest.raises(FloatingPointError, match=r"sft step 1: .*loss=nan"):
        sft.train(run, params(), examples)
    assert not (run.workdir / "checkpoints" / "sft" / "2").exists()


def test_checkpoint_of_another_backbone_is_refused(
    make_run, policy, examples, scripted, monkeypatch
):
    sft.train(make_run(SETTINGS), params(), examples)
    other = policy.fingerprint() | {"hidden_size": 97}
    monkeypatch.setattr(type(policy), "fingerprint", lambda self: other)
    with pytest.raises(ValueError, match=r"of another model: hidden_size"):
        sft.train(make_run(SETTINGS), params(), examples)
