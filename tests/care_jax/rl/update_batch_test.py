"""The batch of an update: which responses it holds, and whose log-probabilities it has."""

import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import B, R, credit_of, groups_of

from care_jax.batch import Example
from care_jax.devices.device_clock import DeviceClock
from care_jax.rl import update_batch
from care_jax.rl.rollout import asked, gather_groups

PARTS = {"rl.prompts_per_step": B, "rl.prompts_per_update": 2}
FIELDS = ("token_advantage", "old_logp", "row_weight", "is_trained", "is_answer")


def numbers_of(groups, prompts):
    """What each token of some prompts' trained responses should carry, by token id and field."""
    found = Counter()
    rollouts, scores, credited = groups.rollouts, groups.scores, groups.credit
    values = {
        "token_advantage": credited.token_advantage,
        "old_logp": rollouts.logp,
        "row_weight": np.broadcast_to(credited.row_weight[..., None], rollouts.tokens.shape),
        "is_trained": credited.is_trained,
        "is_answer": scores.is_answer,
    }
    for n in prompts:
        for r in np.flatnonzero(credited.is_trained[n].any(-1)):
            for t in np.flatnonzero(rollouts.is_valid[n, r]):
                key = int(rollouts.tokens[n, r, t]), *(float(values[f][n, r, t]) for f in FIELDS)
                found[key] += 1
    return found


def numbers_in(batch):
    """The same, read off the rows of a batch."""
    found = Counter()
    for row, place in np.argwhere(batch.rows.predictor >= 0):
        numbers = (float(getattr(batch, name)[row, place]) for name in FIELDS)
        key = int(batch.rows.tokens[row, place]), *numbers
        found[key] += 1
    return found


def test_an_update_gets_its_prompts_and_their_trained_responses(make_run, groups):
    """A response without any trained token, and a prompt without any such, take no place.

    The prompt stays in the loss's denominator.
    """
    credited = credit_of(groups.rollouts.tokens.shape)
    is_trained = credited.is_trained & groups.rollouts.is_valid
    is_trained[2, 1] = is_trained[0] = False
    is_trained[2, 0, 0] = True
    groups = groups.replace(credit=credited.replace(is_trained=is_trained))
    everyone, run = gather_groups(groups), make_run(PARTS)
    parts = zip(groups.split(2), everyone.split(2), strict=True)
    for prompts, (part, whole) in zip(((0, 1), (2, 3)), parts, strict=True):
        batch, plan = update_batch.train_batch(run, part, whole)
        assert numbers_in(batch) == numbers_of(groups, prompts)
        used = [n for n in prompts if is_trained[n].any()]
        num_real = sum(len(groups.prompts[n].tokens) for n in used) + whole.num_trained.sum()
        assert (plan.real_tokens, plan.computed_tokens) == (num_real, batch.rows.tokens.size)
        assert (
            not batch.ref_logp.any() and not batch.token_advantage[batch.rows.predictor < 0].any()
        )
        np.testing.assert_allclose(
            batch.prompt_weight.sum(), credited.prompt_weight[[*prompts]].sum(), rtol=1e-6
        )


@pytest.mark.parametrize("credit", ["as_sampled", "prompt_only"])
def test_rows_that_lost_their_context_are_not_compared(make_run, groups, whole_batch, credit):
    """The last of a prompt's three rows is the reflected one."""
    run = make_run({"rl.num_rollouts": R - 1, "care.reflect_credit": credit})
    batch, plan = whole_batch(run, groups)
    is_last = plan.token_branches[0] % R == R - 1
    assert (batch.is_trained & is_last).any()
    is_left_out = is_last & (credit == "prompt_only")
    np.testing.assert_array_equal(batch.is_compared, batch.is_trained & ~is_left_out)


@pytest.mark.parametrize(
    ("correction", "is_drawn_by_softmax"), [("none", False), ("mask", True), ("mask", False)]
)
def test_a_correction_needs_the_probability_that_a_token_was_drawn_with(
    make_run, groups, whole_batch, correction, is_drawn_by_softmax
):
    if not is_drawn_by_softmax:
        groups = groups.replace(
            rollouts=groups.rollouts.replace(drawn_logp=groups.rollouts.logp - 1)
        )
    run = make_run({"rl.correction": correction, "rl.old_logp": "trainer"})
    batch, _ = whole_batch(run, groups)
    if correction == "none":
        assert batch.drawn_logp is None
    else:
        is_response = batch.rows.predictor >= 0
        expected = batch.old_logp - is_response * (not is_drawn_by_softmax)
        np.testing.assert_allclose(batch.drawn_logp, expected, rtol=1e-6)


def test_a_process_trains_on_prompts_of_another(make_run, responses, policy, monkeypatch):
    """Of two processes one decoded all prompts of an update: it sends one to the other."""
    questions = [Example(f"q{i}", "made", (), "1?" + " 1" * i, "") for i in (15, 0, 15, 0)]
    tokenized = [policy.prompts.tokenize(example) for example in questions]
    groups = groups_of(responses, questions=asked(np.arange(B), questions, tokenized))
    groups = groups.replace(credit=credit_of(responses.tokens.shape))
    second = gather_groups(groups).take(slice(2, 4))
    run = make_run(PARTS | {"rl.microbatch_size": 2, "rl.row_tokens": 128})
    whole, _ = update_batch.train_batch(run, groups.take(slice(2, 4)), second)
    monkeypatch.setattr(update_batch.jax, "process_count", lambda: 2)
    monkeypatch.setattr(update_batch.sharding, "owners", lambda size, place: np.zeros(size, int))
    seen, sent = [], {}

    def exchange_rows(tree, rows, num_rows, *, moved, wanted):
        """Process 1 has nothing, and gets what process 0 sends."""
        if len(rows):
            sent.update({row: jax.tree.map(lambda x, row=row: x[row], tree) for row in moved})
            return tree
        assert set(wanted) == sent.keys()
        shapes = jax.tree.map(lambda x: np.zeros((num_rows, *x.shape[1:]), x.dtype), tree)
        for row, values in sent.items():
            jax.tree.map(lambda x, value, row=row: x.__setitem__(row, value), shapes, values)
        return shapes

    monkeypatch.setattr(update_batch.distributed, "exchange_rows", exchange_rows)
    for process, own in enumerate(([2, 3], [])):
        monkeypatch.setattr(update_batch.jax, "process_index", lambda process=process: process)
        batch, plan = update_batch.train_batch(run, groups.take(np.array(own, int)), second)
        seen.append(batch)
        assert len(plan.trees) == len(plan.moved) == 1
    jax.tree.map(
        lambda x, *parts: np.testing.assert_array_equal(
            np.sort(np.concatenate(parts), 0), np.sort(x, 0)
        ),
        whole,
        *seen,
    )
    assert sum((numbers_in(batch) for batch in seen), Counter()) == numbers_of(groups, (2, 3))


def put_scored(run, score, batches, params, reference):
    packed = ((batch, types.SimpleNamespace(is_empty=False)) for batch in batches)
    return update_batch.put_scored(run, score, packed, params, reference, DeviceClock())


def beta(value):
    return {"care.beta": value, "grpo.beta": value}


@pytest.mark.parametrize(
    ("changes", "recomputed"),
    [
        ({}, "none"),
        ({"rl.old_logp": "trainer"}, "all"),
        ({"care.reflect_credit": "prompt_only"}, "without context"),
        ({"care.reflect_credit": "prompt_only", "care.reflect_mode": "resample"}, "none"),
        ({"care.reflect_credit": "prompt_only", "rl.old_logp": "trainer"}, "all"),
        ({"care.reflect_credit": "prompt_only", "rl.objective": "grpo"}, "none"),
    ],
)
def test_log_probabilities_come_from_whom_they_should(
    make_run, groups, whole_batch, changes, recomputed
):
    """The scorer gives the name of its parameters, a number."""
    run = make_run(beta(0.1) | changes)
    batch, _ = whole_batch(run, groups)
    shape, sampled = batch.rows.tokens.shape, batch.old_logp
    assert batch.is_compared.any() and not batch.is_compared.all()
    kept = {"none": True, "all": False, "without context": batch.is_compared}[recomputed]

    def score(params, batch):
        return jnp.full(shape, params)

    for host, _, placed in put_scored(run, score, [batch] * 2, 5.0, 7.0):
        assert host.old_logp is sampled
        want = {"ref_logp": 7.0, "old_logp": np.where(kept, sampled, np.float32(5.0))}
        for found in (placed, update_batch.with_logprobs(host, placed)):
            for name, logp in want.items():
                np.testing.assert_array_equal(getattr(found, name), np.broadcast_to(logp, shape))
    without_kl = make_run(beta(0.0) | changes, "without_kl")
    ((_, _, placed),) = put_scored(without_kl, score, [batch], 5.0, None)
    np.testing.assert_array_equal(placed.ref_logp, np.zeros(shape))


@pytest.mark.parametrize(
    ("kl", "order"),
    [
        (0.0, "lay out, yield, lay out, yield, lay out, yield"),
        (0.1, "lay out, score, lay out, score, lay out, score, yield, yield, yield"),
    ],
)
def test_a_batch_is_laid_out_when_the_devices_have_another(
    make_run, groups, whole_batch, kl, order
):
    """All are scored before the first update can change the parameters."""
    run, calls = make_run(beta(kl)), []
    batch, _ = whole_batch(run, groups)

    def packed():
        for _ in range(3):
            calls.append("lay out")
            yield batch

    def score(params, batch):
        calls.append("score")
        return batch.ref_logp

    for _ in put_scored(run, score, packed(), 5.0, 7.0):
        calls.append("yield")
    assert ", ".join(calls) == order


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_an_empty_batch_is_neither_scored_nor_put(make_run, groups, whole_batch, kl):
    run = make_run(beta(kl))
    batch, _ = whole_batch(run, groups)
    score = lambda params, batch: batch.ref_logp + params  # noqa: E731
    packed = ((batch, types.SimpleNamespace(is_empty=number == 1)) for number in range(3))
    scored = update_batch.put_scored(run, score, packed, 5.0, 7.0, DeviceClock())
    found = [placed for *_, placed in scored]
    assert [placed is None for placed in found] == [False, True, False]
    assert {float(placed.ref_logp.max()) for placed in found[::2]} == {7.0 if kl else 0.0}


def test_adapters_leave_their_reference_in_place(make_run, groups, whole_batch):
    run = make_run({"care.beta": 0.1, "model.lora_rank": 2})
    params = {"text": {"kernel": 3.0, "lora_a": 1.0, "lora_b": 2.0, "lora_scale": 1.0}}
    assert update_batch.copy_reference(run, params) is None
    batch, _ = whole_batch(run, groups)
    seen = []

    def score(params, batch):
        seen.append(params)
        return batch.ref_logp

    list(put_scored(run, score, [batch], params, None))
    assert seen == [{"text": {"kernel": 3.0}}]


@pytest.mark.parametrize(
    ("offload", "dtype"), [((), "float32"), ((), "bfloat16"), (("reference",), "bfloat16")]
)
def test_the_reference_is_a_copy_with_the_decoder_in_the_compute_dtype(
    make_run, params, offload, dtype
):
    run = make_run({"care.beta": 0.1, "model.compute_dtype": dtype, "model.offload": offload})
    params = jax.device_put(jax.tree.map(jnp.copy, params), jax.devices()[0])
    expected = jax.device_get(params)
    reference = update_batch.copy_reference(run, params)
    jax.tree.map(lambda a: a.delete(), params)  # as an update does, which is given its state
    expected["text"] = jax.tree.map(lambda a: a.astype(dtype), expected["text"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(reference), expected)
    assert {a.dtype for a in jax.tree.leaves(reference["text"])} == {jnp.dtype(dtype)}
    assert {a.dtype for a in jax.tree.leaves(reference["vision"])} == {jnp.dtype("float32")}
    memories = {a.sharding.memory_kind for a in jax.tree.leaves(reference)}
    assert memories == {"pinned_host" if offload else "device"}
