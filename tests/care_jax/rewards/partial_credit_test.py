"""Partial credit by distance, by hand; and that the right answers alone are successes."""

import pytest

from care_jax.batch import Example
from care_jax.data.drawn.synthetic import SyntheticSource
from care_jax.rewards.partial_credit import relative_error
from care_jax.rewards.verifier import Verifier, parse_text

NAME = "care_jax.rewards.partial_credit:relative_error"


def credit(answer, gold, **fields):
    example = Example("0", "made", (), "How many?", gold, **fields)
    text = f"<think>Count.</think><answer>{answer}</answer>"
    return relative_error("How many?", [text], example)[0]["acc"]


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("4", "4", 1.0),
        ("4.0", "4", 1.0),
        ("3", "4", 0.9 * 0.75),
        ("5", "4", 0.9 * 0.75),
        ("8", "4", 0.0),
        ("100", "4", 0.0),
        ("0.5", "0", 0.45),
        ("1", "0", 0.0),
        ("4.00000000000000000000000001", "4", 0.9),
        ("red", "4", 0.0),
        ("red", "red", 1.0),
        ("3", "red", 0.0),
        ("3 cm", "4 cm", 0.9 * 0.75),
        ("3 kg", "4 cm", 0.0),
        ("30%", "40%", 0.9 * 0.75),
        ("30%", "40", 0.0),
    ],
)
def test_credit_falls_with_the_relative_error(answer, gold, expected):
    assert credit(answer, gold) == pytest.approx(expected, abs=1e-12)


def test_the_options_and_the_tolerance_of_the_example_decide_what_is_right():
    assert credit("B", "12", choices=("10", "12")) == 1.0
    assert credit("10.2", "10", tolerance=0.05) == 1.0
    assert credit("10.2", "10") == pytest.approx(0.9 * 0.98)


@pytest.mark.parametrize(
    "text",
    ["3", "<think>Count.</think><answer>3", "<think>Count.<answer>3</answer>",
     "<reasoning>Count.<answer>3</answer>", "<answer>3</answer><answer>3</answer>"],
)  # fmt: skip
def test_only_a_well_formed_answer_span_is_read(text):
    assert relative_error("?", [text], Example("0", "made", (), "?", "4")) == [{"acc": 0.0}]


def test_costly_answers_take_no_credit_from_the_rest_of_their_group():
    costly = [f"(x+z+y)^{{{power}}}" for power in (60, 59, 58, 57)]
    texts = [f"<think>a</think><answer>{text}</answer>" for text in (*costly, "x^2 + 2xy + y^2")]
    example = Example("0", "made", (), "?", "(x + y)^2")
    with Verifier(1, 60.0, reward=NAME, success=1.0) as graded:
        found = graded.begin(texts, [parse_text(text) for text in texts], [example] * 5,
                             group_size=5)()  # fmt: skip
    assert [verdict.acc for verdict in found] == [0.0] * 4 + [1.0]
    assert {verdict.reason for verdict in found} == {"reward function"}


def test_either_tag_of_the_rationale_will_do():
    text = "<reasoning>Count.</reasoning><answer>3</answer>"
    example = Example("0", "made", (), "?", "4")
    assert relative_error("?", [text], example)[0]["acc"] == pytest.approx(0.675)
    text = "<think>Count.<reasoning>b</reasoning><answer>4</answer>"  # its rationale stays open
    assert relative_error("?", [text], example)[0]["acc"] == 0


def test_with_success_at_1_the_successes_are_those_of_the_built_in_verifier():
    """On every answer of the teacher, right and wrong, judged in a worker process."""
    source = SyntheticSource(64, teacher_error=1.0)
    examples = [source[index] for index in range(64)]
    texts = [example.response for example in examples]
    parsed = [parse_text(text) for text in texts]
    with Verifier() as builtin, Verifier(reward=NAME, success=1.0) as graded:
        expected = builtin.verify(texts, examples)
        found = graded.begin(texts, parsed, examples, group_size=1)()
    assert [verdict.acc for verdict in found] == [verdict.acc for verdict in expected]
    assert {verdict.acc for verdict in found} == {0.0, 1.0}
    partial = [each.quality for each in found if each.acc == 0]
    assert max(partial) > 0.5 and max(partial) < 1
