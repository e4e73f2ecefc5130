"""What the drawn sources share."""

import pytest

from care_jax.data.drawn import splits_and_repairs
from care_jax.data.drawn.readings import ReadingsSource
from care_jax.data.drawn.synthetic import SyntheticSource
from care_jax.data.drawn.word_problems import WordProblems


@pytest.mark.parametrize(
    ("cue", "written"),
    [
        ("Wait.", "It is 3.Wait. It is 4."),
        (" Wait.", "It is 3. Wait. It is 4."),
        ("\nWait.\n", "It is 3.\nWait.\nIt is 4."),
    ],
)
def test_a_cue_is_joined_as_in_rl_and_followed_by_a_space(cue, written):
    assert "".join(splits_and_repairs.repair("It is 3.", cue, "It is 4.")) == written


@pytest.mark.parametrize("source", [SyntheticSource, ReadingsSource, WordProblems])
def test_an_example_depends_on_seed_and_index_alone(source):
    def content(source, index):
        example = source[index]
        images = [image.tobytes() for image in example.images]
        return example.question, example.response, images

    first, again, other = source(50), source(90), source(50, seed=1)
    for index in (49, 3, 7):
        assert content(first, index) == content(again, index) != content(other, index)


REFUSED = [
    (SyntheticSource, {"num_examples": 0}, "num_examples must be at least 1, got 0"),
    (SyntheticSource, {"split": "dev"}, "split must be one of train, test, got 'dev'"),
    (SyntheticSource, {"teacher_error": 1.5}, r"teacher_error must lie in \[0, 1\], got 1.5"),
    (SyntheticSource, {"cue_share": -0.1}, r"cue_share must lie in \[0, 1\], got -0.1"),
    (ReadingsSource, {"lucky_share": 2.0}, r"lucky_share must lie in \[0, 1\], got 2.0"),
    (WordProblems, {"num_examples": -1}, "num_examples must be at least 1, got -1"),
]


@pytest.mark.parametrize(("source", "options", "message"), REFUSED)
def test_wrong_options_are_refused(source, options, message):
    with pytest.raises(ValueError, match=message):
        source(**{"num_examples": 1} | options)


@pytest.mark.parametrize("source", [SyntheticSource, ReadingsSource, WordProblems])
@pytest.mark.parametrize("index", [3, -1])
def test_an_index_outside_is_refused(source, index):
    with pytest.raises(IndexError, match=rf"index {index} is outside 0\.\.2"):
        _ = source(3)[index]
