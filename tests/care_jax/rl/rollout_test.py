"""The host side of a step: what is decoded, verified, repaired and joined, by scripted programs."""

import time

import jax
import numpy as np
import pytest
from rollout_script import CUE, LENGTHS, Script, said

from care_jax.rewards.verifier import Verifier
from care_jax.rl import rollout
from care_jax.rl.rollout import asked, roll_out

ACCS = ((1, 0, 0),) * len(LENGTHS)


@pytest.fixture
def roll(make_run, questions, policy):
    """Rolls out prompts under a script; returns the groups, the script and the examples."""

    def roll(changes=(), accs=ACCS, seed=0, reward="", **script_changes):
        examples = questions(LENGTHS[: len(accs)])
        script = Script(policy, examples, accs, repaired=(1, 4))
        vars(script).update(script_changes)
        run = make_run({"care.cue": CUE, **dict(changes)})
        prompts = [policy.prompts.tokenize(example) for example in examples]
        given = asked(np.arange(len(examples)), examples, prompts)
        rng = jax.random.key(seed)
        with Verifier(reward=reward) as verifier:
            groups = roll_out(run, script.programs(), None, rng, given, verifier)
        return groups, script, examples

    return roll


def texts(policy, rollouts):
    """The text of every row, [B][R]; EOS stays out."""
    is_text = rollouts.is_valid & (rollouts.tokens != policy.config.eos_token_ids[0])
    return [
        [policy.tokenizer.decode(row[mask]) for row, mask in zip(*group, strict=True)]
        for group in zip(rollouts.tokens, is_text, strict=True)
    ]


def test_rows_come_back_to_their_prompts_whichever_is_done_first(roll, policy):
    groups, _, _ = roll()
    for i, rows in enumerate(texts(policy, groups.rollouts)):
        assert rows[:3] == [
            said(f"row 0 of {i}", i),
            said(f"row 1 of {i}", 99),
            said(f"row 2 of {i}", 99),
        ]
    np.testing.assert_array_equal(groups.scores.acc[:, :3], [[1, 0, 0]] * 6)
    np.testing.assert_array_equal(groups.subgroup.hard_negative, [2] * 6)


def test_hard_negative_is_repaired_from_its_own_rationale(roll, policy):
    groups, script, _ = roll()
    assert script.forced == {i: f"<think>row 2 of {i}{CUE}" for i in range(6)}
    rows = texts(policy, groups.rollouts)
    assert rows[1][3] == f"<think>row 2 of 1{CUE} So</think><answer>1</answer>"
    np.testing.assert_array_equal(groups.scores.acc[:, 3], [0, 1, 0, 0, 1, 0])
    reasons = np.where(groups.scores.acc == 1, "same text", "another number")
    np.testing.assert_array_equal(groups.reasons, reasons)
    np.testing.assert_allclose(groups.scores.reward[:, 3], [0.1, 1, 0.1, 0.1, 1, 0.1], rtol=1e-6)
    assert groups.has_reflection.all()
    length = [len(script.encode(context)) for context in script.forced.values()]
    np.testing.assert_array_equal(groups.rollouts.is_forced.sum(-1)[:, 3], length)


def test_only_prompts_with_an_anchor_and_a_failure_are_repaired(roll):
    accs = ((1, 1, 1), (0, 0, 0), (1, 0, 0), (0, 1, 0))
    groups, script, _ = roll(accs=accs)
    np.testing.assert_array_equal(groups.has_reflection, [False, False, True, True])
    assert set(script.forced) == {2, 3}
    np.testing.assert_array_equal(groups.rollouts.is_valid[:, 3].any(-1), groups.has_reflection)
    np.testing.assert_array_equal(groups.scores.reward[:2, 3], 0)


@pytest.mark.parametrize("changes", [{"rl.objective": "grpo"}, {"care.reflect": False}])
def test_no_row_is_reflected_where_the_objective_has_none(roll, changes):
    groups, script, _ = roll(changes)
    assert groups.rollouts.tokens.shape[1] == groups.scores.acc.shape[1] == 3
    assert not groups.has_reflection.any() and "reflect" not in script.calls
    assert (groups.subgroup is None) == ("rl.objective" in changes)


@pytest.mark.parametrize(("mode", "cue"), [("no_cue", ""), ("shuffled", " no. Wait,")])
def test_mode_changes_the_words_behind_the_rationale(roll, mode, cue):
    _, script, _ = roll({"care.reflect_mode": mode})
    assert script.forced[0] == f"<think>row 2 of 0{cue}"


def test_resampled_rows_start_from_the_prompt_alone(roll, policy):
    """The paper's control has neither cue nor failed rationale."""
    groups, script, _ = roll({"care.reflect_mode": "resample"}, accs=((1, 0, 0), (1, 1, 1)))
    assert script.forced == {0: ""}
    assert not groups.rollouts.is_forced.any()
    assert texts(policy, groups.rollouts)[0][3] == " So</think><answer>98</answer>"
    np.testing.assert_array_equal(groups.has_reflection, [True, False])


def test_a_failure_without_think_tags_is_repaired_before_its_answer(roll, policy):
    """With its answer in the context the row would hold two answers, and acc 0 for certain."""
    groups, script, _ = roll(failure=lambda i, g: f"row {g} of {i} <answer>99</answer>")
    assert script.forced[1] == f"<think>row 2 of 1 {CUE}"
    np.testing.assert_array_equal(groups.scores.acc[:, 3], [0, 1, 0, 0, 1, 0])


def test_context_is_cut_to_its_budget_before_the_cue(roll):
    _, script, _ = roll({"care.max_context": 4})
    kept = script.policy.tokenizer.decode(script.encode("<think>row 2 of 0")[:4])
    assert script.forced[0] == f"{kept}{CUE}" != f"<think>row 2 of 0{CUE}"


def test_a_cue_may_leave_only_the_answer_to_be_sampled(roll, policy):
    """As in the released code: it closes the rationale and opens the answer."""
    form = "\nFix:\n</think><answer>"
    groups, script, _ = roll({"care.cue": form}, repair=lambda answer: f"{answer}</answer>")
    assert script.forced[1] == f"<think>row 2 of 1{form}"
    assert texts(policy, groups.rollouts)[1][3] == f"<think>row 2 of 1{form}1</answer>"
    np.testing.assert_array_equal(groups.scores.acc[:, 3], [0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(groups.scores.fmt[:, 3], 1)
    sampled = groups.rollouts.is_valid[1, 3] & ~groups.rollouts.is_forced[1, 3]
    assert groups.scores.is_answer[1, 3, sampled].all()


def test_of_an_answer_behind_a_form_prompt_only_trains_the_answer(roll, policy):
    """The released code has both."""
    changes = {"care.cue": "\nFix:\n</think><answer>", "care.reflect_credit": "prompt_only"}
    groups, _, _ = roll(changes, repair=lambda answer: f"{answer}</answer>")
    assert texts(policy, groups.rollouts)[1][3] == "<think>1</answer>"
    np.testing.assert_array_equal(groups.scores.acc[:, 3], [0, 1, 0, 0, 1, 0])
    is_trained = groups.rollouts.is_valid[1, 3] & ~groups.rollouts.is_forced[1, 3]
    assert groups.scores.is_answer[1, 3, is_trained].all()


def test_prompt_only_keeps_of_the_context_the_tag_alone_and_the_verdict(roll, policy):
    groups, _, _ = roll({"care.reflect_credit": "prompt_only"})
    assert texts(policy, groups.rollouts)[1][3] == "<think> So</think><answer>1</answer>"
    forced = groups.rollouts.tokens[1, 3, groups.rollouts.is_forced[1, 3]]
    assert policy.tokenizer.decode(forced) == "<think>"
    answer = policy.tokenizer.decode(groups.rollouts.tokens[1, 3, groups.scores.is_answer[1, 3]])
    assert answer.endswith(f"<answer>1</answer>{policy.tokenizer.eos_token}")
    np.testing.assert_array_equal(groups.scores.acc[:, 3], [0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(groups.scores.fmt[:, 3], 1)


def test_a_fresh_rollout_has_no_context_to_leave_out(roll, monkeypatch):
    monkeypatch.setattr(rollout.reflection, "without_context", None)
    changes = {"care.reflect_credit": "prompt_only", "care.reflect_mode": "resample"}
    groups, _, _ = roll(changes, repair=lambda answer: said("again", answer))
    assert groups.has_reflection.any()


def test_nothing_is_repaired_where_no_rollout_failed(roll):
    groups, script, _ = roll(accs=((1, 1, 1), (0, 0, 0)))
    assert not script.forced and not groups.has_reflection.any()
    assert not groups.rollouts.is_valid[:, 3].any()


def test_rollouts_are_verified_as_they_finish_and_no_key_serves_twice(roll, monkeypatch):
    judged, calls = [], []
    verify_parsed = Verifier.verify_parsed

    def watched(self, texts, parsed, examples):
        judged.append(len(texts))
        calls.append("judge")
        return verify_parsed(self, texts, parsed, examples)

    monkeypatch.setattr(Verifier, "verify_parsed", watched)
    _, script, _ = roll()
    assert judged == [6, 6, 6, *[1] * 6]  # two groups of three at a time, then the reflected rows
    assert script.calls == ["decode"] * 3 + ["select"] + ["reflect"] * 6
    keys = [key for of_program in script.keys.values() for key in of_program]
    assert len(keys) == len(set(keys)) == 3 * 6
    _, other, _ = roll(seed=1)
    assert not set(other.keys["decode"]) & set(keys)


def test_rewards_weigh_the_format_as_configured(roll):
    groups, _, _ = roll({"rl.format_weight": 0.4})
    np.testing.assert_allclose(groups.scores.reward[:, :3], [[1, 0.4, 0.4]] * 6, rtol=1e-6)


def by_number(question, responses, example):
    """Row 0 is right, unless the group or its second try cannot be judged."""
    if example.id in ("q1", "q3") and (len(responses) == 1 or example.id == "q3"):
        raise OSError("no judge")
    return [{"acc": 0.8 if "row 0 of" in text else 0.0, "all": 1.0} for text in responses]


def test_a_group_that_was_not_judged_is_neither_rescued_nor_repaired(roll):
    """Group 3 has no verdicts, group 1 none of its second try; the others are right once."""
    groups, script, _ = roll({"rl.format_weight": 0.0}, reward=by_number)
    np.testing.assert_array_equal(groups.subgroup.has_update, [1, 1, 1, 0, 1, 1])
    assert set(script.forced) == {0, 1, 2, 4, 5}
    np.testing.assert_array_equal(groups.has_reflection, [1, 0, 1, 0, 1, 1])
    np.testing.assert_array_equal(groups.rollouts.is_valid[:, 3].any(-1), groups.has_reflection)
    np.testing.assert_array_equal(groups.scores.acc[[0, 3], :3], [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(groups.scores.reward[0, :3], [0.8, 0, 0], rtol=1e-6)
    assert not groups.scores.reward[3].any()
    assert groups.components[0].tolist()[:2] == [{"acc": 0.8, "all": 1}, {"acc": 0, "all": 1}]
    assert groups.components[3].tolist() == [{}] * 4
    assert [row[3] for row in groups.components.tolist()] == [
        {} if place in (1, 3) else {"acc": 0.0, "all": 1.0} for place in range(6)
    ]
    assert groups.reasons[3].tolist() == ["failed: OSError"] * 3 + [""]


def test_a_response_that_was_not_judged_is_no_failure_to_repair(roll):
    """Of each group row 0 is right and row 2 is not judged, so that row 1 is repaired."""

    def judge(question, responses, example):
        return [{} if "row 2 of" in text else {"acc": "row 0 of" in text} for text in responses]

    groups, _, _ = roll(reward=judge)
    np.testing.assert_array_equal(groups.subgroup.hard_negative, [1] * 6)
    np.testing.assert_array_equal(groups.subgroup.is_negative, [[False, True, False]] * 6)
    np.testing.assert_array_equal(groups.trained_scores.acc[:, :3], [[1, 0, 0.5]] * 6)
    reward = groups.scores.reward
    np.testing.assert_allclose(groups.trained_scores.reward[:, 2], reward[:, [0, 1, 3]].mean(1))
    np.testing.assert_array_equal(groups.trained_scores.reward[:, :2], reward[:, :2])
    assert not reward[:, 2].any()  # as the metrics count it


def test_groups_are_decoded_while_a_reward_function_judges_the_others(roll, tmp_path):
    """The first group waits for a file that is written when the last was decoded."""
    path = tmp_path / "decoded"

    def waits(question, responses, example):
        while not path.exists():
            time.sleep(0.01)
        return [{"acc": 0.0}] * len(responses)

    groups, _, _ = roll({"rl.objective": "grpo"}, reward=waits, at_end=path.touch)
    assert set(groups.reasons.flat) == {"reward function"}
