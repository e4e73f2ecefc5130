"""Option letters in answers."""

import string

import pytest

from care_jax.rewards.equivalence.options import choice_letter, choice_letters


@pytest.mark.parametrize(
    "form",
    ["{}", "({})", "[{}]", "{}.", "{}: 45", "({}) 45", "The answer is {}.", "so {}, not F",
     "Option {}", "choice ({})."],
)  # fmt: skip
def test_a_choice_is_the_one_letter_that_is_named(form):
    for letter in string.ascii_uppercase[:5]:
        assert choice_letter(form.format(letter), 5) == letter
        assert choice_letter(form.format(letter), ord(letter) - ord("A")) == ""


@pytest.mark.parametrize(
    "form",
    ["{}", "({})", "{}) 45", "({}) 45", "{}. 45 cm", "{}: 45", "Option {}", "{}) a cat, not f"],
)
def test_a_small_letter_chooses_alone_or_as_a_label(form):
    for letter in string.ascii_lowercase[:5]:
        assert choice_letter(form.format(letter), 5) == letter.upper()
        assert choice_letter(form.format(letter), ord(letter) - ord("a")) == ""


def test_small_letters_in_text_and_formulas_choose_nothing():
    for text in ("a cat", "e.g. 45", "(a)(x + 1)", "a) 30 or b) 45", "a) 30 or b", "a, b"):
        assert choice_letter(text, 5) == "", text


def test_several_letters_are_a_set():
    for text in ("ACD", "dca", "A, C and D", "(A)(C)(D)", "A; C; D", "A & C, D."):
        assert choice_letters(text, 4) == {"A", "C", "D"}, text
    assert choice_letters("A", 4) == {"A"}
    for text in ("", "ACE", "AAC", "A or C", "not A", "A = C", "A, 5"):
        assert choice_letters(text, 4) == set(), text


def test_a_negated_letter_does_not_count():
    assert choice_letter("for sure D, it can't be A or B", 4) == "D"
    assert choice_letter("It's not A because it is odd, so it is B", 4) == "B"
    assert choice_letter("B不是 A", 4) == "B"
    for text in ("A and C", "A is wrong", "A? No", "neither A nor B", "A or another", "A and b"):
        assert choice_letter(text, 4) == "", text


def test_a_letter_after_but_spoils_another():
    for text in ("B, but C", "I thought B, but it is C", "B is tempting, but C is right"):
        assert choice_letter(text, 4) == "", text
    assert choice_letter("It is B, but not C as it seems", 4) == "B"


def test_words_and_articles_name_no_choice():
    for text in ("A triangle", "I think so", "DAB", "\\A", "D'Artagnan", ""):
        assert choice_letter(text, 10) == "", text
    assert choice_letter("I think B", 10) == "B"
    assert choice_letter("A is right", 10) == "A"
