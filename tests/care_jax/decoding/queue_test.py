"""Continuous decoding gives what plain decoding gives, whatever the slots, rows, rings and mesh."""

import copy
import dataclasses
import operator
from collections import Counter

import jax
import numpy as np
import pytest
from plain_decode import plain_decode
from queued import make_answer

from care_jax.decoding import sampler, schedule, simulation
from care_jax.decoding.rollout_buffer import Request
from care_jax.decoding.sampler import DecodingAttention
from care_jax.decoding.schedule import WaitingPrompt
from care_jax.devices.sharding import make_mesh
from care_jax.prompts.builder import prompt_sizes
from models import backbone
from models.attention.packed import XLA, AttentionImpl

G, T, TOP_P = 5, 16, 0.98
HOT = 1.5  # temperature
RNG = jax.random.key(11)


@pytest.fixture(scope="module")
def ending(policy):
    """The policy with ids that end a rollout so many that lengths differ: about one in nine."""
    ends = (*policy.config.eos_token_ids, *range(0, 600, 9))
    return dataclasses.replace(
        policy, config=dataclasses.replace(policy.config, eos_token_ids=ends)
    )


@pytest.fixture(scope="module")
def requests(policy, image_prompts, questions):
    """Seven prompts of three lengths of images and none; every other one has a context."""
    texts = [policy.prompts.tokenize(example) for example in questions((30, 2, 9))]
    tokenized = [*image_prompts, *texts]
    contexts = [np.arange(300, 300 + n, dtype=np.int32) for n in (0, 3, 0, 5, 1, 0, 4)]
    indices = (0, 9, 3, 6, 13, 7, 10)
    return [Request(*row) for row in zip(indices, tokenized, contexts, strict=True)]


@pytest.fixture(scope="module")
def expected(params, ending, requests):
    room = prompt_sizes([request.prompt for request in requests]).max(0).tolist()
    answers = [
        plain_decode(
            params,
            ending,
            request.prompt,
            jax.random.fold_in(RNG, request.index),
            room=room,
            num_rollouts=G,
            max_tokens=T,
            temperature=HOT,
            top_p=TOP_P,
            context=request.context,
        )
        for request in requests
    ]
    lengths = {len(tokens) for rollouts in answers for tokens, *_ in rollouts}
    assert 1 in lengths and T in lengths and len(lengths) > 8  # what the cases need
    return answers


@pytest.fixture(scope="module")
def answer(params, ending, requests):
    """All requests answered, in their order, the queue that did, and the steps of its calls.

    Prompts have one bucket, or two, each of which is a program.
    """

    def answer(num_slots, num_rows, mesh=None, attention=None, num_buckets=1):
        prompts = copy.copy(ending.prompts)
        prompts.buckets = prompts.buckets[-num_buckets:]
        ask = make_answer(
            dataclasses.replace(ending, prompts=prompts),
            params,
            num_slots=num_slots,
            num_rows=num_rows,
            num_rollouts=G,
            max_tokens=T,
            num_context_tokens=5,
            temperature=HOT,
            top_p=TOP_P,
            mesh=mesh,
            attention=attention,
        )
        advance, clocks = ask.queue.programs.advance, [0]

        def counted(*arguments):
            result = advance(*arguments)
            clocks.append(int(result[-1][-1]))
            return result

        keep, halved = ask.queue.programs.keep, []

        def noted(array, kept):
            assert all(array.is_deleted() for array in halved)  # one at a time
            halved.append(array)
            return keep(array, kept)

        ask.queue.programs = dataclasses.replace(ask.queue.programs, advance=counted, keep=noted)
        begun = []  # when the host's other work was called
        ask.queue.meanwhile = lambda: begun.append(len(clocks) - 1)
        answered = ask(requests, RNG)
        assert begun == [*range(1, len(clocks))]
        assert halved or num_slots % 2 or mesh is not None
        return answered, ask.queue, np.diff(clocks).tolist()

    return answer


def assert_equal(answered, expected, requests, policy):
    for row, (plain, request) in enumerate(zip(expected, requests, strict=True)):
        rollouts = jax.tree.map(operator.itemgetter(row), answered)
        start = len(request.context)
        for g, (tokens, logp, rationale) in enumerate(plain):
            end = start + len(tokens)
            np.testing.assert_array_equal(rollouts.tokens[g, :start], request.context)
            np.testing.assert_array_equal(rollouts.tokens[g, start:end], tokens)
            assert (rollouts.tokens[g, end:] == policy.config.pad_token_id).all()
            for found, want in zip((rollouts.logp, rollouts.drawn_logp), logp.T, strict=True):
                np.testing.assert_allclose(found[g, start:end], want, atol=2e-5)
                assert not found[g, :start].any() and not found[g, end:].any()
            np.testing.assert_array_equal(rollouts.is_valid[g], np.arange(T) < end)
            np.testing.assert_array_equal(rollouts.is_forced[g], np.arange(T) < start)
            norm = max(np.linalg.norm(rationale), 1e-6)
            np.testing.assert_allclose(rollouts.embedding[g], rationale / norm, atol=2e-5)
            assert rollouts.is_complete[g] == (tokens[-1] in policy.config.eos_token_ids)


@pytest.mark.exhaustive
@pytest.mark.smoke
@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_tokens_are_the_same_with_the_kernels_of_decode_steps(
    answer, expected, requests, ending, name
):
    steps = AttentionImpl(name, interpret=True, key_block=4)
    answered, *_ = answer(2, 2, attention=DecodingAttention(XLA, steps))
    assert_equal(answered, expected, requests, ending)


@pytest.mark.parametrize(
    ("num_slots", "num_rows", "num_buckets"),
    [
        (2, 2, 2),
        pytest.param(3, 5, 1, marks=pytest.mark.exhaustive),
        (16, 4, 1),
        (32, 1, 1),  # slots take over rollouts from slots that have just done so
    ],
)
def test_tokens_do_not_depend_on_the_schedule(
    answer, expected, requests, ending, num_slots, num_rows, num_buckets
):
    answered, *called = answer(num_slots, num_rows, num_buckets=num_buckets)
    assert_equal(answered, expected, requests, ending)
    assert_as_simulated(*called, expected, requests)


def test_tokens_do_not_depend_on_where_a_step_ends(params, ending, requests, expected):
    """Three steps of two, two and the other prompts; what is in flight changes its slots between.

    A step that is broken off changes nothing.
    """
    settings = dict(num_slots=4, num_rows=2, num_rollouts=G, max_tokens=T, num_context_tokens=5)
    ask = make_answer(ending, params, **settings, temperature=HOT, top_p=TOP_P, period=16)
    decode_params = backbone.to_decode_layout(params, ending.config, np.float32)
    flight, pool, answered, ages = None, [], {}, Counter()
    for new, num_wanted in (requests[:4], 2), (requests[4:6], 2), (requests[6:], 3):
        goal = {"in_flight": flight, "num_wanted": num_wanted}
        next(ask.queue.decode(decode_params, RNG, new, **goal))
        done = list(ask.queue.decode(decode_params, RNG, new, **goal))
        pool += new
        for places, rollouts in done:
            for row, place in enumerate(places):
                answered[pool[place].index] = jax.tree.map(operator.itemgetter(row), rollouts)
                ages.update(rollouts.age[row][rollouts.is_valid[row]].tolist())
        assert sum(len(places) for places, _ in done) == num_wanted
        if ask.queue.in_flight is not None:
            flight = ask.queue.in_flight.aged()
            pool = [pool[place] for place in flight.places]
            assert pool == list(flight.requests)
    assert ask.queue.in_flight is None and {0, 2} <= set(ages)
    rows = [answered[request.index] for request in requests]
    rows = jax.tree.map(lambda *rows: np.stack(rows), *rows)
    assert_equal(rows, expected, requests, ending)


def assert_as_simulated(queue, steps, expected, requests):
    """The queue's calls took the decode steps that `simulate` says."""
    waiting = [
        WaitingPrompt(len(r.prompt.tokens), r.index, len(r.prompt.patches)) for r in requests
    ]
    lengths = {
        request.index: [len(tokens) for tokens, *_ in plain]
        for request, plain in zip(requests, expected, strict=True)
    }
    simulated = simulation.simulate(queue.sizes, waiting, lengths, queue.prompts.buckets)
    assert [call.num_steps for call in simulated.calls] == steps
    assert sum(steps) == queue.num_steps


def test_tokens_do_not_depend_on_the_mesh(answer, expected, requests, ending, monkeypatch):
    """Prompts wait in three of four shards, and a prefill is worth it before all are free."""
    for module in (sampler, simulation):
        monkeypatch.setattr(module, "NUM_STEPS", 4)
    monkeypatch.setattr(schedule.Scheduler, "_prefill_cost", 7)
    answered, *called = answer(4, 2, make_mesh(2, 2, 2, 1))
    assert_equal(answered, expected, requests, ending)
    assert_as_simulated(*called, expected, requests)
