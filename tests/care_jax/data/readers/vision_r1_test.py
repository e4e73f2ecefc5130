"""Vision-R1-cold: two arrays of differing columns, rationales between our tags."""

import pytest

from care_jax.batch import Unusable
from care_jax.data.readers import vision_r1

THOUGHT = "<think>\nCount them: 1, 2, 3.\n</think>\n\n"


def llava(response, **changes):
    return {
        "id": "sqa/1",
        "image": "sqa/1.png",
        "conversations": [
            {"from": "human", "value": "<image>\nHow many?"},
            {"from": "gpt", "value": response},
        ],
    } | changes


def mulberry(response, question="Which <image>?"):
    return {
        "images": ["mulberry/2.png"],
        "conversations": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": response},
        ],
    }


@pytest.fixture
def release(tmp_path, write_json):
    def write(*rows):
        write_json(tmp_path / "vision_r1_llava_cot_full.json", [r for r in rows if "image" in r])
        write_json(
            tmp_path / "vision_r1_mulberry_sft_full.json", [r for r in rows if "images" in r]
        )
        return vision_r1.open_rows(str(tmp_path), images="", think_tag="think")

    return write


def test_both_arrays_are_one_source(release, tmp_path):
    rows = release(llava(THOUGHT + "3"), mulberry(THOUGHT + "The answer is B."))
    assert len(rows) == 2
    assert (rows[0].id, rows[0].question) == ("sqa/1", "<image>\nHow many?")
    assert rows[0].response == "<think>Count them: 1, 2, 3.</think><answer>3</answer>"
    assert rows[0].rationale == "Count them: 1, 2, 3." and rows[0].answer == "3"
    assert rows[0].images == (tmp_path / "sqa/1.png",)
    assert rows[1].id == "vision_r1_mulberry_sft_full-1"
    assert rows[1].question == "Which <image>?" and rows[1].answer == "B"


@pytest.mark.parametrize(
    ("conclusion", "answer"),
    [
        ("**Final Answer:** B", "B"),
        ("So it is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("<answer> 7 </answer>", "7"),
        ("The answer is a red car.", "a red car"),
        ("Yes", "Yes"),
        ("The answer is 30°.", "30°"),
        ("So x ≥ 2", "x ≥ 2"),
        ("It is **$\\dfrac12$**.", "\\dfrac12"),
        ("It is \\(x^2\\).", "x^2"),
        ("**Answer:** $x$ and $y$.", "$x$ and $y$"),
    ],
)
def test_answer_is_what_the_conclusion_settles_on(release, conclusion, answer):
    assert release(llava(THOUGHT + conclusion))[0].answer == answer


def test_tag_is_that_of_the_configuration(release, tmp_path):
    release(llava(THOUGHT + "3"))
    rows = vision_r1.open_rows(str(tmp_path), images="/pictures", think_tag="reasoning")
    assert rows[0].response.startswith("<reasoning>Count") and "</reasoning>" in rows[0].response
    assert str(rows[0].images[0]) == "/pictures/sqa/1.png"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (llava("3"), "not exactly one rationale"),
        (llava("<think>never closed"), "not exactly one rationale"),
        (llava(THOUGHT + THOUGHT + "3"), "not exactly one rationale"),
        (llava("Sure. " + THOUGHT + "3"), "not exactly one rationale"),
        (llava("<think>one</think>two</think>3"), "not exactly one rationale"),
        (llava("<think> </think>3"), "rationale empty"),
        (llava(THOUGHT), "no answer"),
        (llava(THOUGHT + "**"), "no answer"),
        (llava(THOUGHT + "word " * 200), "answer longer than 300 characters"),
        (llava(THOUGHT + "3", conversations=[]), "not one question and one response"),
        (llava(THOUGHT + "3", conversations=None), "no conversation"),
        (mulberry(THOUGHT + "3", question="<image><image>?"), "images and placeholders differ"),
        (llava(THOUGHT + "3", image=5), "image is neither a path nor bytes"),
    ],
)
def test_bad_rows_are_unusable(release, row, reason):
    rows = release(llava(THOUGHT + "1"), row, mulberry(THOUGHT + "1"))
    with pytest.raises(Unusable, match=reason):
        _ = rows[1]
