"""Responses made to hang or crash a scorer: each is wrong, at once.

A quadratic or recursive scorer takes minutes for these, or raises; the limit is far from both.
"""

import faulthandler

import pytest

from care_jax.benchmarks import latex_value, mathverse, mathvision, mathvista, mmmu, mmmu_pro

INTEGER = {"answer_type": "integer", "answer": "7"}
FLOAT = {"answer_type": "float", "precision": 1.0, "answer": "7.0"}
LIST = {"answer_type": "list", "answer": "[7]"}
OPEN = {"question_type": "open", "options": "[]", "answer": "7"}
VISION = {"options": [], "answer": "7"}
CHOICES = (
    (mathvision, {"options": ["7", "8"], "answer": "A"}),
    (mathverse, {"question_type": "multi-choice", "question": "Choices:\nA:7\nB:8", "answer": "A"}),
    (mmmu, {"question_type": "multiple-choice", "options": "['7', '8']", "answer": "A"}),
    (mmmu_pro, {"options": "['7', '8']", "answer": "A"}),
)
WRONG = {
    "a huge exponent": (mathvista, INTEGER, "1e999999999"),
    "a huge exponent in groups": (mathvista, INTEGER, "1e9_999_999_999"),
    "a huge number in words": (mathvista, FLOAT, "\\boxed{1/3 " + "trillion " * 30 + "}"),
    "a deep list": (mathvista, LIST, "[" + "-" * 100_000 + "7]"),
    "a long sum in a list": (mathvista, LIST, "[7" + "+0j" * 100_000 + "]"),
    "digits": (mmmu, OPEN, "1" * 100_000),
    "digits after a point": (mmmu, OPEN, "so 1." + "1" * 100_000 + "a"),
    "boxes in capitals": (mathvision, VISION, "OXED{" * 100_000),
    "a cube root of a negative number": (mathvision, VISION, "\\sqrt[3]{-343}"),
}


@pytest.fixture(autouse=True)
def limit():
    """Ends the process where a scorer does not come back."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(("scorer", "row", "text"), WRONG.values(), ids=WRONG)
def test_a_response_that_costs_too_much_is_wrong(scorer, row, text):
    assert not scorer.is_correct(text, row)


@pytest.mark.parametrize(("scorer", "row"), CHOICES, ids=[s.__name__ for s, _ in CHOICES])
def test_boxes_in_boxes_are_opened_up_to_a_limit(scorer, row):
    assert scorer.is_correct("\\boxed{" * 3 + "A" + "}" * 3, row)
    assert scorer.is_correct("\\boxed{" * 5000 + "A" + "}" * 5000, row) in (True, False)


@pytest.mark.parametrize(
    "text", ["\\sqrt[3]{-8}", "\\sqrt[3]{-8}!", "\\log\\sqrt[3]{-8}", "0^{-1}"]
)
def test_what_is_no_real_number_has_no_value(text):
    assert latex_value.value(text) is None
