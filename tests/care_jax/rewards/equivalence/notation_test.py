"""How answers are written: cleaned and taken apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_jax.rewards.equivalence import assignments
from care_jax.rewards.equivalence.boxes import closing
from care_jax.rewards.equivalence.free_text import final_answer
from care_jax.rewards.equivalence.notation import (
    MAX_CHARS,
    clean,
    has_relation,
    is_sequence,
    split_list,
)
from care_jax.rewards.equivalence.notation import (
    caseless_key as key_of,
)
from care_jax.rewards.equivalence.options import choice_letter

quickly = settings(deadline=None, derandomize=True, max_examples=100)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  7 \n", "7"),
        ("a  b\n c.", "a b c"),
        ("$\\frac12$", "\\frac{1}{2}"),
        ("\\(\\dfrac{1}{ 2 }\\)", "\\frac{1}{2}"),
        ("\x0crac{1}{2}", "\\frac{1}{2}"),
        ("5½", "5\\frac{1}{2}"),
        ("１２", "12"),
        ("−5", "-5"),
        ("2√10", "2\\sqrt{10}"),
        ("x²", "x^2"),
        ("10⁻³", "10^{-3}"),
        ("x₁²", "x_1^2"),
        ("aₙ₊₁", "a_{n+1}"),
        ("log₂8", "log_{2}8"),
        ("√(x+1)", "\\sqrt(x+1)"),
        ("√3.5", "\\sqrt{3.5}"),
        ("∛8", "\\sqrt[3]{8}"),
        ("25℃", "25 degrees C"),
        ("△ABC", "\\triangle ABC"),
        ("3pi", "3\\pi"),
        ("pint", "pint"),
        ("1{,}000", "1,000"),
        ("$5$ and $6$", "5 and 6"),
        ("$$5$$", "5"),
        ("\\$ 5", "$5"),
        ("$\\$5$", "$5"),
        ("$5 and $10", "$5 and $10"),
        ("$x + 1", "x + 1"),
        ("5\\$", "5"),
        ("17°", "17 degrees"),
        ("17^{\\circ}", "17 degrees"),
        ("50\\%", "50%"),
        ("\\text{a \\textbf{b}}", "a b"),
        ("\\left[1,\\,2\\right)", "[1, 2)"),
        ("\\overline{AB}", "AB"),
        ("\\overline{x}", "\\overline{x}"),
        ("{7}", "7"),
        ("The final answer is 7.", "7"),
        ("We find that $x < 3$.", "x < 3"),
        ("It is not $x$.", "not x"),
        ("It is less than $x$.", "less than x"),
        ("It is either two or $x$.", "either two or x"),
        ("x^{\\prime\\prime}", "x''"),
    ],
)
def test_cleaning_leaves_one_notation(text, cleaned):
    assert clean(text) == cleaned
    assert clean(cleaned) == cleaned


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so \\boxed{7} it is", "7"),
        ("\\fbox{\\boxed{7}}", "7"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2}", "1, 2"),
        ("\\boxed{1}. Then \\boxed{2}", "2"),
        ("\\boxed{1}, which is not what was asked for: \\boxed{2}", "2"),
    ],
)
def test_a_box_is_opened_and_boxes_that_few_words_part_are_one_answer(text, content):
    assert clean(text) == content


PIECES = ("pi", " ", "  ", "percent", "pct", "Answer is ", "the answer: ", "7", "1,000", "x", "=",
          ".", "(", ")", "5 1/2", "+")  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
@settings(deadline=None, max_examples=300)
def test_the_short_way_through_cleaning_leads_to_the_same_place(text):
    """A formula that is empty sends a text the long way round."""
    text = text.strip()
    assert clean(text) == clean(text + "\\!")


def test_a_long_answer_is_cut_and_marked_with_its_length():
    assert len(clean("é" * 5000)) < MAX_CHARS + 10
    assert clean("é" * 5000) != clean("é" * 5001)
    assert clean("é" + " " * 5000 + "é") == "é é"


BALANCED = st.recursive(
    st.sampled_from(["", "x", "\\{", "\\}", "\\\\", "1/2"]),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: f"{{{''.join(parts)}}}"),
    max_leaves=8,
)


@quickly
@given(BALANCED, BALANCED, st.text("{}x\\", max_size=5))
def test_a_brace_is_closed_behind_everything_that_opens_inside_it(one, other, rest):
    """Braces behind a backslash are characters."""
    inside = one + other
    assert closing("{" + inside + "}" + rest, 1) == 1 + len(inside)
    assert closing("{" + inside, 1) == -1


def test_keys_forget_case_quotes_and_spaces_but_those_between_numbers():
    assert key_of("'Red Hat'") == key_of("redhat") == key_of("“RED hat”")
    assert key_of("x'") != key_of("x") and key_of('5"') != key_of("5'")
    assert key_of("(a)") == key_of("[A]") == "a"
    assert key_of("(ab)") == "(ab)"
    assert key_of("x + 1") == key_of("x+1")
    assert key_of("1 2") != key_of("12")
    assert key_of("x_1") == key_of("x_{1}") == key_of("x1") and key_of("CO_2") == key_of("CO2")
    assert key_of("x_{12}") == key_of("x12") != key_of("x_12")
    assert key_of("101_2") != key_of("1012") and key_of("log_2x") != key_of("log2x")


ITEMS = st.sampled_from(
    ["1", "-2.5", "x", "a red one", "\\frac{1}{2}", "(3,4)", "f(1; {2})", "[5]"]
)


@quickly
@given(
    st.lists(ITEMS, min_size=2, max_size=5),
    st.sampled_from([",", ", ", " ; "]),
    st.sampled_from(["", "()", "[]", "{}", "[)", "(]"]),
)
def test_a_list_is_its_brackets_and_the_items_between_its_own_separators(items, mark, brackets):
    opening, closing = brackets[:1], brackets[1:]
    assert split_list(opening + mark.join(items) + closing) == (brackets, items)


def test_lists_keep_their_brackets():
    assert split_list("[63, 26]") == ("[]", ["63", "26"])
    assert split_list("(1,2) and (3,4)") == ("", ["(1,2)", "(3,4)"])
    assert split_list(r"\{1, 2\}") == ("{}", ["1", "2"])
    assert split_list("(7") is None
    assert split_list("(7)") is None


def test_commas_and_words_that_stand_alone_make_a_list_of_what_they_part():
    assert split_list("1, 2 and 3") == ("", ["1", "2", "3"])
    assert split_list("1 or 2or3") == ("or", ["1", "2", "3"])
    assert split_list("{7}") == ("{}", ["7"])
    for text in ("", "7", "sandy", "forty", "1,", "1, 2)", "1, (2", "(1,2)(3,4)", "1," * 65):
        assert split_list(text) is None, text


def test_a_sequence_is_plain_values_between_semicolons_alone():
    for text in ("5; 3", "increase; decrease", "(1); \\sqrt{2}"):
        assert is_sequence(text), text
    for text in ("5, 3", "5; 3, 4", "5; 3 and 4", "x = 5; x = 3", "x > 5; 3", "(1,2); (2,1)",
                 "[1;2]", "\\{1;2\\}", "(1;2)", "5"):  # fmt: skip
        assert not is_sequence(text), text


def test_relations_are_all_but_equality():
    for text in ("x < 3", "> 6", "x\\le 3", "\\neq 7", "x != 7", "x\\in A"):
        assert has_relation(text), text
    for text in ("x = 3", "\\left(1\\right)", "\\infty", "3!", "\\approx 7"):
        assert not has_relation(text), text


@quickly
@given(st.text("0123456789.,/%^_{}()[]\\fracsqtxAB=<>+- $\n", max_size=80))
def test_any_text_is_taken_apart_without_an_error(text):
    cleaned = clean(text)
    name, value = assignments.split(cleaned)
    assert name in cleaned and value in cleaned
    found = split_list(cleaned)
    assert found is None or all(item and item in cleaned for item in found[1])
    assert choice_letter(cleaned, 2) in ("", "A", "B")
    assert final_answer(text) in text
