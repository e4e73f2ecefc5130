"""Verdicts on whole responses."""

import dataclasses
import json
import time
from pathlib import Path

import pytest

from care_jax.batch import Example
from care_jax.rewards.verifier import Verdict, Verifier, extract_answer, parse_text

HOSTILE = Path(__file__).parents[3].parent / "shared" / "cases" / "hostile.jsonl"


def response(answer: str, think: str = "because") -> str:
    return f"<think>{think}</think><answer>{answer}</answer>"


@pytest.fixture(scope="module")
def verifier():
    with Verifier(num_workers=2, timeout=20.0) as verifier:
        yield verifier


def example(answer: str, choices: tuple[str, ...] = ()) -> Example:
    return Example(id="0", source="", images=(), question="", answer=answer, choices=choices)


RED_AND_SEVEN = ("red", "7 cm", "9")


@pytest.mark.parametrize(
    ("answer", "gold", "acc", "reason"),
    [
        ("red", "red", 1, "same text"),
        ("1/2", "0.5", 1, "same number"),
        ("8", "7", 0, "another number"),
        ("104", dataclasses.replace(example("100"), tolerance=0.05), 1, "number within 5%"),
        ("106", dataclasses.replace(example("100"), tolerance=0.05), 0, "no number within 5%"),
        ("B", example("7 cm", RED_AND_SEVEN), 1, "same option"),
        ("9", example("7 cm", RED_AND_SEVEN), 0, "another option"),
        ("7.0", example("7 cm", RED_AND_SEVEN), 1, "same number"),
        ("none", example("B", ("a", "b")), 0, "no option"),
        ("(1, 2.0)", "(1,2)", 1, "same list"),
        ("(1, 3)", "(1,2)", 0, "another list"),
        ("1, 2", "2", 0, "another number of values"),
        ("x = 7", "7", 1, "same value"),
        ("x = 8", "7", 0, "another value"),
        ("x = 7", "y = 7", 0, "another variable"),
        ("7\\pi cm", "7\\pi kg", 0, "another unit"),
        ("a long way", "7", 0, "other words"),
        ("> 6", "7", 0, "a relation, no value"),
        ("9 = 7", "7", 0, "an equation, no value"),
        ("x + 1", "1 + x", 1, "by computer algebra"),
        ("x + 2", "1 + x", 0, "by computer algebra"),
        ("(" * 13 + "x" + ")" * 13, "1 + x", 0, "refused: nesting"),
    ],
)
def test_a_verdict_says_what_decided(verifier, answer, gold, acc, reason):
    assert verifier.verify([response(answer)], [gold]) == [Verdict(float(acc), 1.0, reason)]


NO_SPAN = ["", "\\boxed{7}", "<think>7</think>7", "<think>7</think><answer>7",
           "<think>7</think><answer> </answer>", "<think><answer>7</answer>",
           "<think>a</think><answer>7</answer><answer>7</answer>"]  # fmt: skip


def test_nothing_but_an_answer_span_earns_acc(verifier):
    verdicts = verifier.verify(NO_SPAN, ["7"] * len(NO_SPAN))
    assert verdicts == [Verdict(0.0, 0.0, "no answer span")] * len(NO_SPAN)


def test_a_right_rationale_does_not_help_a_wrong_answer(verifier):
    (verdict,) = verifier.verify([response("8", think="the answer is \\boxed{7}")], ["7"])
    assert verdict.acc == 0.0


def test_acc_and_format_are_judged_apart(verifier):
    (verdict,) = verifier.verify(["Well: <answer>7</answer>"], ["7"])
    assert (verdict.acc, verdict.fmt) == (1.0, 0.0)


def test_a_response_cut_off_has_no_format(verifier):
    verdicts = verifier.verify([response("7")] * 2, ["7"] * 2, is_complete=[True, False])
    assert [(v.acc, v.fmt) for v in verdicts] == [(1.0, 1.0), (1.0, 0.0)]


def test_the_think_tag_is_that_of_the_backbone():
    text = "<reasoning>r</reasoning><answer>7</answer>"
    with Verifier(think_tag="reasoning") as reasoning, Verifier() as think:
        assert reasoning.verify([text], ["7"])[0].fmt == 1.0
        assert think.verify([text], ["7"])[0].fmt == 0.0


def test_choices_of_an_example_are_known(verifier):
    gold = example("B", ("30", "45"))
    verdicts = verifier.verify([response("45"), response("(B)"), response("30")], [gold] * 3)
    assert [v.acc for v in verdicts] == [1.0, 1.0, 0.0]


def test_a_row_may_say_that_its_unit_matters(verifier):
    gold = example("5 cm")
    strict = dataclasses.replace(gold, units="matter")
    texts = [response("5"), response("5 cm"), response("50 mm")]
    assert [v.acc for v in verifier.verify(texts, [gold] * 3)] == [1.0, 1.0, 1.0]
    assert [v.acc for v in verifier.verify(texts, [strict] * 3)] == [0.0, 1.0, 1.0]


def by_length(question, responses, example):
    """A reward function; it fails for some responses and some groups."""
    if question == "raise":
        raise KeyError("no such thing")
    return [{"acc": len(text) / 10, "asked": float(question == "How long?")} for text in responses]


def test_a_reward_function_judges_in_place_of_the_verifier():
    asked = dataclasses.replace(example("7"), question="How long?")
    with Verifier(reward=by_length, success=0.6) as verifier:
        assert verifier.verify(["1234", "<answer>7</answer>"[:6]], [asked, "7"]) == [
            Verdict(0.0, 0.0, "reward function", {"acc": 0.4, "asked": 1.0}, quality=0.4),
            Verdict(1.0, 0.0, "reward function", {"acc": 0.6, "asked": 0.0}, quality=0.6),
        ]


def test_a_failure_costs_its_responses_their_reward_and_is_logged_once(caplog):
    """Response 2 of the first group has an acc of 1.1; the second group raises."""
    texts = ["1", "1" * 11, "1", "1"]
    golds = [dataclasses.replace(example("7"), question=q) for q in ("", "", "raise", "raise")]
    parsed = [parse_text(text) for text in texts]
    lost, failed = (Verdict(0.0, 0.0, f"failed: {why}", quality=0.0) for why in REASONS)
    with Verifier(reward=by_length) as verifier, caplog.at_level("WARNING"):
        for _ in range(2):
            first, *others = verifier.begin(texts, parsed, golds, group_size=2)()
            assert first.components == {"acc": 0.1, "asked": 0.0}
            assert others == [lost, failed, failed]
            assert verifier.problem.startswith("by_length failed:\nTraceback")
            assert verifier.problem.endswith("KeyError: 'no such thing'")
        assert verifier.counts == {
            "fast_calls": 2, "symbolic_calls": 0, "cached": 0, "timeouts": 0, "crashes": 0,
            "failed": 6,
        }  # fmt: skip
    assert caplog.text.count("must return components in [0, 1], got acc = 1.1;") == 1
    assert caplog.text.count("KeyError: 'no such thing'") == 1


REASONS = ("result", "KeyError")


BOX = Example(id="0", source="", images=(), question="", answer=[0, 0, 4, 4])
REFUSED = [
    ([BOX], None, r"example '0' is a list, .* set verifier\.reward to a function"),
    ([], None, "as many golds and is_complete as responses, got 0, 1 and 1; pass one for each"),
    (["7"], [], "as many golds and is_complete as responses, got 1, 0 and 1; pass one for each"),
]


@pytest.mark.parametrize(("golds", "is_complete", "message"), REFUSED)
def test_answers_that_cannot_be_judged_are_refused(verifier, golds, is_complete, message):
    with pytest.raises(ValueError, match=message):
        verifier.verify([response("7")], golds, is_complete)


def test_simple_answers_start_no_process():
    with Verifier() as verifier:
        verifier.verify([response("7"), response("red"), "7"], ["7.0", "blue", "7"])
        assert verifier.counts == {
            "fast_calls": 3, "symbolic_calls": 0, "cached": 0, "timeouts": 0, "crashes": 0,
        }  # fmt: skip
        assert verifier._pool._pool._thread is None


def test_symbolic_answers_keep_their_places_and_are_remembered(verifier):
    answers = ["\\sqrt{75}", "7", "\\sqrt{74}", "(x+1)^2", "\\sqrt{75}"]
    golds = ["5\\sqrt{3}", "7", "5\\sqrt{3}", "x^2+2x+1", "5\\sqrt{3}"]
    before = verifier.counts
    for _ in range(2):
        verdicts = verifier.verify([response(a) for a in answers], golds)
        assert [v.acc for v in verdicts] == [1.0, 1.0, 0.0, 1.0, 1.0]
    new = {name: count - before[name] for name, count in verifier.counts.items()}
    assert (new["symbolic_calls"], new["cached"]) == (3, 5)


# app:cases: the gold answer, that of anchor and repair, and the results of the hard negatives'
# rationales, which have no answer span there.
NEGATIVE_4 = '\\text{the "Critical" view or the "Sex abuse scandal"}'
PAPER_CASES = {
    "geometry": ("7", "7", ("-1", "17")),
    "chart": ("19800", "19800", ("2475", "24750")),
    "circle": ("5\\sqrt{3}", "5\\sqrt{3}", ("5", "5\\sqrt{5}")),
    "legend": (
        *("NET Excellent/good", "\\text{NET Excellent/good}"),
        (NEGATIVE_4, "\\text{NET Only fair/poor}"),
    ),
}


@pytest.mark.parametrize("case", PAPER_CASES)
def test_the_papers_cases_are_judged_as_in_the_paper(verifier, case):
    gold, right, wrong = PAPER_CASES[case]
    texts = [response(f"\\boxed{{{answer}}}") for answer in (right, *wrong)]
    verdicts = verifier.verify(texts, [gold] * 3)
    assert [(verdict.acc, verdict.fmt) for verdict in verdicts] == [(1, 1), (0, 1), (0, 1)]


def test_extraction_for_evaluation_is_looser():
    assert extract_answer("<answer>6</answer> no, <answer>7</answer>") == "7"
    assert extract_answer("<think>\\boxed{6}</think> so 7") == "7"
    assert extract_answer("<think>it is \\boxed{7}") == ""
    assert extract_answer("a</reasoning> 7", think_tag="reasoning") == "7"


def test_hostile_answers_end_safely(tmp_path, monkeypatch):
    if not HOSTILE.exists():
        pytest.skip(f"{HOSTILE.name} is not beside this checkout")
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in HOSTILE.read_text().splitlines()]
    pairs = [(row, gold) for row in rows for gold in (row["gold"], row["gold2"])]
    with Verifier(num_workers=2, timeout=5.0) as verifier:
        start = time.monotonic()
        verdicts = verifier.verify(
            [response(row["prediction"]) for row, _ in pairs], [gold for _, gold in pairs]
        )
        assert time.monotonic() - start < 60.0
    for (row, _), verdict in zip(pairs, verdicts, strict=True):
        assert row["expected"] is not False or verdict.acc == 0.0, row["id"]
    assert not list(tmp_path.iterdir())
