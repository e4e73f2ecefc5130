"""One value in many notations is one answer, and a value beside it is another.

Each test draws a value, renders it in two notations, and perturbs it. Questions go to one worker.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.rewards import answers
from care_jax.rewards.symbolic import Comparison, SymbolicPool, is_equal

quickly = settings(deadline=None, derandomize=True, max_examples=40)
briefly = settings(deadline=None, derandomize=True, max_examples=8)  # where algebra is asked


@pytest.fixture(scope="module")
def agree():
    """Whether two texts are equivalent, in a pool of this module's own."""
    pool = SymbolicPool(num_workers=1, timeout=20.0)

    def agree(prediction, gold, **limits):
        outcome = answers.compare(prediction, gold, **limits)
        if isinstance(outcome, Comparison):
            (outcome,) = pool.ask([outcome])
        assert outcome not in ("timeout", "crash"), (prediction, gold)
        return is_equal(outcome)

    yield agree
    pool.close()


PRODUCTS = ["{c}{x}{y}{z}", "{c} {z} {x} {y}", "{c} \\cdot {x} \\cdot {y}{z}", "{c}*{x}*{z}*{y}",
            "{c}{z} \\times {y} \\times {x}", "({c}{x})({y}{z})", "{c}({x})({y}){z}"]  # fmt: skip


@briefly
@given(
    st.integers(2, 99),
    st.permutations("abchmrxyz").map(lambda letters: letters[:3]),
    st.permutations(PRODUCTS).map(lambda forms: forms[:2]),
)
def test_a_product_is_its_factors_with_and_without_signs(agree, factor, letters, forms):
    one, other = forms
    names = dict(zip("xyz", letters, strict=True))
    text = one.format(c=factor, **names)
    assert agree(text, other.format(c=factor, **names))
    assert not agree(text, other.format(c=factor + 1, **names))
    assert not agree(text, other.format(c=factor, **{**names, "z": "k"}))
    assert not agree(text, other.format(c=factor, **{**names, "z": ""}).replace("()", "(1)"))


@briefly
@given(st.integers(2, 99), st.integers(2, 99))
def test_numbers_in_brackets_side_by_side_are_a_product(agree, a, b):
    for text in (f"({a})({b})", f"{a}({b})", f"({a})(-1)(-{b})"):
        assert agree(text, f"{a * b}") and not agree(text, f"{a + b + (a == b == 2)}"), text


ANGLES = ["\\{f} {n}^\\circ", "\\{f}({n}°)", "{f}({n}^{{\\circ}})",
          "\\{f} ({n} \\text{{ degrees}})", "\\{f}(\\frac{{{n}\\pi}}{{180}})"]  # fmt: skip


@briefly
@given(
    st.sampled_from(["sin", "cos", "tan"]),
    st.integers(1, 44),
    st.permutations(ANGLES).map(lambda forms: forms[:2]),
)
def test_degrees_inside_a_function_are_an_angle(agree, function, angle, forms):
    one, other = (form.format(f=function, n=angle) for form in forms)
    assert agree(one, other) and agree(f"3{one}", f"3 \\cdot {other}")
    for wrong in (f"\\{function} {angle}", f"\\{function} {angle + 1}^\\circ"):
        assert not agree(wrong, one)


@briefly
@given(st.integers(-9, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_complex_number_is_its_parts_in_any_notation(agree, real, imaginary, error):
    gold = f"{real}+{imaginary}i"
    assert agree(f"{imaginary}i {real:+}", gold)
    for unit in ("*i", "\\mathrm{i}", "\\sqrt{-1}", "e^{i\\pi/2}"):
        assert agree(f"{real}+{imaginary}{unit}", gold), unit
    for text in (f"{real}-{imaginary}i", f"{real + error}+{imaginary}i", f"{real}+{imaginary}"):
        assert not agree(text, gold), text


CELLS = st.integers(-9, 9)
MATRICES = {
    "pmatrix": ("\\begin{pmatrix}", " & ", " \\\\ ", "\\end{pmatrix}"),
    "bmatrix": ("\\begin{bmatrix}", "&", "\\\\", "\\\\\\end{bmatrix}"),
    "array": ("\\left[\\begin{array}{cc}", "&", "\\\\", "\\end{array}\\right]"),
    "rows": ("[[", ", ", "], [", "]]"),
    "semicolons": ("[", ", ", "; ", "]"),
}


def matrix(form, rows):
    opening, between, below, closing = MATRICES[form]
    return opening + below.join(between.join(map(str, row)) for row in rows) + closing


@quickly
@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=2, max_size=3),
    st.permutations(list(MATRICES)).map(lambda forms: forms[:2]),
    st.integers(1, 9),
)
def test_a_matrix_is_its_cells_in_any_notation(agree, rows, forms, error):
    if "semicolons" in forms and "rows" in forms:
        forms = ["pmatrix", "rows"]
    one, other = forms
    wrong = [(rows[0][0] + error, rows[0][1]), *rows[1:]]
    assert agree(matrix(one, rows), matrix(other, rows))
    assert not agree(matrix(one, wrong), matrix(other, rows))
    assert not agree(matrix(one, [*rows, (1, 2)]), matrix(other, rows))
    if len(rows) == 2 and rows[0][1] != rows[1][0]:
        assert not agree(matrix(one, zip(*rows, strict=True)), matrix(other, rows))


@briefly
@given(st.integers(2, 99), st.integers(2, 9), st.sampled_from([0.01, 0.05]))
def test_a_rounded_decimal_equals_an_exact_value_within_a_stated_tolerance(
    agree, radicand, factor, tolerance
):
    exact, value = f"{factor}\\sqrt{{{radicand}}} + \\pi", factor * radicand**0.5 + 3.14159265
    assert agree(f"{value * (1 + 0.9 * tolerance):.6f}", exact, tolerance=tolerance)
    assert not agree(f"{value * (1 + 1.1 * tolerance):.6f}", exact, tolerance=tolerance)
    assert not agree(f"{value * (1 + 0.9 * tolerance):.6f}", exact)


ABOVE = {
    False: ["x > {a}", "{a} < x", "({a}, \\infty)", "x \\in ({a}, +\\infty)", "]{a}, \\infty[",
            "\\{{x \\mid x > {a}\\}}", "({a}, oo)"],
    True: ["x \\ge {a}", "{a} \\le x", "[{a}, \\infty)", "x >= {a}", "x \\geqslant {a}",
           "\\{{x | x \\geq {a}\\}}", "{a} ≤ x"],
}  # fmt: skip
BETWEEN = ["{a} < x < {b}", "{b} > x > {a}", "x > {a} and x < {b}", "x \\in ({a}, {b})",
           "]{a}, {b}[", "\\{{x : {a} < x < {b}\\}}"]  # fmt: skip
OUTSIDE = ["x < {a} or x > {b}", "(-\\infty, {a}) \\cup ({b}, \\infty)",
           "x \\in ({b}, \\infty) \\cup (-\\infty, {a})",
           "{b} < x \\text{{ or }} {a} > x"]  # fmt: skip
BOUNDS = st.sampled_from(["{n}", "\\frac{{{n}}}{{7}}", "{n}.5", "10^{{{n}00000000}}"])


@quickly
@given(st.data(), st.integers(1, 50), st.integers(1, 9), BOUNDS)
def test_a_relation_is_its_interval_and_no_other(agree, data, low, width, bound):
    """A bound may be too large to compute."""
    a, b = bound.format(n=low), bound.format(n=low + width)
    is_closed = data.draw(st.booleans())
    for forms in (ABOVE[is_closed], BETWEEN, OUTSIDE):
        one, other = (data.draw(st.sampled_from(forms)) for _ in range(2))
        if (one[0], other[0]) == ("]", "]"):
            continue
        text = one.format(a=a, b=b)
        assert agree(text, other.format(a=a, b=b)), (one, other)
        assert not agree(text, data.draw(st.sampled_from(ABOVE[not is_closed])).format(a=a))
        if "^" not in a:
            assert not agree(text, other.format(a=b, b=f"{low + width + 1}")), (one, other)
    assert not agree(f"y > {a}", f"x > {a}") and not agree(f"x < {a}", f"x > {a}")


DECORATIONS = [
    "**{}**", "*{}*", "_{}_", "`{}`", "“{}.”", "\\mathbf{{{}}}", "{{\\bf {}}}",
    "\\textcolor{{red}}{{{}}}", "{{{{{}}}}}", "{};", "{},", ": {}", "= {}", "Ans: {}", "#### {}",
    "✅ {}", "{} \\checkmark",
    "\\therefore {}", "\\Rightarrow {}", "【{}】", "\\boldsymbol{{{}}}", "{} \\\\", "\\Large {}",
    "\\hspace{{1mm}}{}", "(({}))", "\\{{{}\\}}",
]  # fmt: skip
PLAIN = st.integers(2, 10**6).map(str) | st.integers(11, 999).map(lambda n: f"{n / 10}")


@quickly
@given(st.sampled_from(DECORATIONS), st.sampled_from(DECORATIONS), PLAIN)
def test_decorations_around_a_plain_answer_change_nothing(agree, dress, other, value):
    assert agree(dress.format(value), value)
    assert agree(other.format(dress.format(value)).replace("}}✅", "}} ✅"), value)
    assert not agree(dress.format(value), f"{value}1") and not agree(dress.format(value), "1")
    assert not agree(dress.format(f"{value}, 1"), value)


def test_every_decoration_alone(agree):
    for dress in DECORATIONS:
        assert agree(dress.format("120"), "120"), dress


TIMES = {
    "12": lambda hour, minute: f"{(hour - 1) % 12 + 1}:{minute:02} {'AP'[hour >= 12]}M",
    "dots": lambda hour, minute: f"{(hour - 1) % 12 + 1}:{minute:02} {'ap'[hour >= 12]}.m.",
    "text": lambda hour, minute: f"{(hour - 1) % 12 + 1}:{minute:02}\\text{{ {'ap'[hour >= 12]}m}}",
    "24": lambda hour, minute: f"{hour:02}:{minute:02}:00",
}


@quickly
@given(st.integers(0, 23), st.integers(0, 59), st.integers(1, 1439),
       st.sampled_from(list(TIMES.values())), st.sampled_from(list(TIMES.values())))  # fmt: skip
def test_a_time_of_day_is_one_in_any_notation(agree, hour, minute, later, one, other):
    text = one(hour, minute)
    assert agree(text, other(hour, minute))
    wrong = (60 * hour + minute + later) % 1440
    assert not agree(text, other(*divmod(wrong, 60)))
    assert not agree(text, f"{60 * hour + minute} minutes")
    assert not agree(text, f"{hour + minute / 60} hours")


@briefly
@given(st.integers(1, 99), st.integers(1, 99))
def test_doubled_signs_are_no_sign(agree, a, b):
    for sign in ("--", "- -", "+-", "-+", "++", "−-"):
        for gold in (f"{a}", f"-{a}", f"\\sqrt{{{a * a}}}"):
            assert not agree(f"{sign}{a}", gold), (sign, gold)
        assert not agree(f"{a} {sign} {b}", f"{a + b}")
        assert not agree(f"\\frac{{{sign}{a}}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}")


@quickly
@given(st.integers(1, 9), st.integers(100, 999), st.sampled_from(["\\text", "\\textbf", "\\mbox"]))
def test_a_numeral_does_not_go_on_behind_text_mode(agree, a, b, mode):
    assert agree(f"{mode}{{{b}}}", f"{b}") and agree(f"x = {mode}{{{b}}}", f"{b}")
    for text, value in (
        (f"{a}{mode}{{{b}}}", f"{a}{b}"), (f"{a}{mode}{{ {b}}}", f"{a}{b}"),
        (f"{mode}{{{a}}}{b}", f"{a}{b}"), (f"{mode}{{{a}}}{mode}{{{b}}}", f"{a}{b}"),
        (f"{a}{mode}{{.{b}}}", f"{a}.{b}"), (f"{mode}{{{a}/}}{b}", f"{a}/{b}"),
        (f"{a}{mode}{{ 1/{b}}}", f"{a} 1/{b}"), (f"{mode}{{{a}}}^2", f"{a * a}"),
        (f"{mode}{{{a}}} + {b}", f"{a + b}"),
    ):  # fmt: skip
        assert not agree(text, value), text


@quickly
@given(st.integers(2, 99), st.sampled_from(["cm", "kg", "^\\circ", "inches", "m^2", "apples"]))
def test_a_unit_is_needed_on_both_sides_only_where_units_matter(agree, number, unit):
    for one, other in ((f"{number} {unit}", f"{number}"), (f"{number}", f"{number} {unit}"),
                       (f"{number}\\pi {unit}", f"{number}\\pi")):  # fmt: skip
        if "apples" not in one + other or "pi" not in one:
            assert agree(one, other) and not agree(one, other, units_matter=True)
        assert agree(one, one, units_matter=True)
    assert agree(f"{number}0 mm", f"{number} cm", units_matter=True)


def test_lists_of_words_are_compared_as_lists(agree):
    assert agree("\\{\\text{red}, \\text{blue}\\}", "\\{\\text{blue}, \\text{red}\\}")
    assert agree("red and blue", "\\text{blue}, \\text{red}")
    assert not agree("red and green", "blue, red") and not agree("red", "blue, red")
