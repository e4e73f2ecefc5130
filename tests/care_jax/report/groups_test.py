import dataclasses

import numpy as np
import pytest
from sampled_group import (
    CONFIG,
    CONTEXT,
    CUE,
    EOS,
    HOSTILE,
    IMAGE,
    REPAIR,
    RIGHT,
    WORDING,
    WRONG,
    make_sampled,
)

from care_jax.report import groups

PAD = IMAGE + 1


def describe(sampled):
    return groups.describe(7, sampled, 0, WORDING)


def test_no_end_of_sequence_is_text():
    """Also where what pads a row ends it."""
    sampled = make_sampled()
    tokens = np.where(sampled.rollouts.tokens == EOS, PAD, sampled.rollouts.tokens)
    tokens[~sampled.rollouts.is_valid] = PAD
    wording = dataclasses.replace(
        WORDING,
        config=dataclasses.replace(CONFIG, eos_token_ids=(EOS, PAD)),
        token_bytes=[*WORDING.token_bytes, b"<pad>"],
    )
    sampled = sampled.replace(rollouts=sampled.rollouts.replace(tokens=tokens))
    assert groups.describe(7, sampled, 0, wording) == describe(make_sampled())


def test_roles_numbers_and_texts_of_a_repaired_group():
    group = describe(make_sampled())
    found = [
        (each["number"], each["role"], each["verdict"], each["distance"])
        for each in group["responses"]
    ]
    assert found == [
        (1, "anchor", "right", 0.0),
        (2, "hard negative", "wrong", 0.4),
        (3, "hard negative", "wrong", 1.0),
        (5, "reflected", "right", 0.0),
        (4, "unused", "right", 0.2),
    ]
    assert [each["raw"] for each in group["responses"]] == [1.5, -0.5, -0.75, 1.0, 0.0]
    assert [each["advantage"] for each in group["responses"]] == [0.75, -0.25, -0.375, 0.5, 0.0]
    assert [each["reward"] for each in group["responses"]] == [1, 0.1, 0, 1, 1]
    assert [each["text"] for each in group["responses"]] == [
        *(RIGHT, WRONG, HOSTILE, CONTEXT + CUE + REPAIR, RIGHT + " ")
    ]
    assert [each["answer"] for each in group["responses"]] == ["2", "3", "", "2", "2"]
    assert [each["reason"] for each in group["responses"]] == [
        *("same number", "another number", "no answer span", "same number", "same text")
    ]
    assert group["responses"][2]["notes"] == ["format not kept"]
    assert (group["outcome"], group["gold"], group["choices"]) == ("repaired", "2", ["1", "2"])


def test_a_missing_answer_is_noted_where_it_did_not_decide():
    """As under a reward function of one's own."""
    group = describe(make_sampled(reasons=("reward function",) * 5))
    assert group["responses"][2]["notes"] == ["no answer span", "format not kept"]


def test_components_of_a_reward_function_stand_with_their_response():
    """Also where it failed for one, and where the answer is a box."""
    components = [{"acc": 0.25, "near": 1 / 3}, {}, {"acc": 0}, {"acc": 1}, {"acc": 0.5}]
    sampled = make_sampled(components=components, answer=[1, 2, 3.5, 4])
    group = describe(sampled)
    found = {each["number"]: each["components"] for each in group["responses"]}
    assert found[1] == {"acc": 0.25, "near": 0.3333}
    assert found[2] == {} and found[5] == {"acc": 0.5}
    assert group["gold"] == "[1, 2, 3.5, 4]"
    plain = describe(make_sampled())
    assert all(each["components"] == {} for each in plain["responses"])


def test_what_the_reflection_changed_is_told_apart_from_what_it_was_given():
    group = describe(make_sampled())
    assert group["repair"] == {
        "of": 2, "cue": CUE, "before": "3", "after": "2", "has_context": True,
        "num_given": len(CONTEXT + CUE),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "roles", "outcome"),
    [
        ({"repair": None}, ["anchor", "hard negative", "hard negative", "unused"], "contrasted"),
        (
            {"repair": None, "is_rescue": True},
            ["pseudo-anchor", "hard negative", "hard negative", "unused"],
            "rescued",
        ),
        ({"repair": None, "has_roles": False}, [""] * 4, "mixed"),
    ],
)
def test_roles_are_those_of_the_objective(changes, roles, outcome):
    group = describe(make_sampled(**changes))
    assert [each["role"] for each in group["responses"]] == roles
    assert group["outcome"] == outcome and group["repair"] is None
    if not changes.get("has_roles", True):
        assert all(each["distance"] is each["raw"] is None for each in group["responses"])


@pytest.mark.parametrize(
    ("acc", "outcome"), [((1, 1, 1, 1), "all correct"), ((0, 0, 0, 0), "all wrong")]
)
def test_a_group_without_an_update_says_why(acc, outcome):
    sampled = make_sampled(acc=acc, repair=None)
    without = sampled.replace(credit=sampled.credit.replace(advantage=np.zeros((1, 4))))
    assert groups.outcome(without.take(0)) == outcome


@pytest.mark.parametrize("acc", [(0, 0, 0, 0), (1, 1, 1, 1)])
def test_a_group_that_is_trained_on_its_format_says_so(acc):
    """As under GRPO, where one of eight wrong answers is malformed."""
    sampled = make_sampled(acc=acc, repair=None, has_roles=False)
    assert groups.outcome(sampled.take(0)) == "equal acc"


def test_an_answer_is_shown_that_the_row_has_lost_with_its_context():
    """As under `prompt_only` with a cue that ends in the answer tag."""
    sampled = make_sampled(given=CONTEXT + CUE, repair=REPAIR)
    is_forced = sampled.rollouts.is_forced
    tokens = np.where(is_forced, 32, sampled.rollouts.tokens)
    tokens[0, -1][tokens[0, -1] == ord("<")] = 32
    shifted = sampled.replace(rollouts=sampled.rollouts.replace(tokens=tokens))
    group = describe(shifted)
    (reflected,) = [each for each in group["responses"] if each["role"] == "reflected"]
    assert "<answer>" not in reflected["text"] and reflected["answer"] == "2"
    assert group["repair"]["after"] == "2"


def test_a_slot_without_a_reflected_row_is_left_out():
    sampled = make_sampled().replace(has_reflection=np.array([False]))
    group = describe(sampled)
    assert [each["number"] for each in group["responses"]] == [1, 2, 3, 4]
    assert group["outcome"] == "contrasted"


def test_a_failed_repair_is_told_by_the_last_row():
    sampled = make_sampled()
    sampled.scores.acc[0, -1] = 0
    assert groups.outcome(sampled.take(0)) == "not repaired"


@pytest.mark.parametrize("given", ["", "<think>"])
def test_nothing_is_given_where_the_context_is_not_in_the_row(given):
    """As under `care.reflect_credit = "prompt_only"`, which leaves the tag."""
    repair = describe(make_sampled(given=given, repair=REPAIR + CUE))["repair"]
    assert (repair["has_context"], repair["num_given"]) == (False, len(given))


def test_groups_are_taken_from_each_outcome_in_turn():
    outcomes = ["rescued", "rescued", "repaired", "rescued", "all correct"]
    assert groups.choose(outcomes, 3) == [2, 0, 4]
    assert groups.choose(outcomes, 4) == [2, 0, 4, 1]
    assert groups.choose(outcomes, 1, turn=1) == [0]
    assert groups.choose(outcomes, 9) == [2, 0, 4, 1, 3]
    assert groups.choose(outcomes, 0) == groups.choose([], 3) == []


def test_distance_is_one_minus_the_cosine():
    h = np.array([[[2, 0], [0, 3], [-1, 0], [0, 0]]], np.float32)
    sampled = make_sampled(repair=None)
    sampled = sampled.replace(rollouts=sampled.rollouts.replace(embedding=h))
    assert groups.distances(sampled.take(0)) == [0, 1, 2, 1]


def test_numbers_that_json_cannot_say_are_none():
    assert groups.number(float("nan")) is groups.number(-np.inf) is None
    assert groups.number(np.float32(1 / 3)) == 0.3333


def test_the_prompt_is_shown_as_the_model_reads_it():
    group = describe(make_sampled())
    assert group["rendered"] == f"How many? {HOSTILE}<image>×6<eos>"
    assert group["images"] == [{"given": [40, 30], "resized": [48, 32], "tokens": 6}]
    text_only = describe(make_sampled(question="How many?", images=()))
    assert text_only["rendered"] == "How many?<eos>" and text_only["images"] == []
