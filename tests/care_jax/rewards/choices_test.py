"""Answers to questions with options: which option is named, if any."""

import pytest
from answer_pairs import compare

from care_jax.rewards.answers import is_equivalent


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


def test_the_name_of_a_value_is_no_option():
    for values, names in (
        (("30°", "45°", "60°", "90°"), ("∠B = {}", "m∠B = {}", "\\arcsin B = {}")),
        (("0.3", "0.4", "0.6", "0.8"), ("P(B) = {}", "\\sin B = {}")),
        (("(1, 2)", "(3, 5)", "(2, 1)", "(3, 4)"), ("B{}", "B {}", "B = {}")),
        (("2 A", "3 A", "4 A", "6 A"), ("I = {}",)),
    ):
        wrong = values[0].translate(str.maketrans("123", "777"))
        for name in names:
            for letter, value in zip("ABCD", values, strict=True):
                assert is_equivalent(name.format(value), letter, choices=values), (name, value)
                assert not is_equivalent(name.format(wrong), letter, choices=values), (name, wrong)
    for prediction in ("C. ∠A = 60°", "C (∠A = 60°)", "x = C"):
        assert is_equivalent(prediction, "C", choices=("30°", "45°", "60°", "90°")), prediction
    for gold in "AD":
        assert not is_equivalent("C, ∠A = 90°", gold, choices=("30°", "45°", "60°", "90°"))


def test_a_sentence_is_compared_as_a_whole_if_choices_are_sentences():
    for mean, median in (("The mean is $5$", "The median is $6$"), ("A mean is 5", "A mode is 6")):
        assert compare(mean, "A", choices=(mean, median)) == "equal"
        assert compare(mean.replace("5", "6"), "B", choices=(mean, median)) == "different"
    for sentence in ("The mean is $5$", "The mean is 5", "The mean is 5 cm"):
        assert compare(sentence, "A", choices=("5", "6")) == "equal"
        assert compare(sentence, "B", choices=("5", "6")) == "different"


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
        ("故选：{letter}", True),
        ("{letter}选项", True),
        ("不选{letter}", False),
        ("{letter}选项错误", False),
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


def test_an_article_is_no_option():
    for texts in (("cat", "dog", "horse"), ("a cat", "a dog", "the horse")):
        for prediction in ("A dog", "a dog", "the dog.", "dog", "B. the dog"):
            assert compare(prediction, "B", choices=texts) == "equal", prediction
        for prediction in ("A", "A cat", "A. dog", "A dog or a cat"):
            assert compare(prediction, "B", choices=texts) == "different", prediction


def test_a_reason_names_no_option():
    angles = ("45°", "60°", "75°", "105°")
    for prediction in ("C. 75°, because 180° − 105° = 75°", "75, since 45 + 60 = 105"):
        assert compare(prediction, "C", choices=angles) == "equal", prediction
    for prediction in ("C. 60°, because 75°", "C, because 75 or 60", "C, because 75. So B"):
        assert compare(prediction, "C", choices=angles) == "different", prediction
    for prediction, gold in (("Yes, it does", "A"), ("no, because there is no dog", "B")):
        assert compare(prediction, gold, choices=("Yes", "No")) == "equal", prediction
    reasons = ("yes, because it is hot", "yes, because it is cold")
    assert compare("Yes, because it is cold", "A", choices=reasons) == "different"


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


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        (("x > 2", "x < 2"), "x<2"),
        (("(1, 2)", "(2, 1)"), "(2,1)"),
        (("y = 2x + 1", "y = 2x - 1"), "y=2x-1"),
        (("$x^2+1$", "$x^2-1$"), "x^{2}-1"),
        (("3:00", "4:00"), "4 o'clock"),
        (("Manet", "Monet"), "Monet"),
        (("平行", "垂直"), "垂直"),
    ],
)
def test_a_letter_with_the_text_of_another_option_is_in_doubt(texts, text):
    for joint in (". ", ".", "．", ") "):
        assert compare(f"B{joint}{text}", "B", choices=texts) == "equal"
        assert compare(f"A{joint}{text}", "A", choices=texts) == "different"


def test_what_stands_beside_a_box_is_part_of_it():
    assert compare("\\boxed{5} cm", "5 cm", units_matter=True) == "equal"
    assert compare("\\boxed{5}\\text{ cm}", "5 cm", units_matter=True) == "equal"
    assert compare("\\boxed{B} or C", "B", choices=("1", "2", "3")) == "different"


def test_options_that_differ_in_case_alone_are_told_apart():
    genotypes = ("AA", "Aa", "aa")
    for index, text in enumerate(genotypes):
        for gold in genotypes:
            expected = "equal" if text == gold else "different"
            assert compare(text, gold, choices=genotypes) == expected
            assert compare("ABC"[index], gold, choices=genotypes) == expected


def test_an_option_that_is_a_formula_is_named_with_the_case_of_its_symbols():
    choices = ("\\frac{M}{m}", "\\frac{2M}{m}", "M - m")
    for prediction in ("\\frac{M}{m}", "A. \\frac{M}{m}", "M/m", "\\frac{M}{m} (A)"):
        assert is_equivalent(prediction, "A", choices=choices), prediction
    for prediction in ("\\frac{m}{M}", "m/M", "A. \\frac{2M}{m}", "\\frac{m}{m}"):
        assert not is_equivalent(prediction, "A", choices=choices), prediction
    assert not is_equivalent("m - M", "C", choices=choices)
    places = ("In the House", "On a hill")
    for prediction in ("in the house", "A. in the house", "A, that is in the house"):
        assert compare(prediction, "A", choices=places) == "equal", prediction
