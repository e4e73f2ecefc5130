"""Names and values of assignments."""

import pytest

from care_jax.rewards.equivalence import assignments


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("x = 7", "x", "7"),
        ("f(2) = 7", "f(2)", "7"),
        ("x_1=y=7", "x_1", "7"),
        ("\\angle ABC = 50", "\\angle ABC", "50"),
        ("|AB| = 7", "|AB|", "7"),
        ("|x| = 7", "", "|x| = 7"),
        ("\\lvert y \\rvert = 7", "", "\\lvert y \\rvert = 7"),
        ("twice x = 7", "", "twice x = 7"),
        ("If x = 7", "", "If x = 7"),
        ("IF = 7", "IF", "7"),
        ("x \\approx 11", "x", "11"),
        ("x = \\pi \\approx 3.14", "x", "\\pi"),
        ("\\pi^2 \\approx 9.87", "", "\\pi^2"),
        ("\\approx 3", "", "3"),
        ("7", "", "7"),
        ("7 = x", "", "7 = x"),
        ("2x = 7", "", "2x = 7"),
        ("x + y = 7", "", "x + y = 7"),
        ("x = 1 < 2", "", "x = 1 < 2"),
        ("x = 4/2 = 2 = 2.0", "x", "2.0"),
        ("x = 6 = 5", "", "x = 6 = 5"),
        ("x = 6 y = 5", "", "x = 6 y = 5"),
        ("x = 6 cm y = 5 cm", "", "x = 6 cm y = 5 cm"),
        ("V = r^2 h = 5", "V", "5"),
    ],
)
def test_an_assignment_is_a_name_and_its_last_exact_value(text, name, value):
    assert assignments.split(text) == (name, value)
