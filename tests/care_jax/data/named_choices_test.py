"""Answers to questions with choices: which of them name a choice."""

import pytest

from care_jax.batch import Unusable
from care_jax.data.choices import check_answer


@pytest.mark.parametrize(
    "answer", ["B", "(b)", "B. y", "Option B", "AC", "C, A", "y", "bad", "Bad"]
)
def test_a_choice_is_named_by_its_text_or_its_letters(answer):
    check_answer(answer, answer, ("x", "y", "z", "bad"))


@pytest.mark.parametrize("answer", ["BAD", "bad", "Point C", "E", "CA", "AE", "w", "not B"])
def test_words_of_letters_name_no_choice(answer):
    with pytest.raises(Unusable, match="answer not among the choices"):
        check_answer(answer, answer, ("x", "y", "z", "poor"))
