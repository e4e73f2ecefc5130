"""Which groups fill a step: mixed ones of later batches stand in for the others."""

import jax
import numpy as np
import pytest

from care_jax import distributed, dynamic
from care_jax.batch import Example, Scores
from care_jax.dynamic import Draw
from care_jax.prompt import prompt_sizes
from care_jax.rollout import Groups, Roster

B, G = 4, 3
ACC = {"mixed": [1, 0, 0], "right": [1, 1, 1], "wrong": [0, 0, 0]}


@pytest.fixture
def draw(responses, policy):
    """Makes draw number t of B prompts; tokens, examples and prompts say t and the place."""

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
        records = [policy.prompts.tokenize(example) for example in examples]
        roster = Roster.call(np.arange(B), examples, records)
        return Draw(roster, examples, records, Groups(rollouts, scores, None, np.zeros(B, bool)))

    return draw


def test_mixed_groups_keep_their_places_and_later_ones_fill_the_rest_in_order(draw):
    first = draw(0, "wrong", "mixed", "right", "wrong")
    draws = [first, draw(1, "right", "wrong", "wrong", "mixed"), draw(2, *["mixed"] * 4)]
    filled = dynamic.fill(draws)
    expected = [(1, 3), (0, 1), (2, 0), (2, 1)]
    assert [example.id for example in filled.examples] == [f"{t} {i}" for t, i in expected]
    np.testing.assert_array_equal(
        filled.groups.rollouts.tokens[:, 0, 0], [10 * t + i for t, i in expected]
    )
    np.testing.assert_array_equal(filled.groups.scores.acc, [ACC["mixed"]] * B)
    lengths = [len(record.tokens) for record in filled.records]
    assert lengths == [len(draws[t].records[i].tokens) for t, i in expected]
    np.testing.assert_array_equal(filled.roster.sizes, prompt_sizes(filled.records))
    assert filled.roster.sources == [f"source {t}" for t, _ in expected]


def test_what_cannot_be_filled_stays_where_it_is(draw):
    draws = [draw(0, "wrong", "right", "mixed", "wrong"), draw(1, "wrong", "mixed", *["right"] * 2)]
    filled = dynamic.fill(draws)
    assert [example.id for example in filled.examples] == ["1 1", "0 1", "0 2", "0 3"]
    kinds = ["mixed", "right", "mixed", "wrong"]
    np.testing.assert_array_equal(filled.groups.scores.acc, [ACC[kind] for kind in kinds])


def test_one_draw_is_the_step_whatever_it_holds(draw):
    only = draw(0, *["wrong"] * 4)
    assert dynamic.fill([only]) is only


@pytest.mark.parametrize(
    ("others", "expected"),
    [([], True), ([0], True), ([-3], True), ([1], False)],
)
def test_processes_go_on_until_the_last_of_them_is_full(draw, monkeypatch, others, expected):
    """This one is missing nothing; of each other the number it is missing is given."""
    first = draw(0, "mixed", "mixed", "wrong", "right")
    draws = [first, draw(1, "mixed", "wrong", "wrong", "mixed")]
    monkeypatch.setattr(distributed, "gather_json", lambda value: [value, *others])
    assert not dynamic.is_full([first])
    assert dynamic.is_full(draws) == expected


def test_survey_counts_every_group_that_was_drawn(draw):
    draws = [draw(0, "wrong", *["mixed"] * 3), draw(1, *["right"] * 4)]
    rollouts, scores, sources = dynamic.survey(draws)
    np.testing.assert_array_equal(scores.acc, [ACC["wrong"], *[ACC["mixed"]] * 3] + [[1] * 3] * 4)
    np.testing.assert_array_equal(rollouts.is_valid.sum(-1), [[1] * 3] * 4 + [[2] * 3] * 4)
    assert sources == ["source 0"] * 4 + ["source 1"] * 4
    assert rollouts.tokens is None and scores.is_think is None
