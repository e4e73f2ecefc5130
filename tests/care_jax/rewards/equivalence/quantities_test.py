"""Numbers as answers write them: their exact values, what is none, and when two agree."""

import string
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.rewards.equivalence.quantities import is_close, read_number, split_unit

quickly = settings(deadline=None, derandomize=True, max_examples=50)


def agree(prediction, gold, tolerance=0.0, num_decimals=None):
    numbers = read_number(prediction), read_number(gold)
    return is_close(*numbers, tolerance=tolerance, num_decimals=num_decimals)


def shifted(number, places):
    """The decimal of number / 10^places."""
    digits = f"{abs(number):0{places + 1}}"
    point = len(digits) - places
    return f"{'-' * (number < 0)}{digits[:point]}.{digits[point:]}"


WRITINGS = {
    "decimal": shifted,
    "fraction": lambda number, places: f"{number}/{10**places}",
    "commas": lambda number, places: f"{number:,}/{10**places}",
    "latex": lambda number, places: f"\\frac{{{number}}}{{{10**places}}}",
    "computer": lambda number, places: f"{number}e-{places}",
    "power": lambda number, places: f"{number} \\times 10^{{-{places}}}",
    "brackets": lambda number, places: f"({number}/{10**places})",
    "currency": lambda number, places: f"{'-' * (number < 0)}USD {shifted(abs(number), places)}",
}


@pytest.mark.parametrize("write", WRITINGS.values(), ids=WRITINGS)
@quickly
@given(st.integers(-(10**12), 10**12), st.integers(0, 9))
def test_a_number_is_read_exactly_however_it_is_written(write, number, places):
    text = write(number, places)
    read = read_number(text)
    assert read.value == Fraction(number, 10**places)
    assert (read.unit, read.is_percent) == ("$" if "USD" in text else "", False)


@quickly
@given(st.integers(0, 999), st.integers(1, 99), st.integers(1, 99))
def test_a_mixed_number_is_the_sum_of_its_parts_and_has_a_proper_fraction(whole, top, more):
    bottom = top + more
    value = whole + Fraction(top, bottom)
    assert read_number(f"{whole} {top}/{bottom}").value == value
    assert read_number(f"-{whole}\\frac{{{top}}}{{{bottom}}}").value == -value
    assert read_number(f"{whole} {bottom}/{top}") is None
    assert read_number(f"{whole}\\frac{{{bottom}}}{{{top}}}") is None


def test_commas_and_spaces_group_thousands_alone():
    assert read_number("1,234,567").value == read_number("1 234 567").value == 1234567
    assert read_number("1,234.5").value == Fraction("1234.5")
    for text in ("12,34", "1,2345", "1,23", "01,234", "1 23", "1,,234"):
        assert read_number(text) is None, text


@pytest.mark.parametrize(
    "text",
    ["", ".", "x", "7x", "+-3", "7/0", "1/2/3", "5 times 2", "5 hundred", "about 7", "7 or 8",
     "7 th", "9" * 5000, "1e999999999", "1e-61", "5N", "2GB", "3ABC", "5\\cdot m", "5 B", "5 mV^2",
     "3 tens", "3 sixties", "3 squared", "7 quadrillion", "7 crore", "5 apple", "5 per", "(1,234)",
     "5 unless", "5 s^2", "5g^3"],
)  # fmt: skip
def test_what_is_no_number_as_a_whole_or_a_huge_one_is_not_read(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("1.5 million", 1500000, ""),
        ("2 thousand dollars", 2000, "$"),
        ("5 millions", 5000000, ""),
        ("5 thousandths", Fraction(1, 200), ""),
        ("7 tenths", Fraction(7, 10), ""),
        ("10 centimetres", 10, "cm"),
        ("10 cm^2", 10, "square cm"),
        ("10 sq cm", 10, "square cm"),
        ("10 m3", 10, "cubic m"),
        ("10 ft^3", 10, "cubic ft"),
        ("60 mph", 60, "mi per h"),
        ("60 miles per hour", 60, "mi per h"),
        ("5 m/s", 5, "m per s"),
        ("7 apples", 7, "apples"),
        ("7 times", 7, "times"),
        ("7倍", 7, "times"),
        ("5 hectares", 5, "ha"),
        ("5米每秒", 5, "m per s"),
        ("5千瓦时", 5000, "Wh"),
        ("0.1\\overline{6}", Fraction(1, 6), ""),
        ("$5k", 5000, "$"),
        ("5mn", 5000000, ""),
        ("5 N", 5, "N"),
        ("5N\\cdot m", 5, "N m"),
        ("5 kg\\cdot m/s^{2}", 5, "kg m per square s"),
        ("5 m squared", 5, "square m"),
        ("5kW", 5, "kW"),
        ("5 KPA", 5, "kPa"),
        ("2 k\\Omega", 2, "kΩ"),
        ("25 degrees Celsius", 25, "C"),
        ("25 C", 25, "C"),
        ("3 eighths", Fraction(3, 8), ""),
        ("3 halves", Fraction(3, 2), ""),
        ("3 quarter million", 750000, ""),
        ("5 months", 5, "month"),
        ("$1,234.50", Fraction("1234.5"), "$"),
        ("-$5", -5, "$"),
        ("US$5", 5, "$"),
        ("USD $5", 5, "$"),
        ("€5", 5, "€"),
        ("€€5", 5, "€"),
        ("5 EUR", 5, "€"),
        ("5¢", 5, "cents"),
        ("$5 million", 5000000, "$"),
        ("$5 dollars", 5, "$"),
        ("$5 per hour", 5, "$ per h"),
    ],
)
def test_scales_are_multiplied_and_units_named_by_one_name(text, value, unit):
    read = read_number(text)
    assert (read.value, read.unit) == (value, unit)


def test_a_singular_is_a_unit_after_one_and_below_one_in_a_gold_answer():
    for is_gold in (False, True):
        assert read_number("1 apple", is_gold).unit == "apple"
        assert read_number("1 unknown", is_gold) is None
    assert read_number("1/2 apple", is_gold=True).unit == "apple"
    assert read_number("1/2 apple") is None


# By hand: so many of the second make one of the first.
LENGTHS = [
    ("km", "m", 1000), ("m", "cm", 100), ("cm", "mm", 10), ("mile", "feet", 5280),
    ("yard", "feet", 3), ("foot", "inches", 12),
]  # fmt: skip
OTHERS = [
    ("kg", "g", 1000), ("g", "mg", 1000), ("hour", "minutes", 60), ("minute", "seconds", 60),
    ("L", "mL", 1000), ("dollar", "cents", 100),
]  # fmt: skip
CONVERSIONS = st.tuples(st.sampled_from(LENGTHS), st.sampled_from(["", "^2", "^3"]))
CONVERSIONS |= st.tuples(st.sampled_from(OTHERS), st.just(""))


@quickly
@given(CONVERSIONS, st.integers(1, 10**6))
def test_a_quantity_equals_itself_in_another_unit_and_no_other_number_of_it(conversion, number):
    (large, small, factor), power = conversion
    converted = number * factor ** int(power[1:] or 1)
    assert agree(f"{number} {large}{power}", f"{converted} {small}{power}")
    assert agree(f"{converted} {small}{power}", f"{number} {large}{power}")
    for other in (number, converted + 1):
        assert not agree(f"{number} {large}{power}", f"{other} {small}{power}")


def test_units_of_different_things_never_agree_and_a_missing_one_always():
    for one, other in (
        ("5 cm", "5 kg"),
        ("5 m", "5 m^2"),
        ("5%", "5 kg"),
        ("5 m", "5 m/s"),
        ("5 in", "5 cm"),
    ):
        assert not agree(one, other), (one, other)
        assert agree(one, "5") and agree("5", other)


def test_a_percent_equals_its_number_and_its_share_unless_both_are_percents():
    assert agree("50%", "50") and agree("50%", "0.5") and agree("0.5", "50%")
    assert not agree("50%", "5") and not agree("50%", "0.5%") and not agree("50", "0.5")
    assert not agree("50.4%", "50.1%", num_decimals=1)


@quickly
@given(st.integers(-100, 100), st.integers(-100, 100), st.integers(0, 16))
def test_the_tolerance_is_a_share_of_the_gold_answer(prediction, gold, share):
    is_within = abs(prediction - gold) * 32 <= share * abs(gold)
    assert agree(f"{prediction}", f"{gold}", tolerance=share / 32) == is_within


def test_both_numbers_are_rounded_to_the_decimals_asked_for():
    assert agree("0.67", "2/3", num_decimals=2) and agree("0.674", "2/3", num_decimals=2)
    assert not agree("0.7", "2/3", num_decimals=2)


def test_without_decimals_asked_for_only_an_endless_fraction_is_rounded_to_six():
    assert agree("0.333333", "1/3") and agree("1/3", "0.333333")
    for other in ("0.33333", "3333333/10000000"):
        assert not agree(other, "1/3") and not agree("1/3", other)
    assert not agree("0.1250001", "1/8") and not agree("0.1250001", "0.125")


def test_a_unit_behind_an_expression_is_no_part_of_it():
    assert split_unit("12\\pi cm ^2") == ("12\\pi", "square cm")
    assert split_unit("6\\sqrt{2}cm") == ("6\\sqrt{2}", "cm")
    assert split_unit("x m") == ("x", "m")
    assert split_unit("6\\sqrt{2} N") == ("6\\sqrt{2}", "N")
    assert split_unit("\\sqrt{3} m/s^2") == ("\\sqrt{3}", "m per square s")
    for text in ("(x + 3 cm)", "2(\\sqrt{3} m/s)", "\\frac{2}{3 cm^2}", "5 cm:2 m"):
        assert split_unit(text) == (text, ""), text
    for text in ("2m", "cm", "5\\min", "a + m", "7", "6\\sqrt{2}N", "\\frac{1}{2}mV^2"):
        assert split_unit(text) == (text, "")


TEXTS = st.text(string.ascii_letters + string.digits + " .,/%^_{}()[]\\=<>+-$€½", max_size=80)


@quickly
@given(TEXTS)
def test_any_text_is_read_or_refused_and_what_is_read_equals_itself(text):
    read = read_number(text)
    assert read is None or is_close(read, read, tolerance=0.0, num_decimals=None)
    body, unit = split_unit(text)
    assert (body == text) == (not unit) and body in text
