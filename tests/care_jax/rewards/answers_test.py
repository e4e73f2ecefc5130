"""Answer equivalence: decisions at sight, what is left to computer algebra, agreement on cases."""

import json
import time
from pathlib import Path

import pytest
from answer_pairs import ASKED_DIFFERENT, ASKED_EQUAL, DIFFERENT, EQUAL, compare
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.rewards import answers
from care_jax.rewards.answers import is_equivalent
from care_jax.rewards.equivalence.notation import clean
from care_jax.rewards.symbolic import Comparison, SymbolicPool, is_equal
from care_jax.rewards.verifier import extract_answer

CASES = Path(__file__).parents[3].parent / "shared" / "cases" / "equivalence.jsonl"


@pytest.mark.parametrize(("prediction", "gold"), EQUAL)
def test_notations_of_one_answer_are_equal_at_sight(prediction, gold):
    assert compare(prediction, gold) == "equal"


@pytest.mark.parametrize(("prediction", "gold"), DIFFERENT)
def test_wrong_hedged_and_multiple_answers_are_different_at_sight(prediction, gold):
    assert compare(prediction, gold) == "different"


@pytest.mark.parametrize(("prediction", "gold"), ASKED_EQUAL)
def test_formulas_in_other_notations_are_equal_by_computer_algebra(prediction, gold):
    assert isinstance(compare(prediction, gold), Comparison)
    assert is_equivalent(prediction, gold)


@pytest.mark.parametrize(("prediction", "gold"), ASKED_DIFFERENT)
def test_factors_are_no_units_and_scripts_are_no_digits(prediction, gold):
    assert isinstance(compare(prediction, gold), Comparison)
    assert not is_equivalent(prediction, gold)


NUMBERS = st.one_of(
    st.integers(-(10**9), 10**9).map(str),
    st.decimals(-1000, 1000, places=3).map(str),
    st.tuples(st.integers(-99, 99), st.integers(2, 99)).map(lambda x: f"{x[0]}/{x[1]}"),
    st.integers(1000, 10**9).map("{:,}".format),
)
LETTERS = st.sampled_from(["x", "y", "n"])
EXPRESSIONS = st.one_of(
    st.tuples(LETTERS, NUMBERS).map(lambda x: f"{x[0]} = {x[1]}"),
    st.integers(2, 50).map(lambda n: f"{n}\\sqrt{{{n + 1}}}"),
    st.tuples(NUMBERS, NUMBERS).map(lambda x: f"({x[0].replace(',', '')}, {x[1]})"),
    LETTERS.map(lambda x: f"{x}^2 + 3{x}"),
)
ANSWERS = NUMBERS | EXPRESSIONS
DRESSES = st.sampled_from([
    "${}$", "\\({}\\)", "\\[{}\\]", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "\\boxed{{${}$}}", "**{}**",
    " {} ", "\n{}\n", "{}.", "\\displaystyle {}", "The answer is ${}$.", "\\text{{{}}}",
    "\\left.{}\\right.", "\\,{}\\,",
])  # fmt: skip
UNITS = st.sampled_from(
    [" cm", " \\text{ m}", "\\,\\mathrm{kg}", "^\\circ", " hours", "\\%", " apples"]
)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_every_text_equals_itself(text):
    assert compare(text, text) == ("equal" if clean(text) else "different")


@settings(deadline=None)
@given(ANSWERS, ANSWERS)
def test_it_does_not_matter_which_of_two_values_is_gold(one, other):
    def outcome(prediction, gold):
        found = compare(prediction, gold)
        return "asked" if isinstance(found, Comparison) else found

    if "=" not in one + other:  # `x = 7` answers 7, but 7 may not answer an equation
        assert outcome(one, other) == outcome(other, one)


@settings(deadline=None)
@given(ANSWERS, ANSWERS, DRESSES, DRESSES)
def test_latex_around_an_answer_changes_nothing(answer, gold, dress, other):
    assert compare(dress.format(answer), other.format(answer)) == "equal"
    plain, dressed = compare(answer, gold), compare(dress.format(answer), other.format(gold))
    assert isinstance(plain, Comparison) == isinstance(dressed, Comparison)
    assert isinstance(plain, Comparison) or plain == dressed


@settings(deadline=None)
@given(NUMBERS, NUMBERS, UNITS, DRESSES)
def test_a_unit_on_one_side_changes_nothing_but_a_percent(number, gold, unit, dress):
    plain = compare(number, gold)
    with_unit = compare(dress.format(number + unit), gold)
    is_fraction = "/" in number + gold or number.startswith(("0.", "-0."))  # 1/2 is not 1/2%
    if "%" not in unit or (plain == "equal" and not is_fraction):
        assert with_unit == plain
    assert compare(number + unit, dress.format(number + unit)) == "equal"


@settings(deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), DRESSES)
def test_integers_are_equal_only_to_themselves(number, other, dress):
    assert compare(dress.format(number), f"{other:,}") == (
        "equal" if number == other else "different"
    )


TOKENS = st.sampled_from([
    *"0123456789xyAB.,;:/%^_{}()[]|=<>+-$ıİſK√°½& \n", "\\\\", "\\infty", "-\\infty", "\\ne",
    "\\neq", "\\le", "\\geq", "\\in", "\\cup", "\\frac", "\\sqrt", "\\pi", "\\pm", "\\text{",
    "\\mathbb{R}", "\\begin{matrix}", "\\end{matrix}", " and ", " or ", "x > ", " < x", "six",
    "sıx", "twenty-", "half", "million", "third", "th", " cm", "hours", "not ", "Option ",
])  # fmt: skip
TEXTS = st.lists(TOKENS, max_size=16).map("".join)


@pytest.mark.parametrize("text", [
    "x > 2\\infty and x \\ne 3", "x > -\\infty 2, x \\ne 3", "x<3\\infty and x\\neq 2",
    "sıx", "fıve", "SİX", "5 mıllıon", "one and a thırd",
])  # fmt: skip
def test_no_rule_fails_on(text):
    assert "Error" not in str(answers.compare(text, "5"))


@given(TEXTS, TEXTS, ANSWERS)
@settings(deadline=None, max_examples=300)
def test_reading_never_fails(text, other, gold):
    for outcome in (
        answers.compare(text, gold),
        answers.compare(gold, text),
        answers.compare(text, other),
        answers.compare(text, gold, choices=("7", gold)),
    ):
        assert isinstance(outcome, Comparison) or outcome.split(":")[0] in (
            "equal", "different", "refused",
        )  # fmt: skip
        assert "Error" not in str(outcome)


def test_a_rule_that_fails_refuses_the_answer_and_says_so(monkeypatch, caplog):
    def fail(*_):
        raise KeyError("mıllıon")

    monkeypatch.setattr(answers.free_text, "statement", fail)
    assert answers.compare("5 of them", "6") == "refused: KeyError"
    assert not is_equivalent("5 of them", "6")
    assert "Comparing '5 of them' with '6' failed: KeyError('mıllıon')" in caplog.text


def test_tolerance_is_relative_to_the_gold_answer():
    relaxed = {"tolerance": 0.05}
    assert compare("105", "100", **relaxed) == "equal"
    assert compare("105.1", "100", **relaxed) == "different"
    assert compare("100%", "0.96", **relaxed) == "equal"
    assert compare("0.01", "0", **relaxed) == "different"
    assert compare("24750", "19800", **relaxed) == "different"
    for other, text in (("12/12/2011", "12/12/2010"), ("10:31", "10:30"), ("19-25", "18-24")):
        assert compare(other, text, **relaxed) == "different"
        assert compare(text, text, **relaxed) == "equal"


def test_years_and_bounds_have_no_tolerance():
    relaxed = {"tolerance": 0.05}
    for gold in ("2,020", "$2,020", "2020.5", "2020%", "2020 km"):
        assert compare("2050", gold, **relaxed) == "equal", gold
    for other, gold in (
        ("2011", "2010"), ("x = 2011", "2010"), ("2013, 2017", "2014, 2016"), ("2011年", "2010年"),
        ("Dec 18, 2021", "Dec 18, 2020"), ("184", "2010/11"), ("1999", "2010-11"),
        (">52", ">50"), ("[2014, 2100]", "[2014, 2016]"), ("2010 (year)", "2000 (year)"),
    ):  # fmt: skip
        assert compare(other, gold, **relaxed) == "different", gold
        assert compare(gold, gold, **relaxed) == "equal", gold
    for other, gold in (("1980s", "1990s"), ("2009 + 2", "2010")):
        assert not is_equivalent(other, gold, **relaxed), gold


def test_decimals_round_both_sides():
    assert compare("0.67", "2/3", num_decimals=2) == "equal"
    assert compare("0.7", "2/3", num_decimals=2) == "different"


def test_a_price_has_a_unit_where_units_matter():
    for number, price in (("5", "$5"), ("5", "\\$5"), ("5", "€5"), ("5", "5 N")):
        assert compare(number, price) == compare(price, price, units_matter=True) == "equal"
        assert compare(number, price, units_matter=True) == "different"
    assert compare("$5$", "5", units_matter=True) == "equal"


def test_only_undecided_mathematics_becomes_a_question():
    assert isinstance(compare("\\frac{x}{2}", "0.5x"), Comparison)
    assert isinstance(compare("\\sqrt{75}", "5\\sqrt{3}"), Comparison)
    assert compare("a long way", "5\\sqrt{3}") == "different"
    assert compare("__import__('os').getcwd()", "5\\sqrt{3}") == "different"


@pytest.mark.parametrize(
    "prediction",
    [
        "(10^9)!",
        "9^{9^{9}}",
        "9**9**9",
        "10^{1000}",
        "100!",
        "9!!",
        "(9!)!",
        "2^9!",
        "\\binom{100}{50}",
        "\\int x dx",
        "\\sum_k k",
        "(" * 20 + ")" * 20,
        "\\frac{dy}{dx}",  # a rate is 0 for computer algebra
        "\\frac{d}{dx}(x^3)",
        "4\\pi r^2\\frac{dr}{dt}",
        "\\frac{\\partial f}{\\partial x}",
    ],
)
def test_what_only_exhausts_a_machine_is_refused(prediction):
    assert compare(prediction, "5\\sqrt{3}").startswith("refused: ")


def test_the_gold_answer_licenses_its_own_constructs():
    assert isinstance(compare("24", "4!"), Comparison)
    assert isinstance(compare("4!", "24"), Comparison)  # small enough
    assert isinstance(compare("\\binom{5}{2}", "10"), Comparison)
    assert isinstance(compare("\\sum_k k^2", "\\sum_j j^2"), Comparison)


def test_symbolic_comparison_is_reached_through_is_equivalent():
    assert is_equivalent("(r+5)(r+5)", "(r+5)^2")
    assert is_equivalent("4\\sqrt{3}\\text{ cm}", "\\sqrt{48}")
    assert is_equivalent("8.66", "5\\sqrt{3}", num_decimals=2)
    assert not is_equivalent("8.66", "5\\sqrt{3}")


@pytest.mark.parametrize(
    "text",
    [" " * 200_000, "\\boxed{" * 50_000, "1,111" * 40_000, "$" * 100_001, "a b " * 50_000,
     "answer is " * 20_000, "\\text{" * 50_000, "(" * 100_000, "1 000 " * 30_000,
     "x+y " + "cm " * 600, "x+y" + " ㎝" * 900, "°" * 1900, "\ufdfa" * 1900, "√1" * 900,
     "1/3 " + "trillion " * 200, "$5 " * 600, "\\$" * 900, "$ " * 900, "x²₁" * 600, "A, " * 600,
     "b) " * 600, "US$" * 600 + "5", "5 " + "N\\cdot " * 200,
     "1 h " * 500, "1h" * 900, "of " * 600, "R " * 900],
)  # fmt: skip
def test_reading_is_linear_in_the_length_of_the_text(text):
    start = time.process_time()
    compare(text, "7", choices=("7", "8"))
    compare(text, "5\\sqrt{3}")
    compare(text, text + "z")
    extract_answer(text)
    clean(text)
    assert time.process_time() - start < 3.0


# Cases whose label is not reached, and why.
MISSED = {
    "c0155": "a chain that contradicts itself, `x = 10 + 1 = 7 = 11`",
    "c0160": "a value that is rounded otherwise, `x = 1/3 \\approx 1.3`",
    "c0316": "`17 any text`, with words that are no unit",
    "c0040": "the gold answer is a whole solution, and settles on prose",
    "c0131": "the answer span denies one number in a sentence and names another",
    "c0207": "a function of x for a function of n",
    "c0242": "f(y) for f(x): equal only to a lenient grader",
    "c0287": "a sum with its result in an answer span, in French prose",
    "c0288": "a sentence in an answer span, in French",
    "c0289": "a sentence in an answer span, in French",
    "c0293": "a sentence in an answer span, in Chinese",
    "c0294": "a sentence in an answer span, in Chinese",
    "c0586": "1/3 for (3^1008 - 1) / 3^1009: equal at two decimals alone",
}


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
    questions = [outcome for outcome in outcomes if isinstance(outcome, Comparison)]
    replies = dict(zip(questions, pool.ask(questions), strict=True))
    pool.close()

    agreed: dict[str, list[bool]] = {}
    missed, false_positives = [], []
    for row, outcome in zip(rows, outcomes, strict=True):
        is_right = is_equal(replies.get(outcome, outcome))
        agreed.setdefault(row["label_by"], []).append(is_right == row["expected"])
        missed += [row["id"]] if is_right != row["expected"] else []
        false_positives += [row["id"]] if is_right and not row["expected"] else []
    shares = {label: sum(values) / len(values) for label, values in agreed.items()}
    assert shares["test-suite"] >= 0.95  # measured 0.955
    assert shares["official-scorer"] >= 0.97  # 0.972
    assert shares["author"] == 1.0
    assert not false_positives
    assert set(missed) <= set(MISSED)
