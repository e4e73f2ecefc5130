"""The probe: which questions are asked again and behind what, and the figures it says of them."""

import csv
import dataclasses

import jax
import numpy as np
import pytest
from rollout_script import CUE, LENGTHS, Script, said

from care_jax.commands import probe
from care_jax.rl.rollout_programs import rollout_sizes
from models import backbone

ACCS = ((1, 0, 0), (1, 1, 1), (0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 0))
MIXED = (0, 3, 4, 5)  # questions with both outcomes
CUED = (0, 4)  # those that a cue repairs


@pytest.fixture
def drawn():
    """The arguments of the decoder that answers again."""
    return {}


@pytest.fixture
def probed(drawn, make_run, questions, policy, monkeypatch):
    """Probes scripted programs; returns the outcomes, and by way what each question was given."""

    def probed(
        rationale="So {} and 2.",
        failure=None,
        reward=None,
        other_words="",
        cue=CUE,
        again=None,
        ids=(),
        **changes,
    ):
        examples = [
            dataclasses.replace(
                example, source=f"kind_{i % 2}", rationale=rationale.format(example.answer)
            )
            for i, example in enumerate(questions(LENGTHS))
        ]
        for i, first in (again or {}).items():
            examples[i] = examples[first]
        for i, name in enumerate(ids):
            examples[i] = dataclasses.replace(examples[i], id=name)
        script = Script(policy, examples, ACCS, CUED)
        script.failure = failure or (lambda i, g: said(f"So {i + g} and 2.", 99))
        forced, sizes_seen = [], []

        class Queue:
            def __init__(self, programs, prompts, sizes, clock):
                sizes_seen.append(sizes)

            def decode(self, params, rng, requests):
                given = {}
                for number, request in enumerate(requests):
                    i = script.index_of[len(request.prompt.tokens)]
                    given[i] = policy.tokenizer.decode(request.context)
                    is_cued = given[i].endswith(cue)
                    is_right = i in CUED if is_cued else "</think" in given[i]
                    ending = "><answer>" if "</think" in given[i] else " So</think><answer>"
                    row = script.response(f"{ending}{i if is_right else 98}</answer>")
                    row = np.append(request.context, row)
                    yield [number], script.rollouts([[row]], [[len(request.context)]])
                forced.append(given)

        def compile_rollout(run, *_):
            assert run.config.care.success == "acc"
            return script.programs()

        def compile_again(run, **sampling):
            drawn.update(sampling)

        monkeypatch.setattr(probe, "compile_rollout", compile_rollout)
        monkeypatch.setattr(probe, "compile_decoder", compile_again)
        monkeypatch.setattr(probe, "DecodeQueue", Queue)
        run = make_run({"care.cue": cue, "rl.max_response_tokens": 48, **changes})
        run = dataclasses.replace(run, reward=reward)
        params = backbone.init(policy.config, jax.random.key(0))
        outcomes = probe.probe(run, params, examples, len(examples), other_words=other_words)
        ways = [way for way in probe.WAYS[1:] if way in outcomes.values]
        return outcomes, dict(zip(ways, forced, strict=True)), sizes_seen[0], rollout_sizes(run)[1]

    return probed


def test_questions_with_both_outcomes_are_asked_again_behind_each_context(probed):
    outcomes, forced, _, _ = probed()
    assert outcomes.num_questions == 6 and len(outcomes.sources) == 4
    wrong = {i: f"<think>So {i + 2} and 2." for i in MIXED}  # of the last failure
    assert forced["resample"] == dict.fromkeys(MIXED, "")
    assert forced["no_cue"] == wrong
    assert forced["cue"] == {i: text + CUE for i, text in wrong.items()}
    assert forced["shuffled"] == {i: f"{text} no. Wait," for i, text in wrong.items()}
    assert forced["forced_right"] == {i: f"<think>So {i} and 2.</think" for i in MIXED}


def test_other_words_can_stand_in_the_place_of_the_cue(probed):
    _, forced, _, _ = probed(other_words=" So it is.")
    assert forced["other_words"] == {i: f"<think>So {i + 2} and 2. So it is." for i in MIXED}
    assert forced["cue"] == {i: f"<think>So {i + 2} and 2.{CUE}" for i in MIXED}


def test_rates_count_right_answers_and_wrong_rationales(probed):
    """Question 4's last rollout is its nearest failure by script; 2 of the 4 are repaired."""
    outcomes, *_ = probed(other_words=" So it is.")
    rates = {(rate.source, rate.measure): rate for rate in outcomes.rates()}
    assert rates["all", "first"].rate == pytest.approx((1 + 2 + 1 + 1) / 3 / 4)
    assert {name: rates["all", name].rate for name in probe.WAYS[1:]} == {
        "cue": 0.5,
        "no_cue": 0.0,
        "shuffled": 0.0,
        "resample": 0.0,
        "forced_right": 1.0,
        "other_words": 0.0,
    }
    assert rates["all", "negative_is_wrong"].rate == 1.0
    assert [rates[f"kind_{k}", "cue"][2:] for k in (0, 1)] == [(2.0, 2), (0.0, 2)]


def test_answers_that_a_reward_function_fails_on_are_not_counted(probed):
    """Of the second tries it judges none for question 0."""

    def reward(question, responses, example):
        if len(responses) == 1 and example.answer == "0":
            raise OSError("no judge")
        return [{"acc": f"<answer>{example.answer}<" in text} for text in responses]

    outcomes, *_ = probed(reward=reward)
    of_all = {rate.measure: rate for rate in outcomes.rates() if rate.source == "all"}
    assert of_all["first"].total == 4
    assert of_all["cue"] == ("all", "cue", 1.0, 3)  # question 4, among 3, 4 and 5
    assert of_all["forced_right"] == ("all", "forced_right", 3.0, 3)


def test_right_rationales_of_failures_are_not_counted_as_wrong(probed):
    outcomes, *_ = probed(failure=lambda i, g: said(f"First 2, then {i}.", 99))
    assert outcomes.values["negative_is_wrong"].tolist() == [0.0] * 4


def test_decoding_has_room_for_the_longest_context(probed):
    _, forced, sizes, shipped = probed(rationale="So {} and 2." + " and" * 20)
    assert sizes == dataclasses.replace(shipped, num_context_tokens=sizes.num_context_tokens)
    assert shipped.num_context_tokens < 20 < sizes.num_context_tokens < 48
    assert len(forced["forced_right"]) == 4


def test_data_without_rationales_has_no_forced_rationale(probed):
    outcomes, forced, _, _ = probed(rationale="")
    assert "forced_right" not in forced and "negative_is_wrong" not in outcomes.values
    assert "no rationales" in probe.summary(outcomes, outcomes.rates(), "sft 3")[-1]


def test_a_rationale_that_leaves_no_room_for_an_answer_is_not_forced(probed):
    outcomes, forced, _, _ = probed(rationale="So {} and 2." + " 1" * 60)
    assert "forced_right" not in forced
    assert outcomes.values["negative_is_wrong"].tolist() == [1.0] * 4
    told = probe.summary(outcomes, outcomes.rates(), "sft 3")[-1]
    assert "leaves room for the answer; raise rl.max_response_tokens: the gain of" in told


def test_room_is_for_the_whole_answer(probed, policy):
    """Of 48 tokens `room` remain behind the context; the answer and the end of the turn need 6."""
    needs = len(policy.tokenizer.encode("><answer>3</answer>")) + 1
    for room, is_forced in ((needs, True), (needs - 1, False)):
        context = policy.tokenizer.encode("<think>So 3 and 2.</think")
        _, forced, _, _ = probed(rationale="So {} and 2." + " no" * (48 - room - len(context)))
        assert ("forced_right" in forced) == is_forced


def test_tags_in_the_datas_rationale_are_taken_off(probed):
    rationale = "<think>So {0}.</think><answer>{0}</answer>"
    outcomes, forced, _, _ = probed(rationale, failure=lambda i, g: said(f"So {i}.", 99))
    assert forced["forced_right"] == {i: f"<think>So {i}.</think" for i in MIXED}
    assert outcomes.values["negative_is_wrong"].tolist() == [0.0] * 4


def test_a_cue_of_one_word_is_not_shuffled(probed):
    outcomes, forced, _, _ = probed(cue=" Wait,")
    assert "shuffled" not in outcomes.values and "shuffled" not in forced
    assert forced["cue"] == {i: f"<think>So {i + 2} and 2. Wait," for i in MIXED}


def test_groups_whose_first_tries_were_not_all_judged_are_left_out(probed):
    def reward(question, responses, example):
        accs = [{"acc": f"<answer>{example.answer}<" in text} for text in responses]
        return [None, *accs[1:]] if example.answer == "3" else accs

    outcomes, forced, _, _ = probed(reward=reward)
    assert outcomes.num_questions == 6 and len(outcomes.sources) == 3
    assert sorted(forced["cue"]) == [0, 4, 5]


def test_other_answers_are_drawn_as_rl_draws_a_reflected_one(probed, drawn):
    """And the groups are those of right answers, whatever RL takes for a success."""
    changes = {"care.reflect_temperature": 0.6, "care.reflect_top_p": 0.95}
    probed(**changes, **{"care.success": "reward"})
    assert (drawn["temperature"], drawn["top_p"]) == (0.6, 0.95)
    probed()
    assert (drawn["temperature"], drawn["top_p"]) == (1.0, 1.0)


def test_a_question_that_is_drawn_again_is_asked_once(probed):
    outcomes, forced, _, _ = probed(again={4: 0, 5: 3})
    assert outcomes.num_questions == 4 and len(forced["cue"]) == 2
    assert len({0, 4} & set(forced["cue"])) == len({3, 5} & set(forced["cue"])) == 1


def test_questions_with_one_id_are_not_one_question(probed):
    """Ids are unique inside a file, and two files may have one name."""
    outcomes, forced, _, _ = probed(ids=["7"] * 6)
    assert outcomes.num_questions == 6 and set(forced["cue"]) == set(MIXED)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (40, r"and a cue of 40 tokens leave no token .*; set care\.max_context to 4 or less"),
        (
            47,
            r"^a cue of 47 tokens and a context leave no token .*; shorten care\.cue, or set that",
        ),
    ],
)
def test_words_that_leave_no_room_are_refused_before_anything_is_decoded(probed, number, message):
    with pytest.raises(ValueError, match=message):
        probed(other_words=" no" * number)


@pytest.mark.parametrize(
    ("rationale", "right", "is_other"),
    [
        ("There are 4. Add 2.", "Add 2 to what I see: 4.", False),
        ("There are 5. Add 2.", "There are 4. Add 2.", True),
        ("There are 4. Add 2, so 4.", "There are 4. Add 2.", True),
        ("It is 1.5", "It is 1.5", False),
        ("Count the  Circles.", "Count the circles.", False),
        ("Look at the circles.", "Count the circles.", True),
        ("It costs 1,000 dollars.", "It costs 1000.0 dollars.", False),
        ("One of 1,2 and 3", "One of 12 and 3", True),
        ("So x = -4", "So x = 4", True),
        ("So x = \N{MINUS SIGN}4", "So x = -4", False),
        ("One half is .5", "0.5 is one half", False),
        ("10 -3 and (2) -1", "10, 3, 2, 1", False),
        ("At step-3", "At step 3", False),
        ("7-3 and 9 - 2", "9, 7, 3, 2", False),
    ],
)
def test_rationales_differ_by_their_numbers_or_without_any_by_their_words(
    rationale, right, is_other
):
    assert probe.is_other(rationale, right) == is_other


def outcomes_of(**values):
    arrays = {name: np.array(value, float) for name, value in values.items()}
    return probe.Outcomes(9, ["a", "a", "b", "b"], arrays)


@pytest.mark.parametrize(
    ("forced_right", "wrong", "verdict"),
    [
        ([1, 1, 1, 0], [1, 1, 1, 0], ": a task for reflection"),
        ([1, 1, 1, 0], [1, 1, 0, 0], "not a task for reflection"),
        ([1, 1, 0, 0], [1, 1, 1, 1], "not a task for reflection"),
    ],
)
def test_verdict_needs_both_the_gain_and_wrong_rationales(forced_right, wrong, verdict):
    outcomes = outcomes_of(
        resample=[0, 1, 0, 0], forced_right=forced_right, negative_is_wrong=wrong
    )
    *lines, last = probe.summary(outcomes, outcomes.rates(), "sft 3")
    assert lines[0] == "sft 3: 4 of 9 groups have both outcomes"
    assert last.endswith(verdict)


def told_of(**values):
    outcomes = outcomes_of(**values)
    return probe.summary(outcomes, outcomes.rates(), "sft 3")[-1]


def test_the_gain_is_over_questions_with_both_answers():
    """Where the data has no rationale a fresh rollout's answer says nothing of the gain."""
    nan = np.nan
    some = {"forced_right": [1, 0.7, nan, nan], "negative_is_wrong": [1, 1, nan, nan]}
    told = told_of(resample=[0.7, 0.4, 1, 1], **some)  # 0.7 - 0.4 is less than 0.3 in floats
    assert told.startswith("over 2 questions forced_right exceeds resample by 0.30 (")
    assert told.endswith("): a task for reflection")
    assert told_of(resample=[1, 0.4, 0, 0], **some).endswith("not a task for reflection")


@pytest.mark.parametrize("failed", ["resample", "forced_right"])
def test_a_judge_that_failed_is_said_to_have(failed):
    values = {"resample": [0, 1, 0, 0], "forced_right": [1] * 4, "negative_is_wrong": [1] * 4}
    told = told_of(**values | {failed: [np.nan] * 4})
    assert told.startswith("the reward function judged no question under both")


def test_a_source_named_as_the_total_is_not_counted_twice():
    outcomes = dataclasses.replace(outcomes_of(resample=[0, 1, 0, 0]), sources=["all"] * 4)
    assert outcomes.rates() == [probe.Rate("all", "resample", 1.0, 4)]


def test_csv_has_every_rate_with_its_interval(tmp_path):
    outcomes = outcomes_of(resample=[0, 1, 0, np.nan], forced_right=[1, 1, 1, 1])
    probe.write_csv(tmp_path / "probe.csv", outcomes.rates(), "rl 7")
    with (tmp_path / "probe.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["source"], row["measure"], row["rate"], row["questions"]) for row in rows]
    assert found == [
        ("all", "resample", "0.3333", "3"),
        ("all", "forced_right", "1.0000", "4"),
        ("a", "resample", "0.5000", "2"),
        ("a", "forced_right", "1.0000", "2"),
        ("b", "resample", "0.0000", "1"),
        ("b", "forced_right", "1.0000", "2"),
    ]
    # z = 1.96: (1 + z²/2·4 ...) of 4 of 4 gives 4 / (4 + z²)
    assert rows[1]["low"] == "0.5101" and rows[1]["high"] == "1.0000"
    assert {row["checkpoint"] for row in rows} == {"rl 7"}


def test_first_tries_have_a_rate_and_no_interval(tmp_path):
    """Eight rollouts of a question are not eight questions."""
    outcomes = outcomes_of(first=[0.25, 0.5, 0.5, 0.75])
    lines = probe.summary(outcomes, outcomes.rates(), "rl 7")
    assert lines[2] == "first                50.0%"
    probe.write_csv(tmp_path / "probe.csv", outcomes.rates(), "rl 7")
    assert "\nrl 7,all,first,0.5000,,,4\n" in (tmp_path / "probe.csv").read_text()


def test_groups_without_both_outcomes_are_refused(probed, monkeypatch):
    monkeypatch.setattr("probe_test.ACCS", ((1, 1, 1),) * 6)
    with pytest.raises(ValueError, match=r"none among 6 questions \(100.0% of the answers"):
        probed()


@pytest.mark.exhaustive
def test_real_programs_decode_every_way(opened, compile_once):
    """With random weights: contexts are kept, rows are at most T long, draws differ by way."""
    compile_once(probe, "compile_rollout", "compile_decoder", "compile_to_decode_layout")
    run, params, examples = opened.run, opened.params, opened.examples
    outcomes = probe.probe(run, params, examples, len(examples), other_words=" So.")
    assert set(outcomes.values) == {*probe.WAYS, "negative_is_wrong"}
    assert len(outcomes.sources) >= 4
    for way in probe.WAYS[1:]:
        assert set(outcomes.values[way].tolist()) <= {0.0, 1.0}
    again = probe.probe(run, params, examples, len(examples))  # the other draws stay as they are
    assert all((again.values[way] == outcomes.values[way]).all() for way in probe.WAYS[:-1])
