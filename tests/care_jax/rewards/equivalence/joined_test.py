"""Dates, ranges, scores, sizes and ratios are their numerals; times of day are points in time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.rewards.equivalence.joined import read_clock, read_compound, same_joined

quickly = settings(deadline=None, derandomize=True, max_examples=50)
NUMERALS = st.lists(st.integers(0, 3000), min_size=2, max_size=4)


@quickly
@given(NUMERALS, st.sampled_from("-/:x"), st.integers(1, 9), st.data())
def test_joined_numerals_are_the_same_only_one_by_one(numerals, joint, error, data):
    text = joint.join(map(str, numerals))
    assert same_joined(text, f" {joint} ".join(f"{n:,}" for n in numerals)) is True
    index = data.draw(st.integers(0, len(numerals) - 1))
    wrong = [n + error * (i == index) for i, n in enumerate(numerals)]
    assert same_joined(text, joint.join(map(str, wrong))) is False
    assert same_joined(text, text + f"{joint}1") is False
    assert same_joined(text, text.replace(joint, "-" if joint != "-" else "/")) is False


@quickly
@given(st.lists(st.integers(1, 300), min_size=2, max_size=4), st.integers(2, 9))
def test_only_a_ratio_may_be_a_multiple(numerals, factor):
    multiple = [factor * n for n in numerals]
    is_time = all(read_clock(":".join(map(str, each))) for each in (numerals, multiple))
    for joint in "-/:x":
        one, other = (joint.join(map(str, each)) for each in (numerals, multiple))
        assert same_joined(one, other) is (joint == ":" and not is_time), (one, other)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("18 to 24", "18-24", True),
        ("3 by 5", "3x5", True),
        ("$30k-$40k", "$30,000-$40,000", True),
        ("$30k-$40k", "$40k-$50k", False),
        ("30-49%", "31-50%", False),
        ("10:20", "20:40", False),
        ("0:3", "0:4", False),
        ("10%-20%", "$10-$20", False),
        ("2/3:1", "2:3", None),
        ("3k-2k", "2k-1k", None),
        ("7-2", "5", None),
        ("-7-2", "-8-1", None),
        ("x-2", "x-2", None),
        ("1+2", "2+1", None),
    ],
)
def test_ranges_and_sizes_are_read_and_differences_are_not(one, other, is_same):
    assert same_joined(one, other) is is_same


@pytest.mark.parametrize(
    ("text", "seconds", "is_certain"),
    [
        ("3:15", 11700, False),
        ("3:05", 11100, True),
        ("3:15 PM", 54900, True),
        ("12 a.m.", 0, True),
        ("03:15:01", 11701, True),
        ("noon", 43200, True),
        ("9时30分", 34200, True),
        ("下午3点", 54000, True),
    ],
)
def test_a_time_of_day_is_read_in_seconds(text, seconds, is_certain):
    assert read_clock(text) == (seconds, is_certain)


@quickly
@given(st.integers(0, 99), st.integers(1, 59), st.integers(1, 59))
def test_a_sum_of_ever_smaller_units_is_one_quantity(hours, minutes, seconds):
    value = read_compound(f"{hours} h {minutes} min {seconds} s").value
    assert value * 3600 == 3600 * hours + 60 * minutes + seconds
    assert read_compound(f"{hours} degrees {minutes}' {seconds}''").value == value
    for text in (f"{hours} min {minutes} h", f"{hours} h {minutes} kg", f"{hours} h {minutes}",
                 f"{hours} h", f"{hours} h {minutes} h", f"{hours}' {minutes}''"):  # fmt: skip
        assert read_compound(text) is None, text


def test_no_other_text_is_a_time():
    for text in ("", "7", "25:00", "3:60", "13 PM", "3.15", "3:1"):
        assert read_clock(text) is None, text
