"""The answer of a text with sentences."""

from care_jax.rewards.equivalence.free_text import (
    final_answer,
    formula_of_sentence,
    value_of_sentence,
)


def test_free_text_settles_on_its_last_answer():
    assert final_answer("First 3. The final answer is 12,000,023. I hope so.") == "12,000,023"
    assert final_answer("It has 3 + 4 = 7 sides.") == "7"
    assert final_answer("So $x$ is $\\frac{1}{2}$.") == "$\\frac{1}{2}$"
    assert final_answer("Final answer: The volume of $V$ is 120.") == "120"
    assert final_answer("The answer is 35 + 70 = 105.") == "105"
    assert final_answer("The answer is \\frac{2}{5} of it.") == "\\frac{2}{5}"
    assert final_answer("The answer is red. It has 5.") == "red"
    for joined in (
        "2 and 3", "1, 2, and 3", "2010-2011", "12/5/2010", "10:30 AM", "18 to 24", "not 5 but 6",
        "(B) 15", "$x=2$ or $x=3$",
    ):  # fmt: skip
        assert final_answer(f"It has 7. The answer is {joined}.") == joined
        assert final_answer(f"It has 7, we find {joined}") == joined
    assert final_answer("The answer is x = 2 or x = 3.") == "2 or x = 3"
    assert final_answer("The answer is 5 and that is all.") == "5"
    for formula in ("√3", "5√3", "12π", "12\\pi", "x^2 + 1", "2x + 1", "2.5 × 10^3", "4\\sqrt{2}",
                    "60° and 120°", "x > 3", "5 million", "-√2", "3/4√2"):  # fmt: skip
        assert final_answer(f"It has 7. The answer is {formula}.") == formula
        assert final_answer(f"It has 7, we find {formula}") == formula
    # A formula within a line does not go over it, and its numbers are no answers.
    assert final_answer("Answer \\( \n 9 \n \\)") == "Answer \\( \n 9 \n \\)"


def test_a_sentence_about_a_computed_quantity_does_not_state_the_value():
    for name in ("Twice the number", "Three times the number", "The opposite of x", "Double x",
                 "One third of them", "x squared"):  # fmt: skip
        assert value_of_sentence(f"{name} is 5", []) == f"{name} is 5"
        assert formula_of_sentence(f"So {name} is $5$") == f"So {name} is $5$"
    for name in ("The area of the square", "The number of times", "The area in cm squared"):
        assert value_of_sentence(f"{name} is 5", []) == "5"
    assert formula_of_sentence("By the square root of both sides, we get $5$") == "$5$"
    assert value_of_sentence("x的相反数是5", []) == "x的相反数是5"
    assert value_of_sentence("它的面积是5", []) == "5"
