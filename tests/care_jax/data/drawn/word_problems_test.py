"""Word problems: right answers, true steps, one slip before a cue, splits that share no numbers."""

import collections
import operator
import re

import pytest

from care_jax.data.drawn.word_problems import (
    _QUESTIONS,
    DAYS,
    FAR,
    KINDS,
    NAMES,
    UNITS,
    WordProblems,
)
from care_jax.data.sources import open_source
from care_jax.rewards.verifier import Verifier, parse_text

RESPONSE = re.compile(r"<think>(.+)</think><answer>(.+)</answer>")
STEP = re.compile(r"(\d+) ([+x-]) (\d+) = (\d+)\.")
OPERATIONS = {"+": operator.add, "-": operator.sub, "x": operator.mul}
CUE = " Wait, that is wrong."


def kind_of(example):
    return example.source.removeprefix("word_problems/").removesuffix(FAR)


def numbers_of(example):
    return [int(number) for number in re.findall(r"\d+", example.question)]


def steps_of(rationale):
    """(stated result, true result) of every step that states one."""
    return [(int(d), OPERATIONS[o](int(a), int(c))) for a, o, c, d in STEP.findall(rationale)]


def expected_answer(example):
    """From the words of the question alone."""
    numbers, question = numbers_of(example), example.question
    match kind_of(example):
        case "total":
            return str(sum(numbers))
        case "left":
            return str(numbers[0] - numbers[1])
        case "groups":
            return str(numbers[0] * numbers[1])
        case "change":
            paid = max(numbers)
            numbers.remove(paid)
            return str(paid - numbers[0] * numbers[1])
        case "compare":
            first, second = (
                re.findall(r"([A-Z][a-z]+) (?:has|fills)|each, ([A-Z][a-z]+)", question)[:2]
                if "fills" in question
                else re.findall(r"([A-Z][a-z]+)()(?= has \d)", question)
            )
            n, a, m, b = numbers
            return "".join(first if n * a > m * b else second)
        case "calendar":
            (day,) = re.findall("|".join(DAYS), question)
            return DAYS[(DAYS.index(day) + numbers[0]) % 7]
        case "units":
            large = re.search(r"\d+ (\w+) and", question)[1]
            return str(numbers[0] * {u[0]: u[2] for u in UNITS}[large] + numbers[1])


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_what_the_questions_ask_for(split):
    for example in WordProblems(1400, seed=1, split=split):
        assert example.answer == expected_answer(example), example.question


def test_steps_are_true_and_lead_to_the_answer_without_stating_it():
    for example in WordProblems(1400, split="test"):
        rationale, answer = RESPONSE.fullmatch(example.response).groups()
        assert (rationale, answer) == (example.rationale, example.answer)
        steps = steps_of(rationale)
        assert 1 <= len(steps) <= 2 and all(stated == true for stated, true in steps)
        last = rationale.removesuffix(".").rpartition(". ")[2]
        assert "=" not in last and str(steps[-1][0]) in last
        if found := re.fullmatch(r"Then (\d+) ([+-]) (\d+)", last):
            assert str(OPERATIONS[found[2]](int(found[1]), int(found[3]))) == answer


def test_the_verifier_accepts_every_response():
    with Verifier(num_workers=1, timeout=5.0) as verifier:
        for example in WordProblems(140, split="test"):
            span = parse_text(example.response)
            assert span.fmt == 1.0
            (verdict,) = verifier.verify([example.response], [example])
            assert verdict.acc == 1.0, example.response


def calculation(example):
    """The rationale without names and units, which does not depend on the wording."""
    words = (*NAMES, *(name for large, small, _ in UNITS for name in (large, small)))
    return re.sub("|".join(words), "", example.rationale)


def test_splits_share_no_calculation_whatever_the_seeds():
    def calculations(split):
        return {
            calculation(example)
            for seed in range(3)
            for example in WordProblems(3500, seed=seed, split=split)
        }

    train, test = calculations("train"), calculations("test")
    assert len(train) > 3000 and len(test) > 1000
    assert not train & test


def test_the_test_split_asks_for_a_calculation_again_only_when_all_were_asked_for():
    """A kind has at least 14 of each range, and 196 questions have 14 rounds."""
    of_kind = collections.defaultdict(list)
    for example in WordProblems(14 * 2 * 7 * 6, split="test", seed=3):
        of_kind[example.source].append(calculation(example))
    for source, asked in of_kind.items():
        assert len(set(asked[:14])) == 14, source
        times = collections.Counter(asked).values()
        assert max(times) - min(times) <= 1, source
    change, total = (len(set(of_kind[f"word_problems/{kind}"])) for kind in ("change", "total"))
    assert change < 20 and total == 84  # the one pool is exhausted, the other is not


def test_every_other_round_of_the_test_split_has_numbers_that_training_has_not():
    largest = {kind: 0 for kind in KINDS}
    for example in WordProblems(7000):
        assert not example.source.endswith(FAR)
        largest[kind_of(example)] = max(largest[kind_of(example)], operand(example))
    test = WordProblems(700, split="test")
    for index, example in enumerate(test):
        is_far = index // len(KINDS) % 2 == 1
        assert example.source == f"word_problems/{KINDS[index % 7]}{FAR if is_far else ''}"
        assert (operand(example) > largest[kind_of(example)]) == is_far, example.question


def operand(example):
    """The number whose range tells near from far."""
    numbers = numbers_of(example)
    match kind_of(example):
        case "change":
            numbers.remove(max(numbers))
            return max(numbers)
        case "compare":
            return min(max(numbers[0:2]), max(numbers[2:4]))
        case "units":
            return numbers[0]
        case _:
            return max(numbers)


def concluded(rationale):
    """The answer that the last step of a rationale leads to."""
    last = rationale.removesuffix(".").rpartition(". ")[2]
    if found := re.fullmatch(r"Then (\d+) ([+-]) (\d+)", last):
        return str(OPERATIONS[found[2]](int(found[1]), int(found[3])))
    if found := re.fullmatch(r"Compare (\d+) and (\d+)", last):
        first, second = re.findall(r"([A-Z][a-z]+): ", rationale)
        difference = int(found[1]) - int(found[2])
        return first if difference > 0 else second if difference else ""
    rest, day = re.fullmatch(r"Go (\d+) days on from (\w+)", last).groups()
    return DAYS[(DAYS.index(day) + int(rest)) % 7]


def test_a_row_with_the_cue_slips_in_one_step_and_is_then_right():
    source = WordProblems(2000, cue_share=0.25, cue=CUE)
    with_cue = [example for example in source if example.context]
    slipped = [example for example in with_cue if kind_of(example) != "compare"]
    assert 0.2 < len(slipped) / (len(source) * 6 / 7) < 0.3
    assert 0 < len(with_cue) - len(slipped) < 0.15 * len(source) / 7
    for example in with_cue:
        opening, wrong, end = re.fullmatch(r"(<think>)(.+)( Wait, .+)", example.context).groups()
        assert end == CUE and sum(stated != true for stated, true in steps_of(wrong)) == 1
        right, answer = RESPONSE.fullmatch(opening + example.response.removeprefix(" ")).groups()
        assert right == example.rationale and all(s == true for s, true in steps_of(right))
        assert example.answer == answer == expected_answer(example)
    clean = WordProblems(2000)
    for one, other in zip(clean, source, strict=True):
        assert (one.question, one.rationale, one.context) == (other.question, other.rationale, "")


def test_a_slip_leads_to_another_answer_and_not_below_zero():
    for example in WordProblems(3500, cue_share=1.0, cue=CUE):
        if wrong := example.context.removeprefix("<think>").removesuffix(CUE):
            reached = concluded(wrong)  # which reads no number below zero
            assert reached not in ("", example.answer) and not reached.startswith("-"), wrong


def test_every_wording_occurs():
    questions = [example.question for example in WordProblems(700)]
    for wording in (wording for wordings in _QUESTIONS.values() for wording in wordings):
        form = re.compile(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(wording)))
        assert any(map(form.fullmatch, questions)), wording


def test_it_is_a_source_by_name():
    source = open_source(
        "word_problems", num_examples=20, seed=3, split="test", cue_share=0.5, cue=CUE
    )
    assert source[7] == WordProblems(20, seed=3, split="test", cue_share=0.5, cue=CUE)[7]
