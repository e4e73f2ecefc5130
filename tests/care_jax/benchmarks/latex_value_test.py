"""Values of LaTeX by hand, and what has none."""

import math

import pytest

from care_jax.benchmarks.latex_value import value

VALUES = [
    ("7", 7),
    ("2.0", 2),
    (".5", 0.5),
    ("1,000", 1000),
    ("1E3", 1000),
    ("7\\%", 0.07),
    ("2+3\\times4", 14),
    ("-2^2", -4),
    ("2^{10}", 1024),
    ("10^{-2}", 0.01),
    ("\\dfrac{1}{2}+\\frac{3}{4}", 1.25),
    ("2\\frac{1}{2}", 1.0),  # side by side is a product
    ("6/2(3)", 1.0),  # and binds closer than a slash
    ("6/2\\cdot3", 9.0),
    ("12:30", 0.4),
    ("2\\sqrt{3}+\\frac{4\\pi}{3}", 2 * math.sqrt(3) + 4 * math.pi / 3),
    ("\\sqrt[3]{8}", 2.0),
    ("\\left(1+2\\right)(3)", 9),
    ("3!", 6),
    ("\\binom{4}{2}", 6),
    ("\\sin 1\\cos(2)", math.sin(1) * math.cos(2)),
    ("\\cos^{-1} 1", 0.0),
    ("\\log_{2} 8", 3.0),
    ("\\lfloor 2.5 \\rfloor", 2),
    ("\\frac{3}{4}}.theansweris", 0.75),  # what cannot go on ends it
    ("5)x", 5),
]
NONE = ["", "x", "2x", "5cm", "5\\text{cm}", "1,2", "5=5", "5<6", "5;6", "5°", "30^\\circ",
        "5\\pm1",
        "(5", "5+", "1/0", "\\sqrt{-1}", "9^{9^{9^{9}}}", "9^{99999}", "200!", "1" * 500, "1" * 61,
        "(-8)^{0.5}", "\\log^{-1} 1",
        "(" * 300, "\\frac{a}{b}", "e", "\\infty", "nan"]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), VALUES)
def test_value_of(text, expected):
    found = value(text)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert type(found) is type(expected)


@pytest.mark.parametrize("text", NONE)
def test_has_no_value(text):
    assert value(text) is None
