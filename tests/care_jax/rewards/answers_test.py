"""Answer equivalence: decisions at sight, what is left to computer algebra, agreement on cases."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.rewards import answers
from care_jax.rewards.answers import is_equal, is_equivalent
from care_jax.rewards.equivalence.notation import clean
from care_jax.rewards.symbolic import Question, SymbolicPool
from care_jax.rewards.verifier import extract_answer

CASES = Path(__file__).parents[3].parent / "shared" / "cases" / "equivalence.jsonl"

EQUAL = [
    ("7", "7"),
    ("\\boxed{7}", "7"),
    ("$\\text{NET Excellent/good}$", "NET Excellent/ good"),
    ("1,234.50", "1234.5"),
    ("\\$10", "10"),
    ("\\frac{6}{8}", "0.75"),
    ("\\frac34", "3/4"),
    ("5 1/2", "5.5"),
    ("1000,99", "1000.99"),
    ("0.333333", "1/3"),
    ("39%", "0.39"),
    ("39\\%", "39"),
    ("17 degrees", "17°"),
    ("10\\,\\mathrm{cm}^2", "10 cm^2"),
    ("x = 7", "7"),
    ("q=7", "7"),
    ("\\angle ABC = 50^\\circ", "50"),
    ("AB=4, CD=5", "4, 5"),
    ("5, 4", "4 and 5"),
    ("(3,2)", "(p,q)=(3,2)"),
    ("\\boxed{1} and \\boxed{2}", "1, 2"),
    ("The answer is $7$.", "7"),
    ("1,22", "1.22"),
    ("1000 m", "1 km"),
    ("0.5 m", "50 cm"),
    ("USD 1,234", "$1,234"),
    ("\\varnothing", "\\emptyset"),
    # names by corners
    ("\\angle CBA", "∠ABC"),
    ("ABC", "\\angle ABC"),
    ("m\\angle CBA = 50^\\circ", "\\angle ABC = 50"),
    ("△BCA", "\\triangle ABC"),
    ("triangle CBA, triangle DEF", "\\triangle EFD, \\triangle ABC"),
    ("\\square DCBA", "\\square ABCD"),
    # scripts, roots and degrees in Unicode
    ("3 × 10⁻³", "0.003"),
    ("6.02·10²³", "6.02e23"),
    ("x⁻¹", "x^{-1}"),
    ("aₙ₊₁", "a_{n+1}"),
    ("x₁ = 1, x₂ = 2", "x_1 = 1, x_{2} = 2"),
    ("H₂SO₄", "H2SO4"),
    ("CO₂", "CO_2"),
    ("101₂", "101_2"),
    ("√3.5", "\\sqrt{3.5}"),
    ("25℃", "25°C"),
    ("30º", "30°"),
    # named values
    ("1, 2", "x=1, y=2"),
    ("1, 1", "x=1, y=1"),
    ("y=2, x=1", "x=1, y=2"),
    ("2, 1", "x=1, x=2"),
    ("2, 1", "x=1, 2"),
    ("2, 1", "x_1=1, x_2=2"),
    # units
    ("25°C", "25"),
    ("77^{\\circ}\\text{F}", "77"),
    ("25 degrees Celsius", "25°C"),
    ("25 C", "25 °C"),
    ("25°", "25°C"),
    ("5 N", "5"),
    ("5 \\text{V}", "5"),
    ("5 K", "5 kelvin"),
    ("5 kW", "5000 W"),
    ("5 KW", "5 kW"),
    ("5 mpa", "5 MPa"),
    ("5 Meters", "5 m"),
    ("5 meters squared", "5 m^2"),
    ("5 GB", "5"),
    ("5 N·m", "5 N m"),
    ("5 kg·m/s²", "5"),
    ("1.5 k\\Omega", "1500 ohms"),
    ("12\\pi N", "12\\pi"),
    # prices
    ("500 cents", "$5"),
    ("$60 per month", "$60"),
    ("50¢", "$0.50"),
    ("5 dollars", "\\$5"),
    ("US$5", "$5 USD"),
    ("-\\$5", "-5"),
    ("$\\$5$", "5"),
    ("$5 million", "5,000,000"),
    ("$5, $10", "5, 10"),
    ("$10 and $5", "$5$, $10$"),
    ("5 euros", "€5"),
    ("5 pounds", "£5"),
    ("5$", "5"),
    ("\\$20 to \\$30", "20 to 30"),
    ("\\$5\\sqrt{2}", "5\\sqrt{2}"),
    # fractions in words
    ("3 eighths", "3/8"),
    ("1 half", "0.5"),
    ("5 quarters", "1.25"),
    ("2 thirds", "2/3"),
]
DIFFERENT = [
    ("", "7"),
    ("8", "7"),
    ("0.333", "1/3"),
    ("7.0000001", "7"),
    ("0.07", "7"),
    ("10 m", "10 cm"),
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
    ("2.3", "2,3"),
    ("12\\pi cm", "12\\pi m"),
    ("计划的比例为13/28 吗", "13/28"),
    # names by corners
    ("\\angle BAC", "\\angle ABC"),
    ("\\angle ABC", "\\triangle ABC"),
    ("\\angle BAC = 50", "\\angle ABC = 50"),
    ("BCA", "ABC"),
    ("CBA", "ABC"),
    ("ABCD", "ACBD"),
    ("\\square ACBD", "\\square ABCD"),
    ("ABC, DEF", "DEF, BAC"),
    ("XII", "IXI"),
    ("DOG", "GOD"),
    ("not ABC", "ABC"),
    # named values
    ("2,1", "x=1,y=2"),
    ("3, 1, 2", "a=1,b=2,c=3"),
    ("y=2, x=1", "1, 2"),
    ("{2, 1}", "x=1, y=2"),
    ("4, 5", "CD=4, AB=4"),
    ("x=2, y=1", "x=1, y=2"),
    # units
    ("25℃", "25°F"),
    ("25 K", "25°C"),
    ("5 N", "5 W"),
    ("5 N", "5 N·m"),
    ("5 mW", "5 MW"),
    ("5 mPa", "5 MPa"),
    ("5 W, 1", "5 mW, 1"),
    ("12\\pi N", "12\\pi J"),
    # prices
    ("5 cents", "$5"),
    ("€5", "$5"),
    ("5 km", "$5"),
    ("5 kg", "\\$5"),
    ("$5 K", "$5"),
    ("$60 per month", "$60 per year"),
    ("5 yen", "5 yuan"),
    # number words
    ("3 eighths", "3"),
    ("3 thirteenths", "3"),
    ("3 tens", "3"),
    ("3 squared", "3"),
    ("5 factorial", "5"),
    ("7 quadrillion", "7"),
    ("7 lakh", "7"),
]
EQUAL += [
    # ranges, dates, ratios, scores and sizes
    ("18 to 24", "18–24"),
    ("$10,000-$19,999", "10000-19999"),
    ("01/02/2010", "1/2/2010"),
    ("2:4", "1:2"),
    ("2:4:6", "1 : 2 : 3"),
    ("3 by 5", "3x5"),
    # chains of equations
    ("x = 10/2 = 5", "5"),
    ("x = 2 + 3 = 5", "5"),
    ("AB = 0.5 m = 50 cm", "50 cm"),
    ("V = \\pi r^2 h = 12\\pi", "12\\pi"),
    ("C = 2 \\pi r = 12\\pi", "12\\pi"),
    # the formula of a sentence
    ("so the area of it is $5$.", "5"),
    ("area of the circle: $5$", "5"),
    ("We conclude that $x=5$", "5"),
    # primes
    ("f^{\\prime}(x)", "f'(x)"),
    ("y″", "y''"),
    ("A’", "A'"),
    ("'red'", "red"),
    ("[\"red\", 'blue']", "[red, blue]"),
    ("f'(x) = 2x", "2x"),
    ("f'(2) = 5", "5"),
    ("5'", "5 ft"),
    ("5″", "5 inches"),
    ("60'", "60 minutes"),
    # percentages
    ("50%", "0.5"),
    ("50 percentage points", "50%"),
    ("50 per cent", "50%"),
    # sets have no multiplicity
    ("{2, 3}", "\\{2, 2, 3\\}"),
    ("2, 3, 2", "2, 2, 3"),
    ("-4, 0", "(-4, 0)"),
    # letters of options that are not known
    ("A. 15", "A"),
    ("(A) 15", "A"),
    ("A: 15", "(A)"),
    ("Option A", "A"),
    ("The correct option is A", "A"),
    ("x=A", "A"),
    ("the answer is: 5", "5"),
    # any words may be a unit if they are a plural or a rate
    ("5 blue marbles", "5"),
    ("5 people", "5"),
    ("3 teeth", "3"),
    # links of a chain that are the value in another unit, or rounded
    ("\\theta = 45^\\circ = \\frac{\\pi}{4}", "\\frac{\\pi}{4}"),
    ("x = 10/3 = 3.33", "3.33"),
    ("5 years old", "5"),
    ("3 kg per person", "3"),
    ("1 apple", "1"),
    ("300 分钟", "300"),
    ("18 km/h", "5 m/s"),
    ("60 mph", "88 ft/s"),
    # numbers
    ("1.5x10^3", "1500"),
    ("6.02 x 10^{23}", "6.02e23"),
    ("$2.5M", "2.5 million"),
    ("2.5bn", "$2,500,000,000"),
    ("0.\\overline{3}", "1/3"),
    ("1.1\\overline{6}", "7/6"),
]
DIFFERENT += [
    # ranges, dates, ratios, scores and sizes
    ("25-34", "35-44"),
    ("18–24", "25–31"),
    ("2010-2011", "2015-2016"),
    ("2-1", "3-2"),
    ("0-0", "1-1"),
    ("1/2/2010", "2/4/2010"),
    ("12/12/2010", "11/11/2010"),
    ("2010-01-02", "2010-02-01"),
    ("2010-01-02", "2010/01/02"),
    ("10:20", "11:22"),
    ("9:30-10:30", "10:30-11:30"),
    ("0:3", "0:4"),
    ("1:2:3", "2:4:5"),
    ("3x5", "5x3"),
    ("2x6", "3x4"),
    # several answers and contradictions
    ("x=6 or x=2\\sqrt{3}", "2\\sqrt{3}"),
    ("x=\\sqrt{2}, x=2\\sqrt{3}", "2\\sqrt{3}"),
    ("AB=6; BC=2\\sqrt{3}", "2\\sqrt{3}"),
    ("x=6 \\quad x=2\\sqrt{3}", "2\\sqrt{3}"),
    ("AB = 6 cm \\quad BC = 2\\sqrt{3} cm", "2\\sqrt{3}"),
    ("x=6\\\\x=2\\sqrt{3}", "2\\sqrt{3}"),
    ("\\theta=2\\pi, \\theta=\\pi", "\\pi"),
    ("f(x)=x-1, g(x)=x+1", "x+1"),
    ("x = 6 = 5", "5"),
    ("x = 6 = 2\\sqrt{3}", "2\\sqrt{3}"),
    ("x = 6 = 5", "x = 5"),
    # prose around a formula
    ("six or $5$", "5"),
    ("less than $5$", "5"),
    ("less than $5$", "more than $5$"),
    ("anything but $5$", "5"),
    ("square root of $5$", "5"),
    ("the wrong answer is $5$", "5"),
    ("it is perhaps $5$", "5"),
    # primes
    ("A'", "A"),
    ("A''", "A'"),
    ("A'B", "AB'"),
    ("f'(x)", "f(x)"),
    ("y'=2x", "y=2x"),
    ("(x', y')", "(x,y)"),
    ("A^T", "A"),
    ('5"', "5'"),
    ("5'", "5 inches"),
    ("60'", "60^\\circ"),
    ("5'", "5 J"),
    # percentages
    ("5 cm", "5%"),
    ("$5", "5%"),
    ("25°", "25\\%"),
    ("500%", "5 kg"),
    # brackets and multiplicity
    ("2, 3", "[2,3)"),
    ("(2,3]", "2, 3"),
    ("2, 3", "2, 2, 3"),
    ("1234", "(1,234)"),
    # letters of options that are not known
    ("B. 15", "A"),
    ("B = A", "A"),
    ("Option A or B", "A"),
    ("The answer is not A", "A"),
    ("A is wrong", "A"),
    # words that are no units
    ("5 wrong", "5"),
    ("5 \\text{wrong}", "5"),
    ("1 wrong", "1"),
    ("5 below zero", "5"),
    ("5 less", "5"),
    ("5 alpha", "5"),
    ("5 square", "5"),
    ("5 pairs", "5"),
    ("18 km/h", "6 m/s"),
    ("5 Mg", "5 mg"),
    ("0.\\overline{3}", "0.3"),
    # neither products nor sums
    ("II", "-1"),
    ("1.0.25", "0.25"),
    ("(3)", "(1)(3)"),
    ("$5 million", "$5"),
]
# Left to computer algebra.
ASKED_EQUAL = [
    ("2AB", "2BA"),
    ("3ABC", "3CBA"),
    ("AB", "BA"),
    ("ABC + 1", "1 + CAB"),
    ("10⁻³", "0.001"),
    ("2¹⁰", "1024"),
    ("√(x+1)", "\\sqrt{x+1}"),
    ("√(3)/2", "\\frac{\\sqrt3}{2}"),
    ("∛(27)", "3"),
    ("∜16", "2"),
    ("log₂8", "3"),
    ("\\$100(1.05)^2", "110.25"),
    ("√\\frac{1}{2}", "\\sqrt{0.5}"),
    ("7-2", "5"),  # a difference, as 5 is one number
    ("y = x + x + 1 = 2x + 1", "1 + 2x"),
    ("y = x + x + 1 = 1 + 2x", "y = 2x + 1"),
    ("f'(x) = x + x", "f'(x) = 2x"),
    ("A^T + B", "B + A^{T}"),
    ("x=\\pm 2", "x=2, x=-2"),
]
ASKED_DIFFERENT = [
    ("3ABC", "3"),
    ("2GB", "2"),
    ("5N", "5"),
    ("5 \\cdot N", "5"),
    ("\\frac{1}{2}mV^2", "1/2"),
    ("\\rho V", "\\rho"),
    ("101₂", "1012"),
    ("√x+1", "\\sqrt{x+1}"),
    ("x2", "2x"),
    ("A = 5", "A"),
    ("5 sqrt", "5"),
    ("2010 May", "2010"),
]


def compare(*args, **kwargs):
    """ "equal", "different", "refused: ..." or the question; verifier_test has the rules' names."""
    outcome = answers.compare(*args, **kwargs)
    is_decided = not isinstance(outcome, Question) and not outcome.startswith("refused")
    return outcome.partition(":")[0] if is_decided else outcome


@pytest.mark.parametrize(("prediction", "gold"), EQUAL)
def test_notations_of_one_answer_are_equal_at_sight(prediction, gold):
    assert compare(prediction, gold) == "equal"


@pytest.mark.parametrize(("prediction", "gold"), DIFFERENT)
def test_wrong_hedged_and_multiple_answers_are_different_at_sight(prediction, gold):
    assert compare(prediction, gold) == "different"


@pytest.mark.parametrize(("prediction", "gold"), ASKED_EQUAL)
def test_formulas_in_other_notations_are_equal_by_computer_algebra(prediction, gold):
    assert isinstance(compare(prediction, gold), Question)
    assert is_equivalent(prediction, gold)


@pytest.mark.parametrize(("prediction", "gold"), ASKED_DIFFERENT)
def test_factors_are_no_units_and_scripts_are_no_digits(prediction, gold):
    assert isinstance(compare(prediction, gold), Question)
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
        return "asked" if isinstance(found, Question) else found

    if "=" not in one + other:  # `x = 7` answers 7, but 7 may not answer an equation
        assert outcome(one, other) == outcome(other, one)


@settings(deadline=None)
@given(ANSWERS, ANSWERS, DRESSES, DRESSES)
def test_latex_around_an_answer_changes_nothing(answer, gold, dress, other):
    assert compare(dress.format(answer), other.format(answer)) == "equal"
    plain, dressed = compare(answer, gold), compare(dress.format(answer), other.format(gold))
    assert isinstance(plain, Question) == isinstance(dressed, Question)
    assert isinstance(plain, Question) or plain == dressed


@settings(deadline=None)
@given(NUMBERS, NUMBERS, UNITS, DRESSES)
def test_a_unit_on_one_side_changes_nothing_but_a_percent(number, gold, unit, dress):
    plain = compare(number, gold)
    with_unit = compare(dress.format(number + unit), gold)
    if "%" not in unit or plain == "equal":
        assert with_unit == plain
    assert compare(number + unit, dress.format(number + unit)) == "equal"


@settings(deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), DRESSES)
def test_integers_are_equal_only_to_themselves(number, other, dress):
    assert compare(dress.format(number), f"{other:,}") == (
        "equal" if number == other else "different"
    )


@given(st.text("0123456789.,/%^_{}()[]\\fracsqtx=<>+- $", max_size=80), ANSWERS)
@settings(deadline=None, max_examples=300)
def test_reading_never_fails(text, gold):
    for outcome in (
        compare(text, gold),
        compare(gold, text),
        compare(text, gold, choices=("7", gold)),
    ):
        assert isinstance(outcome, Question) or outcome.split(":")[0] in (
            "equal", "different", "refused",
        )  # fmt: skip


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


@pytest.mark.parametrize(
    ("prediction", "gold", "is_same"),
    [
        ("b) 45", "B", True),
        ("(b) 45", "B", True),
        ("b. 45", "B", True),
        ("b: 45", "B", True),
        ("Option b", "B", True),
        ("choice (b)", "B", True),
        ("c) 60", "B", False),
        ("a) 30 or b) 45", "B", False),
        ("b) 45 or c", "B", False),
        ("option b or option c", "B", False),
        ("5 A", "A", False),  # amperes
        # several options
        ("CA", "AC", True),
        ("C, A", "AC", True),
        ("(A), (C)", "AC", True),
        ("A, C and D", "DAC", True),
        ("a, c", "A and C", True),
        ("ACD", "AC", False),
        ("A", "AC", False),
        ("AB", "AC", False),
        ("A or C", "AC", False),
        ("not A, C", "AC", False),
        ("AC", "A", False),
    ],
)
def test_options_are_named_by_small_letters_and_several_in_any_order(prediction, gold, is_same):
    assert is_equivalent(prediction, gold, choices=("30", "45", "60", "90")) == is_same


@pytest.mark.parametrize(
    ("form", "is_named"),
    [
        ("{letter} is right", True),
        ("{letter} because the sides are not equal", True),
        ("{letter}, not {other}", True),
        ("{other} is wrong, so {letter}", True),
        ("it can't be {other}, so it is {letter}", True),
        ("Option {letter}: {text}", True),
        ("({letter}) {text}.0 cm", True),
        ("{letter}, which is {text}", True),
        ("{text} ({letter})", True),
        ("{letter} is wrong", False),
        ("{letter} is not the answer", False),
        ("{letter} isn't", False),
        ("({letter}) is not right", False),
        ("exclude {letter}", False),
        ("{letter} is ruled out", False),
        ("anything but {letter}", False),
        ("{letter} cannot be determined", False),
        ("{letter}? No", False),
        ("wrong: {letter}", False),
        ("maybe {letter}", False),
        ("{letter} or another", False),
        ("{letter} and {small}", False),
        ("{letter}. {text} {small}. {wrong}", False),
        ("{letter} or {wrong}", False),
        ("{text} or {wrong} ({letter})", False),
        ("{letter}. {wrong}", False),
        ("({letter}) {wrong}.0", False),
        ("{letter} = {wrong}", False),
        ("{wrong}, {letter}", False),
        ("{letter}1", False),
    ],
)
def test_an_option_is_named_without_doubt_and_without_another_text(form, is_named):
    texts = ("12", "15", "18", "20")
    for index in range(4):
        names = {"letter": "ABCD"[index], "other": "ABCD"[index - 1], "small": "abcd"[index - 1]}
        text = form.format(**names, text=texts[index], wrong=texts[index - 1])
        assert is_equivalent(text, "ABCD"[index], choices=texts) == is_named, text


def test_the_text_of_an_option_may_deny_or_join():
    choices = ("red or blue", "There is no solution", "not linear", "none of the above")
    for index, text in enumerate(choices):
        letter = "ABCD"[index]
        for prediction in (text, f"{letter}. {text}", f"({letter}) {text}", f"{text} ({letter})"):
            assert compare(prediction, letter, choices=choices) == "equal", prediction
            assert compare(prediction, "ABCD"[index - 1], choices=choices) == "different"


def test_the_text_of_an_option_is_no_part_of_a_number():
    choices = ("\\frac{1}{2}", "\\frac{1}{3}", "2", "1.2")
    for prediction in ("A. 1/2", "A because 1/2", "(A) 0.5"):
        assert compare(prediction, "A", choices=choices) == "equal", prediction
    assert compare("D is 1.2", "D", choices=choices) == "equal"
    assert compare("A. 1/3", "A", choices=choices) == "different"


def test_a_pronoun_is_no_option():
    choices = tuple("0123456789")
    for prediction in ("I cannot determine", "I can't", "I do not know"):
        assert compare(prediction, "I", choices=choices) == "different", prediction
    assert compare("I think it is I", "I", choices=choices) == "equal"


def test_an_answer_that_fits_several_options_is_none():
    lengths = ("5 cm", "5 m", "5 km", "50 cm")
    for gold in "ABC":
        assert compare("5", gold, choices=lengths) == "different"
    assert compare("0.05 m", "A", choices=lengths) == "equal"
    assert compare("50", "D", choices=lengths) == "equal"
    ages = ("18-24", "25-31")
    assert compare("18 to 24", "A", choices=ages) == "equal"
    assert compare("19-25", "A", choices=ages) == "different"
    signs = ("less than $5$", "more than $5$")
    assert compare("less than 5", "A", choices=signs) == "equal"
    assert compare("less than 5", "B", choices=signs) == "different"


def test_a_figure_is_an_option_by_its_corners():
    angles = ("\\angle ABC", "\\angle ACD")
    assert compare("\\angle CBA", "A", choices=angles) == "equal"
    assert compare("\\angle BAC", "A", choices=angles) == "different"


def test_options_that_differ_in_case_alone_are_told_apart():
    genotypes = ("AA", "Aa", "aa")
    for index, text in enumerate(genotypes):
        for gold in genotypes:
            expected = "equal" if text == gold else "different"
            assert compare(text, gold, choices=genotypes) == expected
            assert compare("ABC"[index], gold, choices=genotypes) == expected


def test_a_price_has_a_unit_where_units_matter():
    for number, price in (("5", "$5"), ("5", "\\$5"), ("5", "€5"), ("5", "5 N")):
        assert compare(number, price) == compare(price, price, units_matter=True) == "equal"
        assert compare(number, price, units_matter=True) == "different"
    assert compare("$5$", "5", units_matter=True) == "equal"


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
        "100!",
        "9!!",
        "(9!)!",
        "2^9!",
        "\\binom{100}{50}",
        "\\int x dx",
        "\\sum_k k",
        "(" * 20 + ")" * 20,
    ],
)
def test_what_only_exhausts_a_machine_is_refused(prediction):
    assert compare(prediction, "5\\sqrt{3}").startswith("refused: ")


def test_the_gold_answer_licenses_its_own_constructs():
    assert isinstance(compare("24", "4!"), Question)
    assert isinstance(compare("4!", "24"), Question)  # small enough
    assert isinstance(compare("\\binom{5}{2}", "10"), Question)
    assert isinstance(compare("\\sum_k k^2", "\\sum_j j^2"), Question)


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
     "b) " * 600, "US$" * 600 + "5", "5 " + "N\\cdot " * 200],
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
    questions = [outcome for outcome in outcomes if isinstance(outcome, Question)]
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
