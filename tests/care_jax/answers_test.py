"""Answer equivalence: decisions at sight, what is left to computer algebra, agreement on cases."""

import json
import time
from pathlib import Path

import pytest

from care_jax.answers import compare, is_equivalent
from care_jax.notation import choice_letter, clean, final_answer, read_number, split_list
from care_jax.symbolic import Question, SymbolicPool
from care_jax.verifier import extract_answer

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "equivalence.jsonl"

EQUAL = [
    ("7", "7"),
    ("\\boxed{7}", "7"),
    ("$\\text{NET Excellent/good}$", "NET Excellent/ good"),
    ("１２", "12"),
    ("1,234.50", "1234.5"),
    ("\\$10", "10"),
    ("\\frac{6}{8}", "0.75"),
    ("\\frac34", "3/4"),
    ("5½", "11/2"),
    ("5 1/2", "5.5"),
    ("−5", "-5"),
    ("1.2\\times 10^{3}", "1200"),
    ("1000,99", "1000.99"),
    ("0.333333", "1/3"),
    ("39%", "0.39"),
    ("39\\%", "39"),
    ("17^{\\circ}", "17"),
    ("17 degrees", "17°"),
    ("10\\,\\mathrm{cm}^2", "10 cm^2"),
    ("12 inches", "12 in"),
    ("1.5 million", "1500000"),
    ("x = 7", "7"),
    ("q=7", "7"),
    ("\\angle ABC = 50^\\circ", "50"),
    ("AB=4, CD=5", "4, 5"),
    ("5, 4", "4 and 5"),
    ("(3,2)", "(p,q)=(3,2)"),
    ("\\boxed{1} and \\boxed{2}", "1, 2"),
    ("The answer is $7$.", "7"),
    ("\x0crac{1}{2}", "\\frac{1}{2}"),
]
DIFFERENT = [
    ("", "7"),
    ("8", "7"),
    ("0.333", "1/3"),
    ("7.0000001", "7"),
    ("0.07", "7"),
    ("10 m", "10 cm"),
    ("12 cm^2", "12 cm"),
    ("(2,1)", "(1,2)"),
    ("{1,3}", "(3,1)"),
    ("[0,9)", "(0,9)"),
    ("10 11", "1011"),
    ("7, 8", "7"),
    ("7 or 8", "7"),
    ("\\boxed{1}\\boxed{7}", "7"),
    ("not 7", "7"),
    ("about 7", "7"),
    ("> 6", "7"),
    ("\\neq 7", "7"),
    ("9=7", "7"),
    ("x=7", "y=7"),
    ("a = b = 7 = 8", "7"),
    ("between 0 and 100", "7"),
    ("Excellent", "NET Excellent/ good"),
]


@pytest.mark.parametrize(("prediction", "gold"), EQUAL)
def test_notations_of_one_answer_are_equal_at_sight(prediction, gold):
    assert compare(prediction, gold) == "equal"


@pytest.mark.parametrize(("prediction", "gold"), DIFFERENT)
def test_wrong_hedged_and_multiple_answers_are_different_at_sight(prediction, gold):
    assert compare(prediction, gold) == "different"


def test_tolerance_is_relative_to_the_gold_answer():
    relaxed = {"tolerance": 0.05}
    assert compare("105", "100", **relaxed) == "equal"
    assert compare("105.1", "100", **relaxed) == "different"
    assert compare("100%", "0.96", **relaxed) == "equal"
    assert compare("0.01", "0", **relaxed) == "different"
    assert compare("24750", "19800", **relaxed) == "different"


def test_decimals_round_both_sides():
    assert compare("0.67", "2/3", num_decimals=2) == "equal"
    assert compare("0.7", "2/3", num_decimals=2) == "different"


def test_a_choice_is_named_by_letter_or_by_content():
    choices = ("30", "45", "60", "90")
    for prediction in ("B", "b", "(B)", "B.", "B. 45", "45", "45^\\circ", "The answer is B"):
        assert compare(prediction, "B", choices=choices) == "equal", prediction
        assert compare(prediction, "45", choices=choices) == "equal", prediction
    for prediction in ("C", "60", "B and C", "ABCD", "A B C D", "not B", "50", "E"):
        assert compare(prediction, "B", choices=choices) != "equal", prediction


def test_a_negated_letter_does_not_count():
    assert choice_letter("for sure D, it can't be A or B", 4) == "D"
    assert choice_letter("It's not A because it is odd, so it is B", 4) == "B"
    assert choice_letter("A and C", 4) == ""


def test_only_undecided_mathematics_becomes_a_question():
    assert isinstance(compare("\\frac{x}{2}", "0.5x"), Question)
    assert isinstance(compare("\\sqrt{75}", "5\\sqrt{3}"), Question)
    assert compare("a long way", "5\\sqrt{3}") == "different"
    assert compare("__import__('os').getcwd()", "5\\sqrt{3}") == "different"


@pytest.mark.parametrize(
    "prediction",
    [
        "(10^9)!",
        "9^{9^{9}}",
        "9**9**9",
        "10^{1000}",
        "\\int x dx",
        "\\sum_k k",
        "(" * 20 + ")" * 20,
    ],
)
def test_what_only_exhausts_a_machine_is_refused(prediction):
    assert compare(prediction, "5\\sqrt{3}").startswith("refused: ")


def test_the_gold_answer_licenses_its_own_constructs():
    assert isinstance(compare("24", "4!"), Question)
    assert isinstance(compare("\\sum_k k^2", "\\sum_j j^2"), Question)


def test_numbers_are_exact():
    assert read_number("0.1").value * 10 == 1
    assert read_number("7x") is None
    assert read_number("5 times") is None
    assert read_number("9" * 5000) is None
    assert read_number("1e999999999") is None
    assert read_number("7/0") is None


def test_lists_keep_their_brackets():
    assert split_list("[63, 26]") == ("[]", ["63", "26"])
    assert split_list("(1,2) and (3,4)") == ("", ["(1,2)", "(3,4)"])
    assert split_list("(7") is None
    assert split_list("(7)") is None


def test_free_text_settles_on_its_last_answer():
    assert final_answer("First 3. The final answer is 12,000,023. I hope so.") == "12,000,023"
    assert final_answer("It has 3 + 4 = 7 sides.") == "7"
    assert final_answer("So $x$ is $\\frac{1}{2}$.") == "$\\frac{1}{2}$"


def test_symbolic_comparison_is_reached_through_is_equivalent():
    assert is_equivalent("(r+5)(r+5)", "(r+5)^2")
    assert is_equivalent("8.66", "5\\sqrt{3}", num_decimals=2)
    assert not is_equivalent("8.66", "5\\sqrt{3}")


@pytest.mark.parametrize(
    "text",
    [" " * 200_000, "\\boxed{" * 50_000, "1,111" * 40_000, "$" * 100_001, "a b " * 50_000,
     "answer is " * 20_000, "\\text{" * 50_000, "(" * 100_000, "1 000 " * 30_000],
)  # fmt: skip
def test_reading_is_linear_in_the_length_of_the_text(text):
    start = time.process_time()
    compare(text, "7", choices=("7", "8"))
    compare(text, "5\\sqrt{3}")
    extract_answer(text)
    clean(text)
    assert time.process_time() - start < 3.0


def test_agreement_on_recorded_cases():
    if not CASES.exists():
        pytest.skip(f"{CASES.name} is not beside this checkout")
    rows = [json.loads(line) for line in CASES.read_text().splitlines()]
    outcomes = []
    for row in rows:
        params = row.get("params") or {}
        prediction = row["prediction"]
        outcomes.append(
            compare(
                extract_answer(prediction) if row["span"] == "response" else prediction,
                row["gold"],
                choices=params.get("choices", ()),
                tolerance=params.get("relaxed", 0.0),
                num_decimals=params.get("numeric_decimals", params.get("precision")),
            )
        )
    pool = SymbolicPool(num_workers=2, timeout=30.0)
    questions = [outcome for outcome in outcomes if isinstance(outcome, Question)]
    replies = dict(zip(questions, pool.ask(questions), strict=True))
    pool.close()

    agreed: dict[str, list[bool]] = {}
    num_false_positives = 0
    for row, outcome in zip(rows, outcomes, strict=True):
        is_equal = replies.get(outcome, outcome) == "equal"
        agreed.setdefault(row["label_by"], []).append(is_equal == row["expected"])
        num_false_positives += is_equal and not row["expected"]
    shares = {label: sum(values) / len(values) for label, values in agreed.items()}
    assert shares["test-suite"] >= 0.94  # measured 0.951
    assert shares["official-scorer"] >= 0.97  # 0.972
    assert shares["author"] >= 0.99  # 1.0
    assert num_false_positives <= 1
