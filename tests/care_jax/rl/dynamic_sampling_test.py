"""Which groups fill a step: mixed ones of later batches stand in for the others."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import STEPS, B, R, groups_of, scripted_update, trees_of

from care_jax.batch import Example, Scores
from care_jax.devices import distributed
from care_jax.prompts.builder import prompt_sizes
from care_jax.rl import dynamic_sampling
from care_jax.rl.rollout import asked, gather_groups

G = R
ACC = {"mixed": [1, 0, 0], "right": [1, 1, 1], "wrong": [0, 0, 0]}


@pytest.fixture
def draw(responses, policy):
    """Makes draw number t of B prompts; tokens, examples and prompts say t and the index."""

    def draw(t, *kinds):
        rollouts = jax.tree.map(np.array, responses)
        rollouts.tokens[:] = 10 * t + np.arange(B)[:, None, None]
        rollouts.is_valid[:] = np.arange(9) < t + 1
        acc = np.array([ACC[kind] for kind in kinds], np.float32)
        ones = np.ones((B, G), np.float32)
        spans = np.zeros(rollouts.tokens.shape, bool)
        scores = Scores(acc, ones, 0.9 * acc + 0.1, spans, spans, ones, ones, ones > 0)
        examples = [
            Example(f"{t} {i}", f"source {t}", (), "1?" + " 1" * (10 * t + i), str(i))
            for i in range(B)
        ]
        prompts = [policy.prompts.tokenize(example) for example in examples]
        reasons = np.array([[f"{t}.{i}"] * G for i in range(B)], object)
        groups = asked(np.arange(B), examples, prompts)
        return groups.replace(rollouts=rollouts, scores=scores, reasons=reasons)

    return draw


def test_mixed_groups_keep_their_places_and_later_ones_fill_the_rest_in_order(draw):
    first = draw(0, "wrong", "mixed", "right", "wrong")
    draws = [first, draw(1, "right", "wrong", "wrong", "mixed"), draw(2, *["mixed"] * 4)]
    filled = dynamic_sampling.choose_mixed(draws)
    expected = [(1, 3), (0, 1), (2, 0), (2, 1)]
    assert [example.id for example in filled.examples] == [f"{t} {i}" for t, i in expected]
    np.testing.assert_array_equal(
        filled.rollouts.tokens[:, 0, 0], [10 * t + i for t, i in expected]
    )
    np.testing.assert_array_equal(filled.scores.acc, [ACC["mixed"]] * B)
    assert filled.reasons.tolist() == [[f"{t}.{i}"] * G for t, i in expected]
    lengths = [len(prompt.tokens) for prompt in filled.prompts]
    assert lengths == [len(draws[t].prompts[i].tokens) for t, i in expected]
    np.testing.assert_array_equal(filled.sizes, prompt_sizes(filled.prompts))
    assert filled.sources.tolist() == [f"source {t}" for t, _ in expected]
    assert filled.index.tolist() == list(range(B))


def test_what_cannot_be_filled_stays_where_it_is(draw):
    draws = [draw(0, "wrong", "right", "mixed", "wrong"), draw(1, "wrong", "mixed", *["right"] * 2)]
    filled = dynamic_sampling.choose_mixed(draws)
    assert [example.id for example in filled.examples] == ["1 1", "0 1", "0 2", "0 3"]
    kinds = ["mixed", "right", "mixed", "wrong"]
    np.testing.assert_array_equal(filled.scores.acc, [ACC[kind] for kind in kinds])


def test_one_draw_is_the_step_whatever_it_holds(draw):
    only = draw(0, *["wrong"] * 4)
    assert dynamic_sampling.choose_mixed([only]) is only


@pytest.mark.parametrize(
    ("others", "expected"),
    [([], True), ([0], True), ([-3], True), ([1], False)],
)
def test_processes_go_on_until_the_last_of_them_is_full(draw, monkeypatch, others, expected):
    """This one is missing nothing; of each other the number it is missing is given."""
    first = draw(0, "mixed", "mixed", "wrong", "right")
    draws = [first, draw(1, "mixed", "wrong", "wrong", "mixed")]
    monkeypatch.setattr(distributed, "gather_json", lambda value: [value, *others])
    assert not dynamic_sampling.is_full([first])
    assert dynamic_sampling.is_full(draws) == expected


@pytest.mark.parametrize(("others", "expected"), [([], True), ([0, 0, 0], True), ([0, 2], False)])
def test_a_process_without_a_verdict_asks_for_no_more(draw, monkeypatch, others, expected):
    """A reward function that fails on all of its groups would be asked `max_tries` times."""
    failed = np.array([[{}] * G] * B, object)
    judged = failed.copy()
    judged[2, 1] = {"acc": 0.0}
    first, second = (draw(t, *["wrong"] * B) for t in range(2))
    monkeypatch.setattr(distributed, "gather_json", lambda value: [value, *others])
    assert dynamic_sampling.is_full([first.replace(components=failed)]) == expected
    draws = [first.replace(components=failed), second.replace(components=judged)]
    assert not dynamic_sampling.is_full(draws)
    assert not dynamic_sampling.is_full([first])  # the built-in verifier always judges


def test_a_step_that_nobody_judges_takes_one_batch(run_loop):
    class Unjudged(DynamicScript):
        def roll_out(self, *arguments):
            groups = super().roll_out(*arguments)
            return groups.replace(components=np.array([[{}] * R] * B, object))

    script, _, _ = run_loop(make_script=Unjudged, changes=DAPO)
    assert script.numbers == [0, 1, 2, 3]


def test_gathered_groups_leave_texts_and_spans_behind(draw):
    seen = gather_groups(draw(1, "wrong", *["mixed"] * 3))
    np.testing.assert_array_equal(seen.scores.acc, [ACC["wrong"], *[ACC["mixed"]] * 3])
    np.testing.assert_array_equal(seen.rollouts.is_valid.sum(-1), [[2] * 3] * 4)
    assert seen.sources.tolist() == ["source 1"] * B and seen.sizes.shape == (B, 2)
    assert seen.rollouts.tokens is None and seen.scores.is_think is None
    assert seen.examples is None and seen.reasons is None


MAX_TRIES = 4
DAPO = {"rl.objective": "dapo", "dapo.max_tries": MAX_TRIES, "dapo.overlong_share": 0.0}
# Prompts whose group is mixed, by draw and step; elsewhere all rollouts are right.
MIXED = (
    ((0, 2), (0, 1, 2, 3), (), ()),
    ((1,), (), (0, 1, 2, 3), ()),
    ((0, 1, 3), (), (), (2,)),
    ((), (), (), ()),
)


class DynamicScript:
    """Stands in for rollout and update; a response's first token says draw, step and prompt."""

    def __init__(self, responses, dies_at=None):
        self.responses, self.dies_at = responses, dies_at
        self.number_of = {
            str(jax.random.key_data(jax.random.fold_in(jax.random.key(3), step + draw * 2**24))): (
                step + draw * STEPS
            )
            for step in range(STEPS)
            for draw in range(MAX_TRIES)
        }
        self.numbers, self.prompts, self.updated = [], {}, []

    def roll_out(self, run, programs, params, rng, questions, verifier, carried=None):
        number = self.number_of[str(jax.random.key_data(rng))]
        if len(self.numbers) == self.dies_at:
            raise KeyboardInterrupt
        self.run = run
        self.numbers.append(number)
        self.prompts[number] = [p.tokens.tolist() for p in questions.prompts]
        acc = np.ones((B, R), np.float32)
        acc[list(MIXED[number // STEPS][number % STEPS]), 1] = 0
        groups = groups_of(self.responses, questions=questions)
        tokens = groups.rollouts.tokens.copy()
        tokens[:, :, 0] = 10 * number + np.arange(B)[:, None]
        return groups.replace(
            rollouts=groups.rollouts.replace(tokens=tokens),
            scores=groups.scores.replace(acc=acc, reward=acc),
        )

    def update(self, state, batch):
        self.updated.append(
            {prompt: {rows[0] for rows in rows} for prompt, rows in trees_of(batch).items()}
        )
        logp = jnp.zeros(batch.rows.tokens.shape)
        return (
            state.replace(step=state.step + 1),
            dict.fromkeys(("loss", "grad_norm"), jnp.float32(0)),
            logp,
        )

    def programs(self):
        return scripted_update(
            to_decode_layout=lambda params: params,
            credit=lambda *groups: self.run.objective.credit(*groups),
            nll=lambda params, batch: jnp.float32(1),
            update=self.update,
        )


@pytest.fixture
def filled(run_loop):
    return run_loop(make_script=DynamicScript, changes=DAPO)


def test_a_step_draws_until_it_is_full_of_mixed_groups_or_out_of_tries(filled):
    """Draw t of step s is number s + t * STEPS here; no two draws share a prompt or key."""
    script, _, metrics = filled
    assert script.numbers == [0, 4, 8, 1, 2, 6, 3, 7, 11, 15]
    drawn = [str(prompt) for number in range(4) for prompt in script.prompts[number]]
    assert len(set(drawn)) == 4 * B
    names = ("dynamic/tries", "dynamic/missing", "dynamic/unused", "dynamic/kept_rate")
    assert [[record[name] for name in names] for record in metrics] == [
        [3, 0, 2, 6 / 12],
        [1, 0, 0, 1],
        [2, 0, 0, 4 / 8],
        [4, 3, 0, 1 / 16],
    ]


def test_updates_get_the_mixed_groups_with_their_prompts_and_nothing_else(filled):
    script, _, _ = filled
    expected = [[(0, 0), (4, 1)], [(0, 2), (8, 0)]]  # number and place of the draws; 8, 1 is unused
    expected += [[(n, place) for place in half] for n in (1, 6) for half in ((0, 1), (2, 3))]
    expected += [[(11, 2)]]  # the other update of step 3 has no mixed group, and is left out
    assert script.updated == [
        {tuple(script.prompts[number][place]): {10 * number + place} for number, place in update}
        for update in expected
    ]


def test_metrics_tell_of_all_that_was_drawn_and_not_of_what_was_chosen(filled, responses):
    *_, metrics = filled
    # Of 36 rollouts in step 0 six are wrong.
    assert metrics[0]["acc"] == pytest.approx(30 / 36)
    num_sampled = int(responses.is_valid.sum())
    assert [record["decoded_tokens"] for record in metrics] == [
        num_sampled * num_draws for num_draws in (3, 4, 6, 10)
    ]


def test_resumed_dynamic_sampling_draws_what_the_unbroken_run_did(run_loop, filled):
    """Killed in the second draw of its last step, the checkpoint before it two steps old."""
    with pytest.raises(KeyboardInterrupt):
        run_loop("broken", 7, DynamicScript, DAPO)
    resumed, _, metrics = run_loop("broken", None, DynamicScript, DAPO)
    whole, _, expected = filled
    assert resumed.numbers == whole.numbers[4:] == [2, 6, 3, 7, 11, 15]
    assert resumed.updated == whole.updated[2 * 2 :]
    for got, want in zip(metrics, expected, strict=True):
        timings = {name for name in want if re.search("second|device_idle|host/", name)}
        assert all(got[name] == value for name, value in want.items() if name not in timings)


def test_one_try_draws_no_more_and_drops_what_is_not_mixed(run_loop):
    script, _, metrics = run_loop(make_script=DynamicScript, changes=DAPO | {"dapo.max_tries": 1})
    assert script.numbers == [0, 1, 2, 3]
    assert [record["dynamic/missing"] for record in metrics] == [2, 0, 4, 4]
    assert [len(update) for update in script.updated[:2]] == [1, 1]
